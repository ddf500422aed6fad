"""A group that begins with engines which run already: those of one that was lost with its actor.

Always true: an engine is taken over as it is only if nothing was being done to it when its group
was lost, and it shows that it serves the published weights.  Of any other nobody knows what it has
released, and SGLang dies of being asked twice: it is fenced and ended, and starts again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from engines.launch import RunningEngine
from rollout.errors import EngineFailure, RolloutError
from rollout.fanout import describe
from rollout.member import Member
from rollout.roster import Roster
from rollout.starting import Starter
from rollout.types import EngineSlot, EngineStatus, GroupStatus

logger = logging.getLogger(__name__)

_LOST = "its group was lost while a command ran or memory was released"


async def take_over(
    roster: Roster,
    starter: Starter,
    slots: Mapping[str, EngineSlot],
    known: GroupStatus,
    processes: Mapping[str, RunningEngine],
    version: int | None,
    budget_s: float,
) -> None:
    """Fill the roster with the engines of ``known``.

    Args:
        processes: what each engine runs as.
        version: the weight version they must hold; None takes none of them over.
        budget_s: what an engine gets to show that it is well.
    """

    async def take(one: EngineStatus) -> Member:
        slot, process = slots[one.engine_id], processes[one.engine_id]
        because = one.fenced_because or ("" if version is not None else _LOST)
        if not because:
            try:
                async with asyncio.timeout(budget_s):
                    return await _as_it_is(starter, slot, process, one, version)
            except Exception as error:
                because = f"its group was lost, and it could not be taken over: {describe(error)}"
        return starter.unknown(slot, process, f"engine {one.engine_id}: {because}")

    members = await asyncio.gather(*(take(one) for one in known.engines))
    roster.fill(members)
    fenced = [one for one in members if one.fenced_because]
    logger.warning(
        "group %s: %d of %d engines taken over from one that was lost",
        known.name,
        len(members) - len(fenced),
        len(members),
    )
    await roster.fence(
        [
            EngineFailure(one.fenced_because, engine_id=one.engine_id, operation="take over")
            for one in fenced
        ]
    )


async def _as_it_is(
    starter: Starter,
    slot: EngineSlot,
    process: RunningEngine,
    known: EngineStatus,
    version: int | None,
) -> Member:
    if not await process.is_alive():
        raise RolloutError("its process has ended")
    member = await starter.admit(slot, process)
    try:
        if not await member.engine.is_ready():
            raise RolloutError("it takes no requests")
        if known.is_stale:
            member.is_stale, member.is_proved = True, False
        elif member.weight_version != version:
            raise RolloutError(f"it holds weight version {member.weight_version}, not {version}")
    except BaseException:
        await member.engine.aclose()
        raise
    return member
