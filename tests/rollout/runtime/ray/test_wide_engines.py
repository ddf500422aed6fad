"""Engines over several nodes: one process on each, one engine to everybody else."""

import os
import signal
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.launch import AttachedEngine, EngineSpec, LocalEngine, LocalLauncher
from engines.protocol.errors import EngineNotReady
from rollout.config import RolloutConfig
from rollout.core.errors import ConfigError, PhaseFailed, PlacementError
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.builders import push
from tests.support.processes import wait_until
from tests.support.ray_worlds import NUM_GPUS, RayWorld, World, stub_world
from tests.support.served_fakes import TIMEOUT_S, ServedEngine, config, launched
from tests.support.waits import forever

WIDE = {"engine": {"kind": "fake", "nodes": 2, "gpus": 2 * NUM_GPUS}}


@contextmanager
def served(world: World, whole: RolloutConfig) -> Iterator[ServerHandle]:
    handle = world.load("launch").launch_ray(whole, launcher=LocalLauncher())
    try:
        yield handle["policy"]
    finally:
        handle.stop()


def logs_of(folder: Path) -> set[str]:
    return {one.name for one in (folder / "run" / "policy").glob("*.log*")}


def environment(pid: int) -> dict[str, str]:
    fields = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(one.decode().partition("=")[::2] for one in fields if b"=" in one)


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_each_node_runs_one_process_with_its_rank_and_gpus_and_where_they_meet(
    world: World, tmp_path: Path
) -> None:
    with (
        world.more_nodes(1, CPU=8, GPU=NUM_GPUS),
        served(world, config(tmp_path, {"main": WIDE})) as policy,
    ):
        (engine,) = policy.status().result(TIMEOUT_S).groups[0].engines
        first, second = (one.pid for one in engine.processes)
        assert engine.pid == first
        lines = command_line(first), command_line(second)
        assert [flag(line, "--node-rank") for line in lines] == ["0", "1"]
        assert [flag(line, "--nnodes") for line in lines] == ["2", "2"]
        assert len({flag(line, "--dist-init-addr") for line in lines}) == 1
        assert flag(lines[0], "--port") == str(engine.endpoint.port)
        gpus = [environment(pid)["CUDA_VISIBLE_DEVICES"] for pid in (first, second)]
        assert gpus == ["0,1,2,3", "0,1,2,3"]
        assert logs_of(tmp_path) == {"main-0.log", "main-0.log.node-1"}
        policy.offload().result(TIMEOUT_S)
        assert policy.push(push(1)).result(TIMEOUT_S).weight_version == 1
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (first, second)), 5)


@pytest.mark.ray
@pytest.mark.chaos
def test_the_end_of_one_node_is_the_end_of_the_engine_and_it_comes_back_whole(
    ray_cluster: RayWorld, tmp_path: Path
) -> None:
    world = ray_cluster
    health = {"probe_interval_s": 0.2, "probe_timeout_s": 2.0, "backoff_s": 0.1}
    whole = config(tmp_path, {"main": {"engine": {"kind": "fake", "nodes": 2}}})
    whole = with_health(whole, health)
    with served(world, whole) as policy:

        def processes() -> list[int]:
            (engine,) = policy.status().result(TIMEOUT_S).groups[0].engines
            return [] if engine.fence_reason else [one.pid for one in engine.processes]

        before = processes()
        world.crash_newest("EngineActor")
        assert wait_until(lambda: len(set(processes()) - set(before)) == 2, TIMEOUT_S)
        assert not any(Path(f"/proc/{pid}").exists() for pid in before)
        policy.offload().result(TIMEOUT_S)
        assert policy.push(push(1)).result(TIMEOUT_S).weight_version == 1


@pytest.mark.embedded
def test_it_comes_back_from_the_store_with_what_was_pushed_on_all_its_nodes(
    world: World, tmp_path: Path
) -> None:
    import torch

    run_id = f"wide-{uuid.uuid4().hex[:8]}"
    health = {"probe_interval_s": 0.2, "probe_timeout_s": 2.0, "backoff_s": 0.1}
    store = {"spare_bytes": 0, "unit_bytes": 300, "replicas": 1}
    whole = config(tmp_path, {"main": WIDE}, health=health, run_id=run_id)
    whole = with_store(whole, store)
    with world.more_nodes(1, CPU=8, GPU=NUM_GPUS), served(world, whole) as policy:

        def engine() -> EngineStatus:
            (only,) = policy.status().result(TIMEOUT_S).groups[0].engines
            return only

        weights = {one.name: torch.rand(one.shape) for one in DEFAULT_TENSORS}
        policy.push(weights, version=7).result(TIMEOUT_S)
        assert wait_until(lambda: kept(policy) == 7, TIMEOUT_S)
        before = engine()
        pushed = checksum_of(before)
        os.kill(before.processes[1].pid, signal.SIGKILL)
        assert wait_until(
            lambda: engine().processes != before.processes and engine().state == "serving",
            TIMEOUT_S,
        )
        assert engine().weight_version == 7
        assert checksum_of(engine()) == pushed
    assert not list(Path("/dev/shm").glob(f"rollout-store-*/{run_id}.*"))


def kept(policy: ServerHandle) -> int | None:
    store = policy.status().result(TIMEOUT_S).store
    assert store is not None
    return store.version


def checksum_of(engine: EngineStatus) -> str:
    seen = ServedEngine(engine)
    try:
        return seen.checksum()
    finally:
        seen.close()


def with_store(whole: RolloutConfig, store: Mapping[str, Any]) -> RolloutConfig:
    values = whole.model_dump()
    # A fake engine joins no group of torch, which is the best route to engines on two hosts.
    values["servers"]["policy"]["weights"] |= {"store": dict(store), "transport": "by_value"}
    return RolloutConfig.from_dict(values)


def with_health(whole: RolloutConfig, health: Mapping[str, Any]) -> RolloutConfig:
    values = whole.model_dump()
    values["servers"]["policy"]["health"] = dict(health)
    return RolloutConfig.from_dict(values)


class OneRankEnds(LocalLauncher):
    """Rank 1 ends at once; rank 0 waits for it, as SGLang does."""

    async def launch(self, spec: EngineSpec) -> LocalEngine | AttachedEngine:
        if spec.node_rank:
            raise EngineNotReady("rank 1 has no GPU driver")
        await forever()
        raise AssertionError("nothing ends this")


def test_a_start_fails_at_once_when_one_rank_has_ended(tmp_path: Path) -> None:
    with stub_world() as world, world.more_nodes(1, CPU=8, GPU=NUM_GPUS):
        launch = world.load("launch").launch_ray
        with pytest.raises(PhaseFailed, match="rank 1 has no GPU driver"):
            launch(config(tmp_path, {"main": WIDE}), launcher=OneRankEnds())


def test_a_wide_engine_needs_a_launcher_that_can_and_says_so(tmp_path: Path) -> None:
    groups = {"main": {"engine": {"kind": "fake", "nodes": 2}}}
    with (
        stub_world() as world,
        pytest.raises(PhaseFailed, match="HttpFakeLauncher cannot start an engine over several"),
        launched(world.load("launch").launch_ray, tmp_path, groups),
    ):
        pass


def test_gpus_that_straddle_more_nodes_than_asked_for_are_refused(tmp_path: Path) -> None:
    nodes = ({"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 3})
    with (
        stub_world(nodes) as world,
        pytest.raises(PlacementError, match=r"main-0 .* needs 4 GPUs on one node"),
        served(world, config(tmp_path, {"main": {"engine": {"kind": "fake", "gpus": 4}}})),
    ):
        pass


def test_without_ray_there_is_one_node(tmp_path: Path) -> None:
    import rollout

    groups = {"main": {"engine": {"kind": "fake", "nodes": 2}}}
    with pytest.raises(PlacementError, match="main-0 spans 2 nodes, and without Ray there is one"):
        rollout.launch(config(tmp_path, groups), backend="local")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "embedded", "nodes": 2}, "an engine of kind embedded runs on one node"),
        ({"kind": "sglang", "nodes": 2, "gpus": 3}, "gpus 3 cannot be divided equally over 2"),
        ({"kind": "attached", "nodes": 2, "urls": ["http://h:1"]}, "nodes cannot be set"),
    ],
)
def test_nodes_that_cannot_be_are_refused(tmp_path: Path, engine: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, {"main": {"engine": engine}})
