"""Health probes of the engines of a group.

Always true: a probe has its own deadline and changes nothing.  Which process an engine is, is read
beside it: SGLang's scheduler has to report that, and a busy one is not dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engines.launch import RunningEngine
from engines.protocol.plain_text import describe
from rollout.control.engine.state import EngineState
from rollout.rules.health import (
    ProbeKind,
    ProbeResult,
    why_other_process,
    why_other_version,
)


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """The result of probing one engine.

    Attributes:
        reason: why the result is bad, or empty if it is good.
        is_stale: it restarted and lacks the pushed weights, so it does not serve.
    """

    engine_id: str
    result: ProbeResult
    reason: str = ""
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class GroupProbe:
    """The results of probing a group.

    Attributes:
        is_steady: no command ran meanwhile, so that the results can be compared with the phase.
        standbys: slots on which an engine sleeps that can take the place of the other.
    """

    is_steady: bool
    engines: tuple[EngineProbe, ...]
    standbys: frozenset[str] = frozenset()


async def probe_all(
    members: Iterable[EngineState], kind: ProbeKind, budget_s: float, distrusted: Collection[str]
) -> tuple[EngineProbe, ...]:
    """Probe all members at the same time.

    Args:
        distrusted: engines whose weight version is checked too, and their process where it is
            known.
    """
    probes = (_probe(member, kind, budget_s, member.engine_id in distrusted) for member in members)
    return tuple(await asyncio.gather(*probes))


async def _probe(
    member: EngineState, kind: ProbeKind, budget_s: float, is_distrusted: bool
) -> EngineProbe:
    result, reason = ProbeResult.FENCED, member.fence_reason
    if not reason:
        try:
            async with asyncio.timeout(budget_s):
                result, reason = await _probe_running(member, kind, is_distrusted)
        except TimeoutError:
            result, reason = ProbeResult.FAILED, f"no answer to a probe within {budget_s:g} s"
        except Exception as error:  # any error counts as a failed probe
            result, reason = ProbeResult.FAILED, describe(error)
        answered = result in (ProbeResult.ANSWERED, ProbeResult.CHANGED)
        if is_distrusted and answered and (why := await _why_other_process(member, budget_s)):
            result, reason = ProbeResult.CHANGED, why
    # Read only now: a command may have fenced or verified it during the probe.
    if member.fence_reason:
        result, reason = ProbeResult.FENCED, member.fence_reason
    return EngineProbe(member.engine_id, result, reason, member.is_stale)


async def _probe_running(
    member: EngineState, kind: ProbeKind, is_distrusted: bool
) -> tuple[ProbeResult, str]:
    if await has_exited(member.process):
        return ProbeResult.EXITED, "its process has ended"
    if kind is ProbeKind.PROCESS:
        return ProbeResult.ASLEEP, ""
    if not await member.engine.is_ready() and kind is ProbeKind.READY:
        return ProbeResult.FAILED, "it reports that it takes no requests"
    known = member.weight_version
    if is_distrusted and known is not None:
        why = why_other_version(known, await member.engine.weight_version())
        if why and member.weight_version == known:  # it was not restored meanwhile
            return ProbeResult.CHANGED, why
    return ProbeResult.ANSWERED, ""


async def _why_other_process(member: EngineState, budget_s: float) -> str:
    if not member.start:
        return ""
    try:
        async with asyncio.timeout(budget_s):
            return why_other_process(member.start, await member.engine.process_start())
    except Exception:  # unknown: the next probe asks again
        return ""


async def has_exited(process: RunningEngine) -> bool:
    """Whether it is known that a process has ended."""
    try:
        return not await process.is_alive()
    except Exception:  # the owner of the process does not reply: unknown
        return False
