"""Spans in files, one line of JSON each: written while a run records, read afterwards.

Always true: only whole lines are written; a file and its predecessor together stay under twice
``max_bytes``; reading skips a line that a crash cut short.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import orjson

from engines.plain_json import WRONG_FORM
from engines.process.own_files import make_folders, open_or_new_file
from rollout.config.run_dir import SPANS_SUFFIX, RunFolder
from rollout.core.errors import ConfigError
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.sink import SpanSink
from rollout.observability.timeline.span import Span

_MAX_BYTES = 256 << 20


def create_timeline(folder: str | Path, source: str, *, otel: bool = False) -> Timeline:
    """A timeline that also writes to ``folder`` and, with ``otel``, exports to OpenTelemetry.

    Raises:
        ConfigError: ``otel`` is set and OpenTelemetry is not installed.
    """
    file = Path(folder) / f"{source.replace('/', '-')}{SPANS_SUFFIX}"
    launch = RunFolder(Path(folder).parent, "").last_launch()
    sinks: list[SpanSink] = [SpanFile(file, launch=launch)]
    if otel:
        from rollout.observability.timeline.otel import OtelSink

        sinks.append(OtelSink())
    return Timeline(source, sinks=sinks)


class SpanFile(SpanSink):
    """A file; the first span creates it.  At ``max_bytes`` it is renamed to ``<name>.1``.

    Args:
        launch: written into every span, because a later launch of the run uses the same file.
    """

    thread_name = "spans"

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES, launch: str = "") -> None:
        super().__init__()
        self._launch = {"launch": launch} if launch else {}
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = None
        self._num_bytes = 0

    def finish(self) -> None:
        self._close_file()

    def process(self, span: Span) -> None:
        if self._file is None:
            make_folders(str(self._path.parent))
            self._file = os.fdopen(open_or_new_file(str(self._path), os.O_APPEND), "ab")
            self._num_bytes = self._file.seek(0, os.SEEK_END)
        self._num_bytes += self._file.write(orjson.dumps(span.to_dict() | self._launch) + b"\n")
        if self._num_bytes >= self._max_bytes:
            self._close_file()
            self._path.replace(self._path.with_name(self._path.name + ".1"))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_spans(path: Path) -> list[Span]:
    """The spans of one file, or of all files of a run folder.

    Raises:
        ConfigError: there is no span.
    """
    if path.is_file():
        files = [path]
    else:
        files = RunFolder(path, path.name).span_files() or sorted(path.glob(f"*{SPANS_SUFFIX}*"))
    spans = []
    for file in files:
        with file.open(errors="replace") as lines:
            spans += read_lines(lines)
    if not spans:
        raise ConfigError(f"{path}: no spans were recorded there (no .spans.jsonl file has any)")
    return spans


def read_lines(lines: Iterable[str]) -> list[Span]:
    """Spans from JSON lines."""
    spans = []
    for line in lines:
        try:
            spans.append(Span.from_dict(orjson.loads(line)))
        except WRONG_FORM:
            continue
    return spans
