"""Ends an engine, and confirms that it has ended and its memory is free.

Always true: ``is_gone`` is set only after both were measured.
"""

from __future__ import annotations

import asyncio

from engines.launch import RunningEngine
from engines.protocol.plain_text import describe
from rollout.control.engine.state import EngineState
from rollout.core.errors import EngineFailure

# With the time for a kill, less than the margin that the server adds to a phase's budget.
TAIL_TIMEOUT_S = 5.0


async def confirm_gone(member: EngineState, timeout_s: float) -> None:
    """Kill what still runs of a fenced engine, and check that its memory is free.

    Raises:
        EngineFailure: it still holds memory.
    """
    async with asyncio.timeout(timeout_s):
        await member.process.kill()
    held = await member.process.resident_bytes()
    if held:
        raise EngineFailure(
            f"engine {member.engine_id} was killed and still holds {held} bytes",
            engine_id=member.engine_id,
            operation="kill",
        )
    member.is_gone = True


async def discard(member: EngineState) -> None:
    """End an engine that is none of its group's."""
    try:
        await member.process.kill()
    finally:
        await member.engine.aclose()


async def log_tail(process: RunningEngine, num_lines: int = 20) -> str:
    """The last lines of its log, or why they cannot be read."""
    try:
        async with asyncio.timeout(TAIL_TIMEOUT_S):
            return await process.log_tail(num_lines)
    except Exception as error:  # a missing log must not hide the failure it would explain
        return f"(no log: {describe(error)})"
