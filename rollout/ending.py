"""Is anything left of an engine that was ended?

Always true: only an engine that is known to be gone is called gone.
"""

from __future__ import annotations

import asyncio

from engines.launch import RunningEngine
from rollout.errors import EngineFailure
from rollout.fanout import describe
from rollout.member import Member

# Together less than what the server grants a group on top of a phase's own budget.
TAIL_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 20.0


async def confirm_gone(member: Member) -> None:
    """Make sure that nothing is left of a fenced engine, so that its place can be used again."""
    async with asyncio.timeout(KILL_TIMEOUT_S):
        await member.process.kill()
    held = await member.process.resident_bytes()
    if held:
        raise EngineFailure(
            f"engine {member.engine_id} was killed and still holds {held} bytes",
            engine_id=member.engine_id,
            operation="kill",
        )
    member.is_gone = True


async def confirm_ended_by_others(member: Member) -> None:
    """An attached engine is not ours to kill, and what it holds after a failure nobody knows."""
    if await member.process.is_alive():
        raise EngineFailure(
            f"engine {member.engine_id} is attached and still runs; whoever launched it has to "
            "end it, and start it again, before it can serve",
            engine_id=member.engine_id,
            operation="restart",
        )


async def log_tail(process: RunningEngine) -> str:
    """The end of its log, for people."""
    try:
        async with asyncio.timeout(TAIL_TIMEOUT_S):
            return await process.log_tail()
    except Exception as error:  # a missing log must not hide the failure it would explain
        return f"(no log: {describe(error)})"
