"""Leading an engine that has just started to where the others of its group are.

Always true: it gets the same calls, in the same order, that led its siblings to their phase; it
serves only when it is proved to hold what they hold.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from engines.protocol import MemoryTag, PauseMode, WeightsReport
from rollout.errors import WeightMismatch
from rollout.lifecycle import Phase
from rollout.member import Member
from rollout.verification import ALL_TENSORS, Evidence, first_difference, judge, left_open
from rollout.weights.source import Restored, WeightSource


async def walk(member: Member, phase: Phase, tags: Sequence[MemoryTag]) -> None:
    """Lead an engine that has just started, and serves, to the phase of its group.

    Args:
        tags: what its group releases when it is offloaded; empty if it keeps its GPUs.
    """
    if phase is Phase.SERVING:
        return
    await member.engine.pause_generation(PauseMode.ABORT)
    if phase is Phase.PAUSED:
        return
    await member.engine.flush_cache(timeout_s=None)
    released = released_in(phase, tags)
    if released:
        await member.engine.release_memory_occupation(released)
        member.released.update(released)


def released_in(phase: Phase, tags: Sequence[MemoryTag]) -> list[MemoryTag]:
    """What of ``tags`` an engine has released in ``phase``."""
    if phase is Phase.OFFLOADED:
        return list(tags)
    if phase in (Phase.WEIGHTS_ONLOADED, Phase.WEIGHTS_UPDATED, Phase.VERIFIED):
        return [tag for tag in tags if tag is not MemoryTag.WEIGHTS]
    return []


Ask = Callable[[str], Awaitable[str]]
"""Has an engine tell a canary; told what fingerprints leave open, it says why that is wrong."""


async def adopt(
    member: Member,
    version: int,
    sources: Sequence[WeightSource],
    expected: WeightsReport | None,
    ask: Ask,
) -> bool:
    """Let a stale engine serve if it holds ``version``, or a source gives it that; True if so.

    Args:
        expected: fingerprints of an engine that was proved at ``version``; None if there is none.
        ask: for what they leave open.

    Raises:
        WeightMismatch: a source gave it something else.
    """
    if MemoryTag.WEIGHTS in member.released:
        return False
    # What an engine says that lost its weights in a release is what it held before.
    if member.weight_version is None or await member.engine.weight_version() != str(version):
        member.weight_version = None
        restored = await _restored(member, version, sources)
        if restored is None:
            return False
        _note_what_was_given(member, version, restored)
    held = await member.engine.weight_version()
    if held != str(version):
        raise WeightMismatch(
            f"engine {member.engine_id} was given weight version {version} and reports {held!r}",
            engine_id=member.engine_id,
        )
    report = await member.fingerprints()
    open_still = _left_open(member, version, report, expected)
    member.weight_version = version
    if open_still and (why := await ask(open_still)):
        raise WeightMismatch(
            f"engine {member.engine_id} was given weight version {version}, but {why}",
            engine_id=member.engine_id,
        )
    member.prove(report)
    member.is_stale = False
    return True


async def _restored(
    member: Member, version: int, sources: Sequence[WeightSource]
) -> Restored | None:
    for source in sources:
        restored = await source.restore(member.engine, version, member.place)
        if restored is not None:
            return restored
    return None


def _note_what_was_given(member: Member, version: int, restored: Restored) -> None:
    given = restored.manifest
    member.adapter = restored.adapter
    member.base_version = version if restored.base_version is None else restored.base_version
    member.pushed = dict(given.fingerprints)
    member.pushed_dtypes = {name: one.dtype for name, one in given.tensors.items()}


def _left_open(
    member: Member, version: int, report: WeightsReport | None, expected: WeightsReport | None
) -> str:
    """What its fingerprints do not tell of its weights; empty if they tell all.

    Raises:
        WeightMismatch: they tell that it holds something else.
    """
    if report is None:
        return "it tells no fingerprints"
    tensor = "" if expected is None else first_difference(expected, report)
    if tensor:
        raise WeightMismatch(
            f"engine {member.engine_id} reports weight version {version}, but its tensor "
            f"{tensor!r} differs from that of an engine that was proved at it",
            tensor=tensor,
            engine_id=member.engine_id,
        )
    # With nobody to compare it with, what it was given is what its weights are held against.
    evidence = Evidence(report, None, ALL_TENSORS, member.comparable(), member.adapter)
    if wrong := judge({member.engine_id: evidence}):
        raise WeightMismatch(
            f"engine {member.engine_id} was given weight version {version}, but "
            f"{wrong[member.engine_id]}",
            engine_id=member.engine_id,
        )
    return left_open(evidence, 0 if expected is None else 1)
