"""Spans into JSON lines.

Always true: whole lines only; the file and its predecessor together stay under twice ``max_bytes``.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import orjson

from rollout.run_folder import SPANS_SUFFIX
from rollout.timeline.recorder import Sink, Timeline
from rollout.timeline.span import Span
from rollout.timeline.worker import Worker

_MAX_BYTES = 256 << 20


def recorded_in(folder: str | Path, source: str, *, otel: bool = False) -> Timeline:
    """A timeline that is also written to ``folder``, and sent through OpenTelemetry if asked.

    Raises:
        ConfigError: OpenTelemetry is asked for and not installed.
    """
    sinks: list[Sink] = [SpanFile(Path(folder) / f"{source.replace('/', '-')}{SPANS_SUFFIX}")]
    if otel:
        from rollout.timeline.otel import OtelSink

        sinks.append(OtelSink())
    return Timeline(source, sinks=sinks)


class SpanFile:
    """A ``Sink``.  The file is made by the first span; a full one is kept as ``<name>.1``."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
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
            self._file = self._path.open("ab")
            self._num_bytes = self._file.tell()
        self._num_bytes += self._file.write(orjson.dumps(span.to_dict()) + b"\n")
        if self._num_bytes >= self._max_bytes:
            self._file.close()
            self._file = None
            self._path.replace(self._path.with_name(self._path.name + ".1"))

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
