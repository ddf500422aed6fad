"""What recovery does to the engines of one group, over fake engines."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.protocol import Endpoint, MemoryTag
from engines.protocol.spec import EngineSpec
from rollout.control.engine.catch_up import released_in
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import EngineFailure, LifecycleError, PhaseFailed, WeightMismatch
from rollout.core.types import EngineSlot
from rollout.rules.health import ProbeResult
from rollout.rules.lifecycle import Command, Phase
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.store.weight_source import Restored
from tests.support.builders import make_group, push, restart, save
from tests.support.virtual_time import pass_time, virtual_time

ALL = tuple(MemoryTag)
NOT_WEIGHTS = [tag for tag in MemoryTag if tag is not MemoryTag.WEIGHTS]


@pytest.mark.parametrize("phase", Phase)
def test_an_engine_has_released_what_its_phase_says(phase: Phase) -> None:
    expected = {
        Phase.OFFLOADED: list(ALL),
        Phase.WEIGHTS_ONLOADED: NOT_WEIGHTS,
        Phase.WEIGHTS_UPDATED: NOT_WEIGHTS,
        Phase.VERIFIED: NOT_WEIGHTS,
    }
    assert released_in(phase, ALL) == expected.get(phase, [])
    assert released_in(phase, ()) == []


@virtual_time
async def test_looks_are_side_by_side() -> None:
    group, launcher = make_group(4)
    await group.start()
    for index in range(4):
        launcher[f"main-{index}"].hold("is_ready")
    started = asyncio.get_running_loop().time()
    probe = await group.probe(2.0)
    assert asyncio.get_running_loop().time() - started == pytest.approx(2.0)
    assert {one.result for one in probe.engines} == {ProbeResult.FAILED}
    assert "no answer to a probe within 2 s" in probe.engines[0].reason


@virtual_time
async def test_an_engine_can_be_fenced_while_a_command_hangs_on_it() -> None:
    group, launcher = make_group(2)
    await group.start()
    gate = launcher["main-0"].hold("pause_generation")
    pausing = asyncio.create_task(group.run(Command.PAUSE_GENERATION))
    await gate.entered.wait()
    await group.fence("main-0", "it is frozen")
    assert launcher["main-0"].death_reason == "killed"
    report = await pausing
    assert [one.engine_id for one in report.failures] == ["main-0"]


@virtual_time
async def test_an_answer_during_a_command_is_not_steady() -> None:
    group, launcher = make_group(1)
    await group.start()
    assert (await group.probe(1.0)).is_steady
    gate = launcher["main-0"].hold("pause_generation")
    pausing = asyncio.create_task(group.run(Command.PAUSE_GENERATION))
    await gate.entered.wait()
    assert not (await group.probe(1.0)).is_steady
    gate.open()
    await pausing
    assert (await group.probe(1.0)).is_steady


@virtual_time
async def test_an_engine_that_is_not_fenced_is_not_replaced() -> None:
    group, launcher = make_group(1)
    await group.start()
    with pytest.raises(LifecycleError, match="not fenced"):
        await restart(group, "main-0")
    assert len(launcher.specs) == 1


@virtual_time
async def test_no_command_waits_for_a_boot_and_the_new_engine_joins_where_the_others_are() -> None:
    group, launcher = make_group(2)
    await group.start()
    await group.fence("main-0", "it was slow")
    launch = launcher.hold("main-0")
    booting = asyncio.create_task(group.boot("main-0"))
    await launch.entered.wait()
    await group.run(Command.PAUSE_GENERATION)
    launch.open()
    assert await booting
    assert launcher["main-0"].paused is None
    assert await group.admit("main-0")
    assert launcher["main-0"].paused is not None


@virtual_time
async def test_a_command_waits_for_an_admission() -> None:
    group, launcher = make_group(2, needs_offload=False)
    await group.start()
    await group.run(Command.PAUSE_GENERATION)
    await group.fence("main-0", "it was slow")
    assert await group.boot("main-0")
    gate = launcher["main-0"].hold("pause_generation")
    admitting = asyncio.create_task(group.admit("main-0"))
    await gate.entered.wait()
    flushing = asyncio.create_task(group.run(Command.FLUSH_CACHE))
    await pass_time(10)
    assert "flush_cache" not in launcher["main-1"].operations()
    gate.open()
    assert await admitting
    await flushing


@virtual_time
async def test_a_release_ends_boots_and_later_ones_wait_for_the_memory() -> None:
    group, launcher = make_group(3)
    await group.start()
    for name in ("main-0", "main-1"):
        await group.fence(name, "it was slow")
    assert await group.boot("main-0")
    launch = launcher.hold("main-1")
    booting = asyncio.create_task(group.boot("main-1"))
    await launch.entered.wait()
    for command in (
        Command.PAUSE_GENERATION,
        Command.FLUSH_CACHE,
        Command.RELEASE_MEMORY_OCCUPATION,
    ):
        await group.run(command)
    assert not await booting
    assert launcher["main-0"].is_dead
    assert launch.num_waiting == 0
    assert not await group.admit("main-0")
    assert not await group.boot("main-0")
    launch.open()
    assert await group.boot("main-1", memory_is_free=True)


@virtual_time
async def test_a_new_engine_that_cannot_be_led_on_is_ended_and_its_place_stays_fenced() -> None:
    group, launcher = make_group(2, needs_offload=False)
    await group.start()
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.fence("main-0", "it was slow")

    def refuse(spec, endpoint):
        engine = make(spec, endpoint)
        engine.fail_next("flush_cache", EngineFailure("not idle"))
        return engine

    make, launcher._make = launcher._make, refuse
    with pytest.raises(EngineFailure, match="main-0: admit failed: not idle"):
        await restart(group, "main-0")
    assert launcher["main-0"].is_dead
    assert (await group.status()).engines[0].fence_reason == "it was slow"


@virtual_time
async def test_a_cancelled_restart_leaves_nothing_running() -> None:
    group, launcher = make_group(1)
    await group.start()
    await group.fence("main-0", "it was slow")
    launch = launcher.hold("main-0")
    restarting = asyncio.create_task(restart(group, "main-0"))
    await launch.entered.wait()
    restarting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    assert launch.num_waiting == 0
    with pytest.raises(PhaseFailed):  # the turn is free again
        await group.run(Command.PAUSE_GENERATION)


async def serve_version_1(group: ServerGroup) -> None:
    for command in (Command.PAUSE_GENERATION, Command.FLUSH_CACHE):
        await group.run(command)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.CONTINUE_GENERATION)


@virtual_time
async def test_a_stale_engine_neither_blocks_its_group_nor_counts_as_proved() -> None:
    group, launcher = make_group(2, needs_offload=False)
    await group.start()
    await serve_version_1(group)
    await group.fence("main-0", "it was slow")
    await restart(group, "main-0")
    assert not await group.readmit("main-0", 1)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.CONTINUE_GENERATION)
    assert launcher["main-0"].paused is None
    assert (await group.status()).engines[0].state == "stale"


class OtherSource:
    """Gives each engine an adapter, and a fingerprint of another one."""

    num_restored = 0

    async def restore(self, engine: Any, version: int, slot: EngineSlot) -> Restored:
        self.num_restored += 1
        await engine.update_weights_from_disk("/saved", weight_version=str(version))
        report = await engine.weights_checker()
        name = next(iter(report.tensors[0]))
        scheme = report.tensors[0][name].partition(":")[0]
        specs = {one.name: TensorSpec(one.name, one.dtype, one.shape) for one in DEFAULT_TENSORS}
        return Restored(Manifest(specs, {name: f"{scheme}:of another"}))


def listing_engine(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint, reports_manifest=True)


@virtual_time
async def test_what_failed_its_fingerprints_is_given_to_no_other_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = OtherSource()
    monkeypatch.setattr(GroupSettings, "all_sources", lambda self: (source,))
    group, _ = make_group(2, launcher=FakeLauncher(listing_engine))
    await group.start()
    for name in ("main-0", "main-1"):
        await group.fence(name, "killed -9")
    await restart(group, "main-0")
    with pytest.raises(WeightMismatch, match=r"given weight version 1, but tensor .* is not what"):
        await group.readmit("main-0", 1)
    await group.fence("main-0", "it holds other weights")
    for name in ("main-0", "main-1"):
        await restart(group, name)
        assert not await group.readmit(name, 1)  # it waits for the next push
    assert source.num_restored == 1


@virtual_time
async def test_an_engine_beside_one_that_is_verified_gets_the_version_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = OtherSource()
    monkeypatch.setattr(GroupSettings, "all_sources", lambda self: (source,))
    group, _ = make_group(2, needs_offload=False)
    await group.start()
    await serve_version_1(group)
    for num in (1, 2):
        await group.fence("main-0", "killed -9")
        await restart(group, "main-0")
        with pytest.raises(WeightMismatch, match="differs from that of an engine verified"):
            await group.readmit("main-0", 1)
        assert source.num_restored == num


@dataclass
class SavedSource:
    """Gives each engine what is saved, without fingerprints of it."""

    path: str

    async def restore(self, engine: Any, version: int, slot: EngineSlot) -> Restored:
        await engine.update_weights_from_disk(self.path, weight_version=str(version))
        return Restored()


@virtual_time
@pytest.mark.parametrize("num_ended", [1, 2])
async def test_what_the_engine_that_ended_had_is_what_the_next_one_must_have(
    monkeypatch: pytest.MonkeyPatch, num_ended: int
) -> None:
    """Also after a second restart, whose engine was never verified."""
    source = SavedSource("/wrong")
    monkeypatch.setattr(GroupSettings, "all_sources", lambda self: (source,))
    group, launcher = make_group(1, needs_offload=False)
    await group.start()
    await serve_version_1(group)
    right = launcher["main-0"].weights.digests
    for _ in range(num_ended):
        await group.fence("main-0", "killed -9")
        await restart(group, "main-0")
    with pytest.raises(WeightMismatch, match="differs from that of an engine verified"):
        await group.readmit("main-0", 1)
    await group.fence("main-0", "it holds other weights")
    await restart(group, "main-0")
    assert not await group.readmit("main-0", 1)  # it waits for the next push
    assert launcher["main-0"].weights.digests != right


@virtual_time
async def test_the_next_engine_with_what_the_one_that_ended_had_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SavedSource(str(tmp_path))
    monkeypatch.setattr(GroupSettings, "all_sources", lambda self: (source,))
    group, launcher = make_group(1, needs_offload=False)
    await group.start()
    await serve_version_1(group)
    for _ in range(2):
        save(launcher["main-0"], tmp_path)
        await group.fence("main-0", "killed -9")
        await restart(group, "main-0")
        assert await group.readmit("main-0", 1)
        assert (await group.status()).engines[0].state == "serving"
