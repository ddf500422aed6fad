"""Faults in a push from every rank, over real gloo ranks: all of them end with one named error.

``tests/support/rank_kills.py`` does it at random moments.  A silent rank is 0 in one test and 1 in
others; all: ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_rank_faults.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rollout import DeploymentHandle, launch
from tests.support.processes import program, wait_until
from tests.support.rank_processes import Ranks, errors, served_seed, tiny_policy
from tests.support.served_fakes import SMALL_BUCKETS, config

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(300)]

RANK_TIMEOUT_S = 4
IN_CHAOS = pytest.mark.chaos


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.chaos)])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    folder = tmp_path_factory.mktemp("run")
    health = {"probe_interval_s": 0.5, "backoff_s": 0.1, "max_restarts": 100}
    tied = request.param == "tied"
    with launch(tiny_policy(folder, tie_embeddings=tied, health=health)) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def ranks(run: DeploymentHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks that outlive the faults of all tests."""
    found = Ranks(run, tmp_path_factory.mktemp("ranks"), 2)
    yield found
    found.end()


def the_next_push_works(run: DeploymentHandle, ranks: Ranks, seed: int) -> None:
    said = ranks.do("push", seed=seed)
    assert [one.get("version") for one in said] == [run["policy"].weight_version] * 2, said
    assert wait_until(lambda: run["policy"].status().result(30).gate == "open", 10)
    served_seed(run, seed)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=IN_CHAOS), 1])
def test_a_rank_that_never_comes_ends_the_push_on_the_other(
    run: DeploymentHandle, ranks: Ranks, rank: int
) -> None:
    said = ranks.do_without(rank, "stays_away", rank=rank)
    assert len(errors(said)) == 1, said
    assert f"rank {rank} " in said[0]["error"]
    assert said[1 - rank]["seconds"] < 3 * RANK_TIMEOUT_S
    assert run["policy"].status().result(30).gate == "open"
    the_next_push_works(run, ranks, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_outside_of_a_call_ends_the_next_push_of_the_other(
    run: DeploymentHandle, ranks: Ranks, rank: int
) -> None:
    said = ranks.do("leaves", rank=rank)
    assert "a bad batch" in said[rank]["error"]
    # The store of the messages ends with the pusher of rank 0, sometimes before its last message.
    reasons = [f"rank {rank} has left: ValueError: a bad batch", "rank 0 has ended"]
    assert any(reason in said[1 - rank]["error"] for reason in reasons[: 2 - rank]), said
    assert said[1 - rank]["seconds"] < 30
    assert run["policy"].status().result(30).gate == "open"
    the_next_push_works(run, ranks, 3)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=IN_CHAOS), 1])
def test_a_rank_that_is_late_inside_a_bucket_ends_the_push(
    run: DeploymentHandle, ranks: Ranks, rank: int
) -> None:
    said = ranks.do_without(rank, "waits", rank=rank)
    assert len(errors(said)) == 1, said
    assert f"rank {rank} " in said[0]["error"]
    assert said[1 - rank]["seconds"] < 2.5 * RANK_TIMEOUT_S
    the_next_push_works(run, ranks, 3)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=IN_CHAOS)])
def test_a_rank_that_is_frozen_ends_the_push_on_the_other(
    run: DeploymentHandle, ranks: Ranks, rank: int
) -> None:
    frozen = psutil.Process(ranks.processes[rank].pid)
    said = ranks.do_without(rank, "stops", frozen.resume, rank=rank)
    assert len(errors(said)) == 1, said
    assert f"rank {rank} " in said[0]["error"]
    assert said[1 - rank]["seconds"] < 2.5 * RANK_TIMEOUT_S
    the_next_push_works(run, ranks, 4)


@pytest.mark.parametrize(
    ("rank", "is_before_gather"),
    [
        (0, False),
        (1, True),
        pytest.param(0, True, marks=IN_CHAOS),
        pytest.param(1, False, marks=IN_CHAOS),
    ],
)
def test_a_generator_that_raises_ends_the_push_on_all_ranks(
    run: DeploymentHandle, ranks: Ranks, rank: int, is_before_gather: bool
) -> None:
    said = ranks.do("generator_raises", rank=rank, at=9, is_before_gather=is_before_gather)
    assert len(errors(said)) == 1, said
    assert f"rank {rank}: ValueError: no weights for" in said[0]["error"]
    # The other is in a gather of the generator's own group, whose deadline is 2 of the ranks'.
    assert said[rank]["seconds"] < 2 * RANK_TIMEOUT_S
    assert said[1 - rank]["seconds"] < 5 * RANK_TIMEOUT_S
    the_next_push_works(run, ranks, 5)


@pytest.mark.parametrize(
    ("kind", "odd"), [("plain", 0), ("plain", 1), ("streamed", 1), ("replicated", 1)]
)
def test_a_replica_out_of_step_is_refused_on_all_ranks(
    run: DeploymentHandle, ranks: Ranks, odd: int, kind: str
) -> None:
    the_next_push_works(run, ranks, 11)
    said = ranks.do("replica", seed=12, odd=odd, added=1e-3, kind=kind)
    assert len(errors(said)) == 1, said
    assert said[0]["type"] == "WeightMismatch"
    assert "rank 1 has other values of tensor '" in said[0]["error"]
    assert run["policy"].status().result(30).gate == "open"
    served_seed(run, 11)
    said = ranks.do("replica", seed=12, odd=-1, added=0.0, kind=kind)
    assert [one.get("version") for one in said] == [run["policy"].weight_version] * 2, said
    served_seed(run, 12)


def test_nan_on_one_rank_is_refused_on_all_ranks(run: DeploymentHandle, ranks: Ranks) -> None:
    the_next_push_works(run, ranks, 13)
    said = ranks.do("replica", seed=14, odd=1, added=None)
    assert len(errors(said)) == 1, said
    assert "rank 1: 1 of " in said[0]["error"]
    assert "are NaN or infinite" in said[0]["error"]
    served_seed(run, 13)


def test_a_refused_version_is_refused_on_all_ranks(run: DeploymentHandle, ranks: Ranks) -> None:
    the_next_push_works(run, ranks, 7)
    version = run["policy"].weight_version
    said = ranks.do("push", seed=8, version=version - 1)
    assert len(errors(said)) == 1, said
    assert f"{version - 1}" in said[0]["error"]
    assert max(one["seconds"] for one in said) < RANK_TIMEOUT_S
    assert run["policy"].status().result(30).gate == "open"
    served_seed(run, 7)
    the_next_push_works(run, ranks, 9)


@pytest.mark.parametrize("tensor", [1, pytest.param(9, marks=IN_CHAOS), 23])
def test_an_engine_that_is_killed_in_a_bucket_ends_the_push_on_all_ranks(
    run: DeploymentHandle, ranks: Ranks, tensor: int
) -> None:
    # A restarted engine has the checkpoint, so it is stale only if that is not what is served.
    the_next_push_works(run, ranks, 9)
    (engine,) = run["policy"].status().result(30).groups[0].engines
    said = ranks.do("kills", pid=engine.pid, tensor=tensor)
    assert len(errors(said)) == 1, said
    assert engine.engine_id in said[0]["error"]
    assert max(one["seconds"] for one in said) < 3 * RANK_TIMEOUT_S

    def is_back() -> bool:
        (now,) = run["policy"].status().result(30).groups[0].engines
        return now.pid not in (None, engine.pid) and now.is_stale

    assert wait_until(is_back, 60)
    the_next_push_works(run, ranks, 10)


LAUNCHER = """
import signal, sys
from pathlib import Path
from rollout.runtime.local import launch_local
from tests.support.served_fakes import launched
from tests.support.served_fakes import SMALL_BUCKETS
with launched(launch_local, Path(sys.argv[1]), server=SMALL_BUCKETS, run_id=sys.argv[2]):
    print("launched", flush=True)
    signal.pause()
"""


def test_the_end_of_the_server_in_a_push_ends_it_on_all_ranks(tmp_path: Path) -> None:
    for run_id, command in (("one", "kills"), ("two", "push")):
        ranks_folder = tmp_path / f"ranks-{run_id}"
        ranks_folder.mkdir()
        settings = config(tmp_path, server=SMALL_BUCKETS, run_id=run_id)
        with program("-c", LAUNCHER, str(tmp_path), run_id) as server:
            server.wait_for("launched", 60)
            ranks = Ranks(SimpleNamespace(config=settings), ranks_folder, 2)
            try:
                if command == "push":
                    assert [one.get("version") for one in ranks.do("push", seed=1)] == [1, 1]
                    continue
                said = ranks.do("kills", pid=server.process.pid, tensor=2)
                assert len(errors(said)) == 1, said
                assert said[0]["type"] == "ActorLost"
                assert max(one["seconds"] for one in said) < 3 * RANK_TIMEOUT_S
            finally:
                ranks.end()
