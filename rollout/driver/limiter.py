"""How many samples are in flight, never more than a limit that may change.

Always true: who asked first is let in first; a lower limit takes effect as others leave.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Limiter:
    """Slots.  ``used_s`` sums up seconds of all slots, ``idle_s`` those when none was used."""

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_used = 0
        self._limit = limit
        self._clock = clock
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._since_s = clock()
        self._used_s = 0.0
        self._idle_s = 0.0

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._let_in()

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def seconds(self) -> tuple[float, float]:
        """Seconds of used slots, and seconds without any, since it was made."""
        self._count()
        return self._used_s, self._idle_s

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot for the time of the block."""
        if self.num_used < self._limit and not self._waiters:
            self._change(1)
        else:
            await self._wait()
        try:
            yield
        finally:
            self._change(-1)
            self._let_in()

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # let in and cancelled at once
                self._change(-1)
                self._let_in()
            else:
                self._waiters.remove(waiter)
            raise

    def _let_in(self) -> None:
        while self._waiters and self.num_used < self._limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._change(1)
                waiter.set_result(None)

    def _change(self, by: int) -> None:
        self._count()
        self.num_used += by

    def _count(self) -> None:
        now_s = self._clock()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        self._used_s += elapsed_s * self.num_used
        self._idle_s += 0.0 if self.num_used else elapsed_s
