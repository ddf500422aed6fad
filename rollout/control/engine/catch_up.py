"""Brings an engine that has booted, or that sleeps, to the phase and weights of its group.

Always true: the engine gets the calls that brought the others to their phase, in the same order.
It serves only after its weights are verified to be those of the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from engines.protocol import MemoryTag, PauseMode, WeightsReport
from rollout.control.engine.memory import KV_TAGS, WEIGHTS_TAGS, EngineMemory, why_no_room
from rollout.control.engine.state import EngineState
from rollout.core.errors import LifecycleError, WeightMismatch
from rollout.rules.fingerprint_check import (
    ALL_TENSORS,
    EngineFingerprints,
    find_mismatches,
    first_difference,
    why_inconclusive,
)
from rollout.rules.lifecycle import Phase
from rollout.weights.store.weight_source import Restored, WeightSource


async def bring_to_phase(member: EngineState, phase: Phase, memory: EngineMemory) -> None:
    """Bring an engine that serves, because it has just booted, or that sleeps to a phase.

    Args:
        memory: of its group.

    Raises:
        LifecycleError: its GPUs have no room for the memory that it has to take back.
    """
    stays = released_in(phase, memory.policy.tags)
    if member.is_asleep:
        await _wake(member, memory, stays)
        if phase is Phase.SERVING:
            await member.continue_generation()
    elif phase is not Phase.SERVING:
        await member.pause(PauseMode.ABORT)
        if phase is not Phase.PAUSED:
            await member.engine.flush_cache(timeout_s=None)
            await memory.release(member, stays)


async def _wake(member: EngineState, memory: EngineMemory, stays: Sequence[MemoryTag]) -> None:
    wanted = [tag for tag in (*WEIGHTS_TAGS, *KV_TAGS) if tag not in stays]
    if why := await why_no_room(wanted, [member]):
        raise LifecycleError(why)
    for tags in (WEIGHTS_TAGS, KV_TAGS):
        await memory.resume(member, [tag for tag in tags if tag in wanted])
    member.is_asleep = False


async def put_to_sleep(member: EngineState, memory: EngineMemory) -> None:
    """Release all memory of an engine that has just booted, as far as its group releases any."""
    await bring_to_phase(member, Phase.FLUSHED, memory)
    await memory.release(member)
    member.is_asleep = True


def released_in(phase: Phase, tags: Sequence[MemoryTag]) -> list[MemoryTag]:
    """The ``tags`` that an engine has released in ``phase``."""
    if phase is Phase.OFFLOADED:
        return list(tags)
    if phase in (Phase.WEIGHTS_ONLOADED, Phase.WEIGHTS_UPDATED, Phase.VERIFIED):
        return [tag for tag in tags if tag is not MemoryTag.WEIGHTS]
    return []


WhyWrong = Callable[[EngineState, int, str], Awaitable[str]]
"""Why an engine does not answer as a version does.  The reason why its
fingerprints are inconclusive is given, or empty if they are not."""


async def readmit(
    member: EngineState,
    version: int,
    sources: Sequence[WeightSource],
    expected: WeightsReport | None,
    why_wrong: WhyWrong,
    complete: Callable[[EngineState], Awaitable[None]],
) -> bool:
    """See ``ServerGroup.readmit``.

    Args:
        complete: loads the adapters of the others into it.
        expected: fingerprints of an engine verified at ``version``, or None if there is none.
    """
    if MemoryTag.WEIGHTS in member.released:
        return False
    # After a release that lost the weights, the engine still reports their old version.
    if member.weight_version is None or await member.engine.weight_version() != str(version):
        member.weight_version = None
        restored = await _restored(member, version, sources)
        if restored is None:
            return False
        _note_restored(member, version, restored)
    held = await member.engine.weight_version()
    if held != str(version):
        raise WeightMismatch(
            f"engine {member.engine_id} was given weight version {version} and reports {held!r}",
            engine_id=member.engine_id,
        )
    await complete(member)
    report = await member.fingerprints()
    inconclusive = _why_inconclusive(member, version, report, expected)
    inconclusive = inconclusive or member.why_adapters_unknown
    member.weight_version = version
    if why := await why_wrong(member, version, inconclusive):
        raise WeightMismatch(
            f"engine {member.engine_id} was given weight version {version}, but {why}",
            engine_id=member.engine_id,
        )
    member.mark_verified(report)
    member.is_stale = False
    return True


async def _restored(
    member: EngineState, version: int, sources: Sequence[WeightSource]
) -> Restored | None:
    for source in sources:
        restored = await source.restore(member.engine, version, member.current_slot)
        if restored is not None:
            return restored
    return None


def _note_restored(member: EngineState, version: int, restored: Restored) -> None:
    manifest = restored.manifest
    member.pushed = dict(manifest.fingerprints)
    member.pushed_dtypes = {name: tensor.dtype for name, tensor in manifest.tensors.items()}


def _why_inconclusive(
    member: EngineState, version: int, report: WeightsReport | None, expected: WeightsReport | None
) -> str:
    """Why its fingerprints are not enough to verify its weights.

    Raises:
        WeightMismatch: the fingerprints show other weights.
    """
    if report is None:
        return member.why_no_fingerprints
    tensor = "" if expected is None else first_difference(expected, report)
    if tensor:
        raise WeightMismatch(
            f"engine {member.engine_id} reports weight version {version}, but its tensor "
            f"{tensor!r} differs from that of an engine verified at this version",
            tensor=tensor,
            engine_id=member.engine_id,
        )
    # Without another engine to compare with, the pushed fingerprints are the reference.
    fingerprints = EngineFingerprints(
        report,
        member.record,
        ALL_TENSORS,
        member.comparable_fingerprints(),
        member.moves_experts,
    )
    if wrong := find_mismatches({member.engine_id: fingerprints}):
        raise WeightMismatch(
            f"engine {member.engine_id} was given weight version {version}, but "
            f"{wrong[member.engine_id]}",
            engine_id=member.engine_id,
        )
    return why_inconclusive(fingerprints, 0 if expected is None else 1)
