"""A thread that does something with every span.

Always true: spans are taken in order; giving one never waits; what goes wrong is said once, and
stops nobody.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from rollout.timeline.span import Span

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0


class Worker:
    """Hands spans to ``act`` on a thread of its own, in order.

    Args:
        idle: called when there is nothing more to do for now.
    """

    def __init__(
        self, name: str, act: Callable[[Span], None], idle: Callable[[], None] = lambda: None
    ) -> None:
        self._name = name
        self._act = act
        self._idle = idle
        self._queue: queue.SimpleQueue[Span | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_broken = False

    def put(self, span: Span) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(span)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            span = self._queue.get()
            try:
                if span is not None:
                    self._act(span)
                if span is None or self._queue.empty():
                    self._idle()
            except Exception as error:  # nothing that is watched may suffer from being watched
                if not self._is_broken:
                    logger.error("%s: %s; what follows is lost", self._name, error)
                self._is_broken = True
            if span is None:
                return
