"""One node's share of the store: its slots, its lease, and its door for other processes.

Always true: it can be killed at any moment, and the one that takes its place goes on with what it
finds; one call changes the slots at a time; at the end of a lease that nobody renews, and when it
is closed for good, nothing of the node's bytes is left.

Its methods block, for they are file operations: whoever has an event loop calls them in a thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout.errors import WeightsUnavailable
from rollout.weights.store import lease
from rollout.weights.store.assembling import Assembled, Assembler, Peer, Read, Wanted
from rollout.weights.store.commit import NodeState, Write
from rollout.weights.store.files import Files
from rollout.weights.store.limits import why_no_room
from rollout.weights.store.machine import boot_id, room_on, since_boot_s
from rollout.weights.store.records import Record
from rollout.weights.store.slots import Slots
from rollout.weights.store.writer import FileSink

logger = logging.getLogger(__name__)

_MARK = "mark"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What one agent is told.

    Attributes:
        base: folder of all runs on the node, in memory; ``run``: the folder of this one in it.
        token: whoever speaks to it from another process must know this.
        transfer: how it reads from others, and lets them read; ``tcp`` always works too.
        lease_s: how long its bytes stay when it hears nothing.
        spare_bytes: memory of the node that it leaves alone.
    """

    node: str
    base: str
    run: str
    token: str = ""
    transfer: str = "tcp"
    lease_s: float = 600.0
    spare_bytes: int = 1 << 30

    @property
    def folder(self) -> Path:
        """Of this node."""
        return Path(self.base) / self.run / self.node


class StoreAgent:
    """Keeps one node's files.  What an earlier one of the same run left, it goes on with.

    Args:
        on_end: called when it has ended because nobody renewed its lease.
    """

    def __init__(
        self,
        settings: AgentSettings,
        files: Files | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.node = settings.node
        self._files = files or Files()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._on_end = on_end
        base = Path(settings.base)
        with lease.locked(base):
            self._files.make_folder(settings.folder)
            self.renew()
            lease.sweep(base)
        self._slots = Slots(
            settings.node, settings.folder, files=self._files, why_no_room=self._why_no_room
        )
        self._files.write(settings.folder / _MARK, secrets.token_hex(8).encode())
        self._assembler = Assembler(self._slots, self._why_no_room)
        self._reaper = threading.Thread(target=self._reap, name="store-lease", daemon=True)
        self._reaper.start()

    def _why_no_room(self, num_bytes: int) -> str:
        room = room_on(self.settings.base)
        return why_no_room(num_bytes, room, spare_bytes=self.settings.spare_bytes)

    # -- lease ------------------------------------------------------------------------------

    def renew(self) -> None:
        """The run is still there."""
        lease.renew(self._files, self.settings.folder, self.settings.lease_s)

    def _reap(self) -> None:
        while not self._is_closed.wait(min(self.settings.lease_s / 8, 30.0)):
            held = lease.read_lease(self.settings.folder)
            if held is None or not held.holds(boot_id(), since_boot_s()):
                logger.error("store: nobody of run %s speaks any more", self.settings.run)
                self.close(clear=True)
                self._on_end()

    def close(self, *, clear: bool) -> None:
        """End; with ``clear``, also give the memory back."""
        self._is_closed.set()
        base = Path(self.settings.base)
        with self._lock:
            self._assembler.close()
            if not clear:
                self._slots.regions.close()
                return
            self._slots.clear()
        with lease.locked(base):
            lease.remove_if_empty(self.settings.folder.parent)
            lease.remove_if_empty(base)

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    # -- looking ----------------------------------------------------------------------------

    def state(self) -> NodeState:
        """What it keeps."""
        with self._in_turn():
            return self._slots.state

    def record(self, write: Write) -> Record:
        """What was written down about a write it keeps."""
        with self._in_turn():
            return self._slots.record(write)

    def num_bytes(self) -> int:
        """Of its segments."""
        return self._slots.num_bytes()

    def mark(self) -> tuple[str, str]:
        """A file and what is in it: whoever reads the same there shares this file system."""
        path = self.settings.folder / _MARK
        return str(path), (self._files.read(path) or b"").decode()

    # -- writing ----------------------------------------------------------------------------

    def begin(self, record: Record, counts: Write | None) -> dict[str, str]:
        """Take the space for a write; segment name -> path."""
        with self._in_turn():
            return {name: str(path) for name, path in self._slots.begin(record, counts).items()}

    def sink(self, record: Record, paths: Mapping[str, str]) -> FileSink:
        """Where the bytes of a write go, for a writer in this process."""
        return FileSink(paths, self._slots.regions, self._files)

    def seal(self, record: Record) -> None:
        """All bytes are in."""
        with self._in_turn():
            self._slots.seal(record)

    def commit(self, write: Write) -> None:
        """The write counts."""
        with self._in_turn():
            self._slots.commit(write)

    # -- reading ----------------------------------------------------------------------------

    @contextmanager
    def reading(self, write: Write, unit: int) -> Iterator[tuple[Path, int, int]]:
        """File, offset and length of a unit, which stay as they are meanwhile."""
        if self.is_closed:
            raise WeightsUnavailable(f"the store of node {self.node} has ended")
        with self._slots.pinned(write) as record:
            segments = record.segments_of(self.node)
            found = [segment for segment in segments if unit in segment.units]
            if not found:
                raise WeightsUnavailable(f"node {self.node} does not keep unit {unit} of {write}")
            path = self._slots.segment_path(write, found[0])
            yield path, found[0].units[unit], record.units[unit].num_bytes

    def read(self, write: Write, unit: int, into: memoryview) -> None:
        """One unit's bytes, for a peer in this process."""
        with self.reading(write, unit) as (path, offset, num_bytes), path.open("rb") as stream:
            stream.seek(offset)
            if stream.readinto(into) != num_bytes:
                raise WeightsUnavailable(f"{path} is shorter than its record says")

    def ways(self) -> Mapping[str, Read]:
        """How a peer in this process reads."""
        return {"memory": self.read}

    def assemble(self, record: Record, peers: Mapping[str, Peer], wanted: Wanted) -> Assembled:
        """A folder with all of ``record`` on this node."""
        if self.is_closed:
            raise WeightsUnavailable(f"the store of node {self.node} has ended")
        return self._assembler.assemble(record, peers, wanted)

    def give_back(self, path: str) -> None:
        """An assembled folder, known by its path or its name, is not needed any more."""
        self._assembler.give_back(path)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        with self._lock:
            if self.is_closed:
                raise WeightsUnavailable(f"the store of node {self.node} has ended")
            try:
                yield
            except OSError as error:
                raise WeightsUnavailable(f"node {self.node}: {error}") from error
