"""How often the router looks at its sockets while answers come in pieces.

Always true: a piece is handled at once unless the sockets were looked at less than ``PAUSE_S`` ago,
and then at the end of that.

Each look costs a wake-up, and each piece of a stream two system calls, whether it holds one event
or five.  So network cards hold back interrupts, and so does this loop: while answers come in pieces
it sleeps a little before it looks again, and finds more in each.  A model makes a token in ten
times as long, so no stream is later for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSE_S = 0.0005
# The kernel's timers are not exact: to sleep for less is not worth the call.
_SHORTEST_S = 0.0001


class Pace:
    """Of one event loop.

    Args:
        call_soon: of the loop: calls what it is given before the sockets are looked at again.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self._sleep = sleep
        self._is_due = False
        self._looked_at_s = 0.0

    def more_comes(self) -> None:
        """An answer has not ended with what was read of it."""
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._rest)

    def _rest(self) -> None:
        self._is_due = False
        now_s = self._clock()
        left_s = self._looked_at_s + PAUSE_S - now_s
        if left_s > _SHORTEST_S:
            self._sleep(left_s)
            now_s = self._clock()
        self._looked_at_s = now_s
