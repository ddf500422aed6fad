"""Drains one engine: pause, then flush.

Always true: an engine that is still busy gets a second abort before it counts as failed.  Its
group ends a failed engine, and never releases the memory of one that may be busy.
"""

from __future__ import annotations

import asyncio
import logging

from engines.protocol import PauseMode
from engines.protocol.errors import EngineRejected
from rollout.config import Drain
from rollout.control.engine.state import EngineState

logger = logging.getLogger(__name__)

# The share of a phase's budget for the first attempt.
_FIRST_TRY = 0.5
# The engine's own wait ends a little before ours, so that it can report why it is late.
_MARGIN_S = 2.0
_NOT_IDLE = 400


async def pause(member: EngineState, drain: Drain, budget_s: float) -> None:
    """Stop generation.  With ``retract``, requests in flight continue later."""
    if drain is Drain.RETRACT:
        await member.pause(PauseMode.RETRACT)
        return
    try:
        async with asyncio.timeout(budget_s * _FIRST_TRY):
            await member.pause(PauseMode.ABORT)
    except TimeoutError:
        logger.warning(
            "engine %s: still busy %g s after an abort; aborting again",
            member.engine_id,
            budget_s * _FIRST_TRY,
        )
        await member.pause(PauseMode.ABORT)


async def flush(member: EngineState, drain: Drain, budget_s: float) -> None:
    """Wait, inside the engine, until nothing is in flight, and drop its prefix cache."""
    # SGLang's wait counts retracted requests as in flight, its flush does not: so do not wait.
    first_s = None if drain is Drain.RETRACT else _wait_s(budget_s * _FIRST_TRY)
    try:
        await member.engine.flush_cache(timeout_s=first_s)
    except EngineRejected as error:
        if error.status != _NOT_IDLE:
            raise
        logger.warning("engine %s: %s; aborting again", member.engine_id, error)
        if drain is Drain.RETRACT:
            await member.pause(PauseMode.ABORT)
        else:
            await member.engine.abort_request()
        await member.engine.flush_cache(timeout_s=_wait_s(budget_s * (1 - _FIRST_TRY)))


def _wait_s(budget_s: float) -> float:
    return max(budget_s - _MARGIN_S, budget_s / 2)
