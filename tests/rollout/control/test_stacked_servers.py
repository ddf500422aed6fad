"""Servers stacked on one GPU: one after the other, and never more than it has room for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.launcher import FakeRunningEngine
from engines.launch import EngineSpec
from engines.protocol import Endpoint, GpuMemory, MemoryTag
from engines.protocol.errors import EngineNotReady
from rollout.control.deployment import Deployment
from rollout.core.errors import LifecycleError
from tests.support.builders import ServerBench, make_server, push

MIB = 2**20
PER_ENGINE = len(MemoryTag) * 300 * MIB
ENGINES = {"policy": "actor-0", "reference": "judge-0", "reward": "critic-0"}


class Stack:
    """A policy that is pushed and two frozen servers, each with an engine on the same GPU.

    Attributes:
        total_bytes: the memory of the GPU.
        most_bytes: the most that was in use whenever it was measured.
        launched: the engines in the order of their launches, each with what was in use then.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.total_bytes = PER_ENGINE + 100 * MIB
        self.most_bytes = 0
        self.launched: list[tuple[str, int]] = []
        self.launcher = FakeLauncher(self._make)
        self.servers = {name: self._server(folder, name) for name in ENGINES}
        self.deployment = Deployment(
            {name: bench.server for name, bench in self.servers.items()},
            stacked=("reference", "reward"),
        )
        stack = self

        async def gpu_memory(process: FakeRunningEngine) -> Sequence[GpuMemory]:
            return [GpuMemory("GPU-0", stack.used(), stack.total_bytes, stack.holders())]

        patch.setattr(FakeRunningEngine, "gpu_memory", gpu_memory)

    def _make(self, spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        self.launched.append((spec.engine_id, self.used()))
        return FakeEngine(
            spec.engine_id,
            endpoint=endpoint,
            memory_bytes=PER_ENGINE,
            reports_memory=True,
            weights_cpu_backup=spec.weights_cpu_backup,
        )

    def _server(self, folder: Path, name: str) -> ServerBench:
        (folder / name).mkdir()
        groups = {ENGINES[name].partition("-")[0]: {"engine": {"kind": "fake", "gpus": 1}}}
        update = "full" if name == "policy" else "frozen"
        return make_server(folder / name, groups, update=update, launcher=self.launcher)

    def holders(self) -> dict[str, int]:
        engines = (process.engine for process in self.launcher.processes.values())
        return {one.engine_id: one.resident_bytes for one in engines if not one.is_dead}

    def used(self) -> int:
        used = sum(self.holders().values())
        self.most_bytes = max(self.most_bytes, used)
        return used

    async def phases(self) -> list[str]:
        return [one.phase for one in (await self.deployment.status()).values()]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    return Stack(tmp_path, monkeypatch)


async def test_they_start_one_after_the_other_and_the_first_of_the_configuration_serves(
    stack: Stack,
) -> None:
    statuses = await stack.deployment.start()
    assert [name for name, _ in stack.launched] == ["judge-0", "critic-0", "actor-0"]
    assert [used for _, used in stack.launched] == [0, 0, 0]
    assert list(statuses) == ["policy", "reference", "reward"]
    assert [one.phase for one in statuses.values()] == ["serving", "offloaded", "offloaded"]
    gates = {name: bench.router.gate for name, bench in stack.servers.items()}
    assert gates["policy"] == "open"
    assert "open" not in (gates["reference"], gates["reward"])
    assert stack.most_bytes == PER_ENGINE


async def test_each_takes_its_turn_and_the_gpu_is_never_fuller_than_with_one(stack: Stack) -> None:
    await stack.deployment.start()
    policy, reference = (stack.servers[name].server for name in ("policy", "reference"))
    for version in (1, 2):
        await policy.offload()
        await reference.serve()
        assert await stack.phases() == ["offloaded", "serving", "offloaded"]
        await reference.offload()
        assert stack.used() == 0  # the trainer has the whole GPU
        await policy.push(push(version))
        assert policy.weight_version == version
    assert stack.most_bytes == PER_ENGINE


async def test_one_that_finds_no_room_beside_another_is_refused_and_both_live(
    stack: Stack,
) -> None:
    await stack.deployment.start()
    said = "judge-0: GPU GPU-0 has 100 MiB free, weights need 300 MiB; actor-0 holds 900 MiB"
    with pytest.raises(LifecycleError, match=said):
        await stack.servers["reference"].server.serve()
    assert await stack.phases() == ["serving", "offloaded", "offloaded"]
    assert not any(process.engine.is_dead for process in stack.launcher.processes.values())


async def test_onload_of_all_is_refused_where_they_do_not_fit_together(stack: Stack) -> None:
    """Asked at the same time, each would find the room that only one can have."""
    await stack.deployment.start()
    await stack.deployment.offload()
    assert await stack.phases() == ["offloaded"] * 3
    stack.total_bytes = 500 * MIB
    with pytest.raises(LifecycleError, match="judge-0: GPU GPU-0 has 200 MiB free, weights need"):
        await stack.deployment.serve({"policy": push(1)})
    assert stack.used() == 300 * MIB
    assert await stack.phases() == ["weights_onloaded", "offloaded", "offloaded"]
    # Without the others, the same engine goes on from there.
    stack.total_bytes = PER_ENGINE
    await stack.servers["policy"].server.push(push(1))
    assert await stack.phases() == ["serving", "offloaded", "offloaded"]


async def test_all_serve_together_where_there_is_room_for_all(stack: Stack) -> None:
    await stack.deployment.start()
    stack.total_bytes = 3 * PER_ENGINE
    await stack.deployment.serve({})
    assert await stack.phases() == ["serving"] * 3
    await stack.deployment.offload()
    assert stack.used() == 0
    await stack.deployment.serve({"policy": push(1)})
    assert await stack.phases() == ["serving"] * 3
    assert stack.used() == 3 * PER_ENGINE


async def test_after_a_start_that_failed_nothing_is_left(stack: Stack) -> None:
    stack.launcher.fail_next("critic-0", EngineNotReady("no such model layer"))
    with pytest.raises(Exception, match="no such model layer"):
        await stack.deployment.start()
    assert [name for name, _ in stack.launched] == ["judge-0"]
    assert stack.holders() == {}
