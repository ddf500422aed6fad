"""Looking at the engines of a group.

Always true: a look has a deadline of its own and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engines.launch import RunningEngine
from rollout.fanout import describe
from rollout.health import Finding, Look
from rollout.member import Member


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
