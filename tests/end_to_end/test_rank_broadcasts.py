"""Rank 0 broadcasts for all ranks of a trainer.

The ranks are on several hosts as far as they know, and so are the engines.
"""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout import DeploymentHandle, launch
from rollout.core.types import EngineStatus
from tests.support.engine_keys import request_to
from tests.support.processes import wait_until
from tests.support.rank_processes import BUCKET_BYTES, Ranks, errors, served_seed, tiny_policy

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(300)]

RANK_TIMEOUT_S = 4
# Of three ranks, the last two share a host.
FAR: dict[str, Any] = {"own_host": "127.0.0.2", "hosts": [0, 1, 1]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    health = {"probe_interval_s": 0.5, "backoff_s": 0.1, "max_restarts": 100}
    policy = tiny_policy(tmp_path_factory.mktemp("run"), num_engines=2, health=health)
    with launch(policy) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def ranks(run: DeploymentHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Three ranks that outlive the faults of all tests."""
    found = Ranks(run, tmp_path_factory.mktemp("ranks"), 3)
    yield found
    found.end()


def push(ranks: Ranks, seed: int, far: str = "main-1", **more: Any) -> list[dict[str, Any]]:
    """A push to engines one of which is on another host than all ranks, or all are."""
    return ranks.do("push_far", far=far, seed=seed, **FAR, **more)


def serves(run: DeploymentHandle) -> bool:
    status = run["policy"].status().result(30)
    engines = status.groups[0].engines
    return all(engine.pid and not engine.fence_reason for engine in engines)


def the_next_push_works(run: DeploymentHandle, ranks: Ranks, seed: int) -> None:
    assert wait_until(lambda: serves(run), 60)
    said = push(ranks, seed)
    assert [one.get("version") for one in said] == [run["policy"].weight_version] * 3, said
    served_seed(run, seed)


def groups_of_engines(run: DeploymentHandle) -> list[list[str]]:
    """The groups that each engine is in."""
    found = []
    for engine in run["policy"].status().result(30).groups[0].engines:
        with urllib.request.urlopen(request_to(engine, "/server_info"), timeout=30) as reply:
            found.append(json.load(reply)["weights_update_groups"])
    return found


def bytes_sent(said: list[dict[str, Any]]) -> list[int]:
    """Of each rank."""
    stages = [stage for stage in said[0]["stages"] if stage["stage"] == "copy"]
    return [stage["num_bytes"] for stage in sorted(stages, key=lambda one: one["rank"])]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_rank_0_broadcasts_what_all_ranks_have_gathered(
    run: DeploymentHandle, ranks: Ranks, is_streamed: bool
) -> None:
    before = run["policy"].weight_version
    said = push(ranks, 70, far="all", is_streamed=is_streamed)
    assert [one.get("version") for one in said] == [before + 1] * 3, said
    assert said[0]["ways"] == {"all": "ByBroadcast"}
    served_seed(run, 70)
    whole, *others = bytes_sent(said)
    assert whole > BUCKET_BYTES
    assert others == [0, 0]


def test_broadcasts_and_files_reach_engines_in_one_push(
    run: DeploymentHandle, ranks: Ranks
) -> None:
    said = push(ranks, 71)
    assert said[0]["ways"] == {"main-0": "shared_memory 0", "main-1": "distributed"}
    served_seed(run, 71)


def test_the_group_is_kept_from_push_to_push(run: DeploymentHandle, ranks: Ranks) -> None:
    the_next_push_works(run, ranks, 72)
    before = groups_of_engines(run)
    assert [len(names) for names in before] == [0, 1]
    the_next_push_works(run, ranks, 73)
    assert groups_of_engines(run) == before
    # Wherever the ranks are.
    said = ranks.do("push_far", far="main-1", own_host="127.0.0.2", seed=74)
    assert said[0].get("version"), said
    served_seed(run, 74)
    assert groups_of_engines(run) == before


def test_rank_0_broadcasts_deltas(run: DeploymentHandle, ranks: Ranks) -> None:
    sent = []
    for seed, payload in ((75, "all"), (76, "main-1"), (76, "main-1")):
        said = push(ranks, seed, far="all", encoding="delta")
        assert said[0].get("version"), said
        assert said[0]["ways"][payload] == (
            "ByBroadcast" if payload == "all" else "distributed delta"
        )
        served_seed(run, seed)
        sent.append(bytes_sent(said))
    whole = sent[0][0]
    assert sent[1] == [whole, 0, 0], "all elements have changed"
    assert 0 < sent[2][0] < whole / 10, "none has"


def test_a_broadcast_that_raises_anywhere_ends_the_push_on_all_ranks(
    run: DeploymentHandle, ranks: Ranks
) -> None:
    for number in itertools.count():
        said = push(ranks, 80, fault={"number": number, "does": "raises"})
        if "version" in said[0]:
            break  # it was not called so often
        assert len(errors(said)) == 1, said
        assert "the trainer could not make a bucket: a bad cable" in said[0]["error"]
        assert max(one["seconds"] for one in said) < 2 * RANK_TIMEOUT_S
        assert wait_until(lambda: groups_of_engines(run) == [[], []], 10)
        the_next_push_works(run, ranks, 81)
    assert number >= 2


def test_a_frozen_rank_0_ends_the_push_of_the_others(run: DeploymentHandle, ranks: Ranks) -> None:
    the_next_push_works(run, ranks, 84)  # with both engines, one of them by broadcast
    frozen = psutil.Process(ranks.processes[0].pid)
    fault = {"does": "stops"}
    said = ranks.do_without(0, "push_far", frozen.resume, far="main-1", seed=85, fault=fault, **FAR)
    assert len(errors(said[1:])) == 1, said
    assert "rank 0 has sent nothing" in said[1]["error"]
    assert max(one["seconds"] for one in said[1:]) < 2.5 * RANK_TIMEOUT_S
    the_next_push_works(run, ranks, 86)


@pytest.mark.parametrize(
    ("number", "far"),
    [
        (0, "main-1"),
        (1, "all"),
        pytest.param(0, "all", marks=pytest.mark.chaos),
        pytest.param(1, "main-1", marks=pytest.mark.chaos),
    ],
)
def test_an_engine_that_is_killed_in_a_broadcast_ends_it_on_all_ranks(
    run: DeploymentHandle, ranks: Ranks, number: int, far: str
) -> None:
    def engine() -> EngineStatus:
        return run["policy"].status().result(30).groups[0].engines[1]

    the_next_push_works(run, ranks, 86)  # with the group, so that the fault comes soon
    pid = engine().pid
    said = push(ranks, 87, far, fault={"number": number, "does": "kills", "pid": pid})
    assert len(errors(said)) == 1, said
    # Without one, the server has fenced the engine first, and the push is that of the other.
    assert "broadcast in" in said[0].get("error", "broadcast in")
    assert max(one["seconds"] for one in said) < 3 * RANK_TIMEOUT_S
    # The other engine continues with the next push.  Then the group serves, and restarts this one.
    said = push(ranks, 88, far)
    assert [one.get("version") for one in said] == [run["policy"].weight_version] * 3, said
    assert wait_until(lambda: engine().pid not in (None, pid), 60)
    the_next_push_works(run, ranks, 89)


@pytest.mark.parametrize(
    ("task", "number"),
    [("join", 0), ("send", 0), pytest.param("send", 1, marks=pytest.mark.chaos)],
)
def test_a_rank_0_that_is_killed_in_a_broadcast_ends_the_push_on_the_others(
    run: DeploymentHandle, ranks: Ranks, tmp_path: Path, task: str, number: int
) -> None:
    """The trainer begins again with new processes, and the engines take their push."""
    if task == "join":  # the kept group would be used
        push(ranks, 88, far="all")
    try:
        said = push(ranks, 89, fault={"task": task, "number": number, "does": "dies"})
        assert said[0] == {}
        assert len(errors(said[1:])) == 1, said
        assert "rank 0 " in said[1]["error"]
        assert max(one["seconds"] for one in said[1:]) < 3 * RANK_TIMEOUT_S
    finally:
        ranks.restart(tmp_path)
    the_next_push_works(run, ranks, 90)
