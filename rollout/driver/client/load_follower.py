"""Follows the engines' load while a driver is in use.

Always true: a query that fails ends nothing; a wait at the gate is warned of once, and a closed
gate that a call meets every ten seconds.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from engines.process.background import Then, keep_task
from rollout.driver.client.generation_client import GenerationClient
from rollout.driver.client.limiter import Limiter, next_limit
from rollout.driver.user_code import result_of

logger = logging.getLogger(__name__)

_LONG_WAIT_S = 10.0
_QUERY_S = 10.0


class LoadFollower:
    """Adapts the number of samples in flight to the load.

    Args:
        every_s: seconds between two queries, or None for none.
        highest: number of samples in flight.

    Attributes:
        why_waiting: why requests wait at the router's gate or are turned away, as last known, or
            empty if none is.
    """

    def __init__(
        self, client: GenerationClient, limiter: Limiter, *, every_s: float | None, highest: int
    ) -> None:
        self.why_waiting = ""
        self._client = client
        self._limiter = limiter
        self._every_s = every_s
        self._highest = highest
        self._task: asyncio.Task[None] | None = None
        self._waiting_since_s: float | None = None
        self._warned_at_s: float | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._every_s is not None and self._task is None:
            self._task = keep_task(
                partial(self._run, self._every_s), "driver-load", Then.STARTS_AGAIN
            )

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, every_s: float) -> None:
        limiter = self._limiter
        while True:
            try:
                load = await result_of("the client's load", self._client.load, limit_s=_QUERY_S)
            except Exception:  # the loop has to outlive one failed query
                logger.warning("cannot read the engines' load", exc_info=True)
                load = None
            if load is not None:
                limiter.limit = next_limit(limiter.limit, limiter.num_used, load, self._highest)
                why_closed = load.why_closed if limiter.num_used else ""
                self._note_waiting(why_closed or load.why_waiting, is_closed=bool(why_closed))
            await asyncio.sleep(every_s)

    def _note_waiting(self, why: str, *, is_closed: bool) -> None:
        self.why_waiting = why
        now_s = asyncio.get_running_loop().time()
        if not why:
            self._waiting_since_s = self._warned_at_s = None
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        since_s = self._waiting_since_s if self._warned_at_s is None else self._warned_at_s
        is_due = self._warned_at_s is None or is_closed
        if is_due and now_s - since_s >= _LONG_WAIT_S:
            self._warned_at_s = now_s
            logger.warning("for %.0f s, %s", now_s - self._waiting_since_s, why)
