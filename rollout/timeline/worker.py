"""A thread that does something with every span.

Always true: spans are taken in order; giving one never waits, nor wakes the thread for each: two
threads that hand each other the interpreter cost more than what is written.  What goes wrong is
said once, and stops nobody.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from rollout.timeline.span import Span

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_TOGETHER_S = 0.05


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
        self._spans: deque[Span] = deque()
        self._has_some = threading.Event()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_broken = False

    def put(self, span: Span) -> None:
        self._spans.append(span)
        if self._thread is None:
            self._is_closing.clear()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if not self._has_some.is_set():
            self._has_some.set()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_closing.set()
            self._has_some.set()
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._has_some.wait()
            is_last = self._is_closing.wait(_TOGETHER_S)
            self._has_some.clear()
            while self._spans:
                self._guarded(self._act, self._spans.popleft())
            self._guarded(self._idle)

    def _guarded(self, act: Callable[..., None], *args: Span) -> None:
        try:
            act(*args)
        except Exception as error:  # nothing that is watched may suffer from being watched
            if not self._is_broken:
                logger.error("%s: %s; what follows is lost", self._name, error)
            self._is_broken = True
