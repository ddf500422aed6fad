"""A destination of finished spans, with a thread that processes them in the background.

Always true: spans are processed in order; ``put`` never waits; after ``close`` nothing is open, and
a span that comes then is dropped.  The thread is woken once for many spans, because switching
threads for each would cost more than writing it.  The first error is logged, and the thread goes
on.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from engines.process.background import Then, keep_thread
from rollout.observability.timeline.span import Span

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_TOGETHER_S = 0.05


class SpanSink(ABC):
    """Where a timeline puts its finished spans, besides memory."""

    thread_name: ClassVar[str]

    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        self._has_some = threading.Event()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._is_broken = False

    @abstractmethod
    def process(self, span: Span) -> None:
        """Write or send one span; called on the sink's thread."""

    def flush(self) -> None:  # noqa: B027  a sink without a buffer needs none
        """Called on the sink's thread when the queue is empty."""

    def finish(self) -> None:  # noqa: B027  a sink without a file needs none
        """Called on the sink's thread after the last span; frees what ``process`` has opened."""

    def put(self, span: Span) -> None:
        """Queue a span; returns at once.  After ``close`` it is dropped."""
        if self._is_closing.is_set():
            return
        self._spans.append(span)
        if self._thread is None:
            self._start()
        if not self._has_some.is_set():
            self._has_some.set()

    def _start(self) -> None:
        with self._thread_lock:
            if self._thread is None and not self._is_closing.is_set():
                self._thread = keep_thread(self._run, self.thread_name, Then.STARTS_AGAIN)

    def close(self) -> None:
        """Process all queued spans before returning, for good."""
        with self._thread_lock:
            self._is_closing.set()
            thread = self._thread
        if thread is not None:
            self._has_some.set()
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._has_some.wait()
            is_last = self._is_closing.wait(_TOGETHER_S)
            self._has_some.clear()
            while self._spans:
                self._call(self.process, self._spans.popleft())
            self._call(self.flush)
        self._call(self.finish)

    def _call(self, function: Callable[..., None], *args: Span) -> None:
        try:
            function(*args)
        except Exception as error:  # recording must not disturb what it records
            if not self._is_broken:
                logger.error("%s: %s; what follows is lost", self.thread_name, error)
            self._is_broken = True
