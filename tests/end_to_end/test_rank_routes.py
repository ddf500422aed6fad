"""One push of two ranks reaches engines by different routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout import DeploymentHandle, launch
from tests.support.rank_processes import Ranks, served_seed, tiny_policy

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    """Two engines on this host."""
    with launch(tiny_policy(tmp_path_factory.mktemp("run"), num_engines=2)) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def ranks(run: DeploymentHandle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(run, tmp_path_factory.mktemp("ranks"), 2)
    yield found
    found.end()


def test_an_engine_here_gets_shared_memory_and_one_elsewhere_another_carrier(
    run: DeploymentHandle, ranks: Ranks
) -> None:
    """The other engine is on another host by a double of the server's status."""
    before = run["policy"].weight_version
    cases = [
        ("127.0.0.1", "by_value", False),
        ("127.0.0.2", "distributed", False),
        ("127.0.0.2", "distributed", True),
        ("127.0.0.1", "by_value", True),
    ]
    for number, (own_host, way, is_streamed) in enumerate(cases, 1):
        said = ranks.do(
            "push_far",
            far="main-1",
            own_host=own_host,
            seed=50 + number,
            is_streamed=is_streamed,
        )
        assert [one.get("version") for one in said] == [before + number] * 2, said
        assert said[0]["ways"] == {"main-0": "shared_memory 0", "main-1": way}
        served_seed(run, 50 + number)
        # Both ranks have written for the engine that is here.
        assert all(one["shm_bytes"] for one in said)


def test_a_mixed_push_after_a_failed_one_serves(run: DeploymentHandle, ranks: Ranks) -> None:
    before = run["policy"].weight_version
    said = ranks.do("raises", rank=1)
    assert "rank 1: ValueError" in said[0]["error"]
    said = ranks.do("push_far", far="main-0", own_host="127.0.0.2", seed=60)
    assert [one.get("version") for one in said] == [before + 1] * 2, said
    assert said[1]["ways"] == {}
    assert said[0]["ways"] == {"main-0": "distributed", "main-1": "shared_memory 0"}
    served_seed(run, 60)
