"""What a server writes down about itself, so that it can be told where things are after a crash.

Always true: the file holds one whole record at every moment, an older one or the newest; before a
command is sent to any engine, the record says that it is under way; nobody but the server writes
it, and what it says is believed only together with what is found alive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from engines.identity import identify
from engines.protocol import ProcessIdentity
from rollout.errors import RolloutError
from rollout.types import GroupStatus

logger = logging.getLogger(__name__)

FORMAT = 1
_READABLE = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine.

    Attributes:
        processes: by which it is found again; none for one that is attached.
    """

    engine_id: str
    group: str
    url: str
    node_id: str
    weight_version: int | None
    fenced_because: str = ""
    processes: tuple[ProcessIdentity, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A server at one moment.

    Attributes:
        backend: ``local`` or ``ray``.
        driver: the process that launched it; its engines end with it.
        phases: where each group was when the last command had ended.
        doing: the command under way; empty for none.
        gate: of the router.
        is_ended: it was stopped in order, and nothing of it is left.
        written_at_s: seconds since 1970.
    """

    run_id: str
    server: str
    backend: str
    driver: ProcessIdentity
    phases: dict[str, str] = field(default_factory=dict)
    doing: str = ""
    gate: str = "closed"
    weight_version: int = 0
    router_url: str = ""
    engines: tuple[EngineEntry, ...] = ()
    is_ended: bool = False
    written_at_s: float = 0.0
    format: int = FORMAT


def entries_of(statuses: Sequence[GroupStatus]) -> tuple[EngineEntry, ...]:
    """The engines of some groups, as they are written down."""
    return tuple(
        EngineEntry(
            engine.engine_id,
            status.name,
            engine.endpoint.url,
            engine.node_id,
            engine.weight_version,
            engine.fenced_because,
            engine.processes,
        )
        for status in statuses
        for engine in status.engines
    )


class Journal:
    """The file of one server.

    Args:
        path: where; its folder is made.
        first: what is so before anything is started.
    """

    def __init__(self, path: Path, first: Record) -> None:
        self.path = path
        self._first = first
        self._num_asked = 0
        self._num_written = 0
        self._lock = threading.Lock()
        self._is_broken = False

    @classmethod
    def of(cls, path: Path, run_id: str, server: str, backend: str) -> Journal:
        """For a server that this process launches."""
        driver = identify(os.getpid())
        assert driver is not None
        return cls(path, Record(run_id, server, backend, driver))

    def __reduce__(self) -> tuple[Any, ...]:
        return Journal, (self.path, self._first)

    async def write(self, *, durable: bool = True, **now: Any) -> None:
        """Write down what is so now; what is not named is as at the first.

        A file that cannot be written is told once and hinders nothing.

        Args:
            durable: it outlives a power failure too.  Around every command that is not worth the
                disk's time: when the machine has gone down, so have the engines.
        """
        self._num_asked += 1
        record = replace(self._first, written_at_s=time.time(), **now)
        await asyncio.to_thread(self._write, record, self._num_asked, durable)

    def _write(self, record: Record, number: int, durable: bool) -> None:
        with self._lock:
            if number < self._num_written:  # a thread was slow: a newer one is there already
                return
            try:
                _replace(self.path, orjson.dumps(record, option=_READABLE), durable)
                self._num_written, self._is_broken = number, False
            except OSError as error:
                if not self._is_broken:
                    logger.error("journal %s cannot be written: %s", self.path, error)
                self._is_broken = True


def _replace(path: Path, content: bytes, durable: bool) -> None:
    """The file has the new contents or the old ones; if ``durable``, after a power failure too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
    if not durable:
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> Record:
    """The record in a file.

    Raises:
        RolloutError: it cannot be read, or was written by a version that is not understood here.
    """
    try:
        told = json.loads(path.read_text())
        if told.get("format") != FORMAT:
            raise RolloutError(
                f"journal {path} has format {told.get('format')!r}, not {FORMAT}: another version "
                "of ray-rollout wrote it; use that one"
            )
        engines = tuple(
            EngineEntry(
                **one | {"processes": tuple(ProcessIdentity(**each) for each in one["processes"])}
            )
            for one in told["engines"]
        )
        driver = ProcessIdentity(**told["driver"])
        return Record(**told | {"engines": engines, "driver": driver})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RolloutError(f"journal {path} cannot be read: {error}") from error
