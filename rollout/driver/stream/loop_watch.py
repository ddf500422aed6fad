"""A thread that notices when code of the user stops the driver's event loop.

Always true: it only looks, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial

from engines.process.background import Then, keep_thread
from rollout.core.pending import place_of_thread
from rollout.driver.user_code import called_in

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_LONG_S = 5.0
_AGAIN_S = 60.0


class LoopWatch:
    """Logs by name what the event loop stands still for; ``start`` is called on that loop."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop_thread = 0
        self._since_s: float | None = None  # of a beat that the loop has not answered

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._loop_thread = threading.get_ident()
            loop = asyncio.get_running_loop()
            self._thread = keep_thread(partial(self._run, loop), "driver-watch", Then.STARTS_AGAIN)

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_BEAT_S)

    @property
    def why_blocked(self) -> str:
        """What the loop has stood still for, for five seconds or longer; or empty."""
        since_s = self._since_s
        stood_s = 0.0 if since_s is None else time.monotonic() - since_s
        if stood_s < _LONG_S:
            return ""
        called = called_in(self._loop_thread)
        what = "code of the user" if called is None else called[0]
        place = place_of_thread(self._loop_thread)
        return f"{what} has stopped the driver for {stood_s:.0f} s, {place}: nothing else goes on"

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        warned_s = 0.0
        while not self._is_over.wait(_BEAT_S):
            if self._since_s is None:
                self._since_s, warned_s = time.monotonic(), 0.0
                try:
                    loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # the loop is closed
                    return
            elif (why := self.why_blocked) and time.monotonic() - warned_s > _AGAIN_S:
                warned_s = time.monotonic()
                logger.warning("%s", why)

    def _answer(self) -> None:
        self._since_s = None
