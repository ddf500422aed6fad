"""A limit on the samples in flight, which may change at any time to follow the engines' load.

Always true: slots are given out first come, first served.  A lower limit takes effect as slots
are returned; no running sample is stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rollout.driver.client.generation_client import EngineLoad

# Above this an engine soon retracts requests and has to compute them again.
_KV_FULL = 0.95
_KV_BUSY = 0.85
# A short queue keeps an engine busy when a request ends; a long queue only adds latency.
_QUEUE_SHARE = 0.2
# So many samples keep an engine busy, whatever load it reports.
_LOWEST_PER_ENGINE = 4


class Limiter:
    """A counting semaphore that also measures its use.

    Attributes:
        num_used: slots in use now.
        idle_at_end_s: seconds without any used slot when the last batch was full, or None before.
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_used = 0
        self.idle_at_end_s: float | None = None
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
        self._admit()

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def seconds(self) -> tuple[float, float]:
        """Seconds since it was made: summed over used slots, and without any used slot."""
        self._count()
        return self._used_s, self._idle_s

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot during the block."""
        if self.num_used < self._limit and not self._waiters:
            self._change(1)
        else:
            await self._wait()
        try:
            yield
        finally:
            self._change(-1)
            self._admit()

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            # Admitted and cancelled in the same turn of the loop: pass the slot on.
            if waiter.done() and not waiter.cancelled():
                self._change(-1)
                self._admit()
            else:
                self._waiters.remove(waiter)
            raise

    def _admit(self) -> None:
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


def next_limit(limit: int, num_used: int, load: EngineLoad, highest: int) -> int:
    """The new limit, from the load that the engines report.

    It stays within its bounds, and changes by at most a quarter, or by 1.

    Args:
        num_used: slots in use; a limit that is not reached does not rise.
        highest: for all engines together.
    """
    lowest = min(highest, max(1, _LOWEST_PER_ENGINE * load.num_engines))
    kv_use = load.kv_use or 0.0
    if not load.num_engines:
        wanted = limit  # without a serving engine there is no load to go by
    elif kv_use >= _KV_FULL:
        wanted = int(limit * 0.75)
    elif load.num_waiting > _QUEUE_SHARE * max(1, load.num_running):
        wanted = int(limit * 0.9)
    elif kv_use < _KV_BUSY and num_used >= limit:
        wanted = limit + max(1, limit // 4)
    else:
        wanted = limit
    return max(lowest, min(highest, wanted))
