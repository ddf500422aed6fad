"""Spans into JSON lines, by a thread of its own.

Always true: whole lines only; the file and its predecessor together stay under twice
``max_bytes``; a disk that fails is said once, and stops nothing.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rollout.timeline.span import Span

logger = logging.getLogger(__name__)

SUFFIX = ".spans.jsonl"
_MAX_BYTES = 256 << 20
_CLOSE_S = 5.0


class SpanFile:
    """A ``Sink``.  The file is made by the first span; a full one is kept as ``<name>.1``."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: TextIO | None = None
        self._num_bytes = 0
        self._worker = Worker("spans", self._write, self._flush)

    def put(self, span: Span) -> None:
        self._worker.put(span)

    def close(self) -> None:
        self._worker.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, span: Span) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
            self._num_bytes = self._file.tell()
        self._num_bytes += self._file.write(json.dumps(span.to_dict()) + "\n")
        if self._num_bytes >= self._max_bytes:
            self._file.close()
            self._file = None
            self._path.replace(self._path.with_name(self._path.name + ".1"))

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()


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
