"""Looking at the engines of a group, and leading a new one to where the others are.

Always true: a look has a deadline of its own and changes nothing; an engine that has just started
gets the same calls, in the same order, that led its siblings to their phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from engines.launch import RunningEngine
from engines.protocol import MemoryTag, PauseMode, WeightsReport
from rollout.errors import WeightMismatch
from rollout.fanout import describe
from rollout.health import Finding, Look
from rollout.lifecycle import Phase
from rollout.member import Member
from rollout.verification import ALL_TENSORS, Evidence, first_difference, judge, left_open
from rollout.weights.source import Restored, WeightSource


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """What one look found.

    Attributes:
        said: why it is a bad finding, in words.
        is_stale: it serves nothing, for it lacks what was pushed since it started.
    """

    engine_id: str
    finding: Finding
    said: str = ""
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class GroupProbe:
    """What one look at a group found.

    Attributes:
        is_steady: no command ran meanwhile, so an answer can be held against the phase.
    """

    is_steady: bool
    engines: tuple[EngineProbe, ...]


async def probe_all(
    members: Iterable[Member], look: Look, budget_s: float, distrusted: Collection[str]
) -> tuple[EngineProbe, ...]:
    """Look at all members at once.

    Args:
        distrusted: engines that must also still hold the weights they should.
    """
    looks = (_probe(one, look, budget_s, one.engine_id in distrusted) for one in members)
    return tuple(await asyncio.gather(*looks))


async def _probe(member: Member, look: Look, budget_s: float, is_distrusted: bool) -> EngineProbe:
    finding, said = Finding.FENCED, member.fenced_because
    if not said:
        try:
            async with asyncio.timeout(budget_s):
                finding, said = await _look(member, look, is_distrusted)
        except TimeoutError:
            finding, said = Finding.FAILED, f"no answer to a probe within {budget_s:g} s"
        except Exception as error:  # whatever it is, the engine did not answer well
            finding, said = Finding.FAILED, describe(error)
    # Looked up only now: a command may have fenced or proved it meanwhile.
    if member.fenced_because:
        finding, said = Finding.FENCED, member.fenced_because
    return EngineProbe(member.engine_id, finding, said, member.is_stale)


async def _look(member: Member, look: Look, is_distrusted: bool) -> tuple[Finding, str]:
    if await _has_exited(member.process):
        return Finding.EXITED, "its process has ended"
    if look is Look.PROCESS:
        return Finding.ASLEEP, ""
    if not await member.engine.is_ready() and look is Look.READY:
        return Finding.FAILED, "it answers that it takes no requests"
    if is_distrusted and member.weight_version is not None:
        held = await member.engine.weight_version()
        if held != str(member.weight_version):
            return Finding.EXITED, (
                f"it reports weight version {held!r}, not '{member.weight_version}': "
                "it is not the engine it was"
            )
    return Finding.ANSWERED, ""


async def _has_exited(process: RunningEngine) -> bool:
    try:
        return not await process.is_alive()
    except Exception:  # whoever owns the process cannot be asked: nothing is certain
        return False


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
        given = restored.manifest
        member.adapter = restored.adapter
        member.base_version = version if restored.base_version is None else restored.base_version
        member.pushed = dict(given.fingerprints)
        member.pushed_dtypes = {name: one.dtype for name, one in given.tensors.items()}
    held = await member.engine.weight_version()
    if held != str(version):
        raise WeightMismatch(
            f"engine {member.engine_id} was given weight version {version} and reports {held!r}",
            engine_id=member.engine_id,
        )
    report = await member.fingerprints()
    open_still = "it tells no fingerprints"
    tensor = "" if report is None or expected is None else first_difference(expected, report)
    if tensor:
        raise WeightMismatch(
            f"engine {member.engine_id} reports weight version {version}, but its tensor "
            f"{tensor!r} differs from that of an engine that was proved at it",
            tensor=tensor,
            engine_id=member.engine_id,
        )
    if report is not None:
        # With nobody to compare it with, what it was given is what its weights are held against.
        evidence = Evidence(report, None, ALL_TENSORS, member.comparable(), member.adapter)
        if wrong := judge({member.engine_id: evidence}):
            raise WeightMismatch(
                f"engine {member.engine_id} was given weight version {version}, but "
                f"{wrong[member.engine_id]}",
                engine_id=member.engine_id,
            )
        open_still = left_open(evidence, 0 if expected is None else 1)
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
        restored = await source.restore(member.engine, version, member.slot)
        if restored is not None:
            return restored
    return None
