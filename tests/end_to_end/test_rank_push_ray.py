"""Ranks that are Ray actors push, and the end of one ends the push on the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout import DeploymentHandle, RankFailure, RolloutConfig, launch
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.routes.buffers import remove_leftovers
from tests.support.processes import wait_until
from tests.support.ray_worlds import RayWorld

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.embedded,
    pytest.mark.timeout(400),
]
NUM_RANKS = 3
RANK_TIMEOUT_S = 4  # in rank_trainer.py


class Rank:
    """One rank; its commands are those of ``rank_trainer.Trainer``."""

    def __init__(self, run_id: str, model_path: str, meet: str, rank: int) -> None:
        import torch
        import torch.distributed as dist

        from tests.end_to_end.rank_trainer import Trainer

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meet}",
            rank=rank,
            world_size=NUM_RANKS,
            timeout=timedelta(seconds=60),
        )
        self.trainer = Trainer(run_id, model_path)

    def do(self, command: str, arguments: Mapping[str, Any]) -> tuple[int, str, str, float]:
        """The version, or kind and text of the error; and the seconds."""
        started = time.monotonic()
        version, kind, text = 0, "", ""
        try:
            version = getattr(self.trainer, command)(**arguments).weight_version
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        return version, kind, text, time.monotonic() - started


class Ranks:
    """The actors of a trainer."""

    def __init__(self, world: RayWorld, run: DeploymentHandle, meet: Path) -> None:
        self.ray = world.ray
        self._world = world
        self._config = run.config
        self._start(meet)

    def _start(self, meet: Path) -> None:
        model_path = self._config.servers["policy"].model_path
        kind = self.ray.remote(num_cpus=1)(Rank)
        self.actors = [
            kind.remote(self._config.run_id, model_path, str(meet), rank)
            for rank in range(NUM_RANKS)
        ]

    def do(self, command: str, **arguments: Any) -> list[Any]:
        """What each rank returns; of one that was killed, None."""
        calls = [actor.do.remote(command, arguments) for actor in self.actors]
        return [self._result(call) for call in calls]

    def _result(self, call: Any) -> Any:
        try:
            return self.ray.get(call, timeout=150)
        except self.ray.exceptions.RayActorError:
            return None

    def restart(self, meet: Path) -> None:
        """The trainer begins again with new actors."""
        self.end()
        self._start(meet)

    def end(self) -> None:
        pids = self._world.pids("Rank")
        for actor in self.actors:
            self.ray.kill(actor)
        assert wait_until(lambda: not any(map(psutil.pid_exists, pids)), 30)
        remove_leftovers(Path("/dev/shm"))


@pytest.fixture(scope="module")
def run(
    ray_cluster: RayWorld, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    folder = tmp_path_factory.mktemp("run")
    model_path = make_tiny_model(folder / "tiny", architecture="qwen3", tie_embeddings=True)
    server = {
        "model_path": str(model_path),
        "groups": {"main": {"num_engines": 1, "engine": {"kind": "embedded"}}},
        "weights": {"bucket_bytes": 100_000},
    }
    config = {"run_id": "ranks", "log_dir": str(folder), "servers": {"policy": server}}
    with launch(RolloutConfig.from_dict(config), backend="ray") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def ranks(
    ray_cluster: RayWorld, run: DeploymentHandle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """Actors that are new after one was killed."""
    found = Ranks(ray_cluster, run, tmp_path_factory.mktemp("ranks") / "meet")
    yield found
    found.end()


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.chaos)])
def test_an_actor_that_is_killed_at_a_bucket_ends_the_push_on_the_others(
    run: DeploymentHandle, ranks: Ranks, tmp_path: Path, rank: int
) -> None:
    policy = run["policy"]
    before = policy.weight_version
    assert [one[0] for one in ranks.do("push", seed=1)] == [before + 1] * NUM_RANKS
    found = ranks.do("dies", rank=rank)
    assert found[rank] is None
    others = [one for one in found if one is not None]
    assert len(others) == NUM_RANKS - 1
    for _, kind, text, seconds in others:
        assert kind == RankFailure.__name__
        assert f"rank {rank} " in text
        assert seconds < 4 * RANK_TIMEOUT_S
    assert len({text for _, _, text, _ in others}) == 1, others
    assert policy.status().result(30).gate != "open"
    ranks.restart(tmp_path / "meet")
    assert [one[0] for one in ranks.do("push", seed=4)] == [before + 2] * NUM_RANKS
    assert policy.status().result(30).gate == "open"
