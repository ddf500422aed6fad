"""The journal of a server: the file by which others find its page, its calls and its engines.

Always true: the file always holds one whole record, the newest or an older one, and only its user
can read it.  The record names a command before any engine gets it.  Only the server writes the
file; a reader also checks which processes still exist.  No server continues from a record after
which one could not be written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from engines.plain_json import WRONG_FORM, read_json
from engines.process.own_files import make_folders, new_file
from engines.process.process_identity import identify
from engines.protocol import Endpoint, ProcessIdentity
from rollout.core.errors import RolloutError
from rollout.core.machine import sync_folder
from rollout.core.types import EngineStatus, GroupStatus
from rollout.rules.lifecycle import Phase

logger = logging.getLogger(__name__)

FORMAT = 2
_READABLE = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
# Of equal length; the quotes of a text are escaped, so no value has these bytes.
_IS_CURRENT = b'"is_behind": false'
_IS_BEHIND = b'"is_behind": true '


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine.

    Attributes:
        processes: identities of its processes; none if it is attached.
        is_asleep: it is a standby, beside the engine of this id.
        start: see ``EngineStatus``.
        key: key of requests and queries; the key of control calls is not written down.
    """

    engine_id: str
    group: str
    url: str
    node_id: str
    weight_version: int | None
    fence_reason: str = ""
    processes: tuple[ProcessIdentity, ...] = ()
    is_stale: bool = False
    process_name: str = ""
    is_asleep: bool = False
    start: str = ""
    key: str = field(default="", repr=False)

    def status(self, phase: str) -> EngineStatus:
        """Its last known status, in this phase of its group."""
        return EngineStatus(
            self.engine_id,
            Endpoint.of_url(self.url),
            phase,
            self.weight_version,
            (),
            self.node_id,
            pid=self.processes[0].pid if self.processes else None,
            fence_reason=self.fence_reason,
            is_stale=self.is_stale,
            processes=self.processes,
            process_name=self.process_name,
            start=self.start,
        )


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """The state of a server at one moment.

    Attributes:
        backend: ``local`` or ``ray``.
        driver: the process that launched it; its engines end with it.
        process: the process that runs the server: the driver, or an actor.
        control: where the driver takes calls, ``host:port``; empty with Ray, or if it was stopped.
        key: key of these calls.
        page: URL of its page, or empty if it has none.
        page_needs_key: for viewing.
        phases: the phase of each group after the last command.
        doing: the command that runs, or empty for none.
        unfinished: group -> the command that it may have begun and not ended.
        gate: state of the router's gate.
        has_pushed, has_served, has_adapters, base_version: the last push; see ``LastPush``.
        expected_version: see ``PhaseRunner``.
        is_ended: it was stopped in order, and has no leftovers.
        is_behind: a later record could not be written: what it says of engines may be wrong.
        written_at_s: seconds since 1970.
    """

    run_id: str
    server: str
    backend: str
    driver: ProcessIdentity
    process: ProcessIdentity
    control: str = ""
    key: str = field(default="", repr=False)
    page: str = ""
    page_needs_key: bool = False
    phases: dict[str, str] = field(default_factory=dict)
    doing: str = ""
    unfinished: dict[str, str] = field(default_factory=dict)
    gate: str = "closed"
    weight_version: int = 0
    has_pushed: bool = False
    has_served: bool = True
    has_adapters: bool = False
    base_version: int = 0
    expected_version: int = 0
    router_url: str = ""
    agents_urls: tuple[str, ...] = ()
    engines: tuple[EngineEntry, ...] = ()
    is_ended: bool = False
    is_behind: bool = False
    written_at_s: float = 0.0
    format: int = FORMAT

    @property
    def why_lost(self) -> str:
        """Why no other process can continue this server."""
        if self.is_ended:
            return "it was stopped before"
        if self.is_behind:
            return "commands ran after its journal could not be written"
        if self.has_adapters:
            return "the adapters that it had got were in its memory"
        is_starting = Phase.STARTING in self.phases.values()
        return "it was lost while it started" if is_starting or not self.engines else ""


def entries_of(statuses: Sequence[GroupStatus]) -> tuple[EngineEntry, ...]:
    """The journal entries for the engines of these groups."""
    return tuple(
        EngineEntry(
            engine.engine_id,
            status.name,
            engine.endpoint.url,
            engine.node_id,
            engine.weight_version,
            engine.fence_reason,
            engine.processes,
            engine.is_stale,
            engine.process_name,
            is_asleep,
            engine.start,
            engine.access.sampling,
        )
        for status in statuses
        for is_asleep, engines in ((False, status.engines), (True, status.asleep))
        for engine in engines
    )


class ServerJournal:
    """The file of one server.

    Args:
        path: the file; its folder is created.
        first: the record before anything is started.
    """

    def __init__(self, path: Path, first: JournalRecord) -> None:
        self.path = path
        self._first = replace(first, process=_this_process())
        self._num_asked = 0
        self._num_written = 0
        self._lock = threading.Lock()
        self._is_broken = False

    @classmethod
    def of(cls, path: Path, run_id: str, server: str, backend: str) -> ServerJournal:
        """The journal of a server that this process launches."""
        here = _this_process()
        return cls(path, JournalRecord(run_id, server, backend, here, here))

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerJournal, (self.path, self._first)

    def keep(self, **values: Any) -> None:
        """Set fields of every record from now on."""
        self._first = replace(self._first, **values)

    async def end(self) -> None:
        """Write that the server was stopped in order, and takes no calls any more."""
        self.keep(control="", key="", page="", agents_urls=())
        await self.write(is_ended=True)

    async def write(self, *, durable: bool = True, **now: Any) -> None:
        """Write the fields ``now``; the other fields are those of the first record, or ``keep``.

        If the record cannot be written, that is logged once, and the server continues; the record
        before it is marked.

        Args:
            durable: flush to disk, to survive a power failure.  Not worth its time for every
                command: a power failure ends the engines too.
        """
        self._num_asked += 1
        record = replace(self._first, written_at_s=time.time(), **now)
        await asyncio.to_thread(self._write, record, self._num_asked, durable)

    def _write(self, record: JournalRecord, number: int, durable: bool) -> None:
        with self._lock:
            if number < self._num_written:  # this thread was slow: a newer record is there already
                return
            try:
                _replace(self.path, orjson.dumps(record, option=_READABLE), durable)
                self._num_written, self._is_broken = number, False
            except (OSError, TypeError) as error:  # no disk, or a value that JSON cannot have
                if not self._is_broken:
                    logger.error(
                        "journal %s cannot be written: %s; until it can, no other process "
                        "continues this server if its own is lost",
                        self.path,
                        error,
                    )
                    _mark_behind(self.path)
                self._is_broken = True


def _this_process() -> ProcessIdentity:
    here = identify(os.getpid())
    assert here is not None
    return here


def _replace(path: Path, content: bytes, durable: bool) -> None:
    """Replace the file atomically; if ``durable``, also across a power failure."""
    make_folders(str(path.parent))
    # One name, so that the next launch replaces what a killed process had begun.
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(new_file(str(part)), "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
    if durable:
        sync_folder(path.parent)


def _mark_behind(path: Path) -> None:
    """Mark the record in its place, which needs no room; else remove it."""
    try:
        with open(path, "r+b", buffering=0) as file:
            at = file.read().index(_IS_CURRENT)
            file.seek(at)
            file.write(_IS_BEHIND)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.error("journal %s is behind, and cannot be removed: %s", path, error)


def read(path: Path) -> JournalRecord:
    """The record in a file.

    Raises:
        RolloutError: it cannot be read, or another version of ray-rollout wrote it.
    """
    try:
        content = read_json(path.read_bytes())
        if content.get("format") != FORMAT:
            raise RolloutError(
                f"journal {path} has format {content.get('format')!r}, not {FORMAT}: another "
                "version of ray-rollout wrote it; use that one"
            )
        engines = tuple(
            EngineEntry(
                **entry
                | {"processes": tuple(ProcessIdentity(**each) for each in entry["processes"])}
            )
            for entry in content["engines"]
        )
        processes = {name: ProcessIdentity(**content[name]) for name in ("driver", "process")}
        tuples = {"engines": engines, "agents_urls": tuple(content.get("agents_urls", ()))}
        return JournalRecord(**content | processes | tuples)
    except (OSError, *WRONG_FORM) as error:
        raise RolloutError(f"journal {path} cannot be read: {error}") from error
