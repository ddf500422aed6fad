"""The agent of one node: its slots, and the calls that the coordinator makes.

Always true: it can be killed at any moment, and its successor continues with the files it finds;
one call at a time changes the slots; all the node's files are removed when the agent is closed with
``clear``, or by another run's agent when no process holds their folder any more.

Its methods block on file operations: call them in a thread.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engines.process.locks import own_folder
from rollout.core.errors import WeightsUnavailable
from rollout.core.machine import room_on, why_no_room
from rollout.weights.store.layout.commit import NodeState, Write
from rollout.weights.store.layout.placement import tensor_ranges
from rollout.weights.store.layout.record import StoreRecord
from rollout.weights.store.node.assembly import (
    AssembledFolder,
    Assembler,
    AssemblyRequest,
    Peer,
    ReadUnit,
)
from rollout.weights.store.node.base_folder import RETURNS, Leftovers, locked, remove_if_empty
from rollout.weights.store.node.files import Files
from rollout.weights.store.node.slots import Slots
from rollout.weights.store.node.writer import FileSink

_MARK = "mark"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one agent.

    Attributes:
        base: folder of all runs on the node, in tmpfs; ``run``: name of this run's folder in it.
        token: needed to call it from another process.
        transfer: transport between agents; ``tcp`` also always works.
        returns: it is started again when its process has ended.
        spare_bytes: memory of the node that stays free.
    """

    node: str
    base: str
    run: str
    token: str = ""
    transfer: str = "tcp"
    returns: bool = False
    spare_bytes: int = 1 << 30

    @property
    def folder(self) -> Path:
        """Folder of this node."""
        return Path(self.base) / self.run / self.node

    def why_no_room(self, num_bytes: int) -> str:
        """Why so many bytes more do not fit on the node; empty if they do."""
        return why_no_room(num_bytes, room_on(self.base), spare_bytes=self.spare_bytes)


class StoreAgent:
    """Keeps one node's files; adopts those of an earlier agent of the same run.

    Raises:
        WeightsUnavailable: its folder would not be in tmpfs, or is not this user's alone.
    """

    def __init__(self, settings: AgentSettings, files: Files | None = None) -> None:
        self.settings = settings
        self.node = settings.node
        self._files = files or Files()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._base = base = Path(settings.base)
        if not base.parent.is_dir():  # made, it would be a folder on the root disk
            raise WeightsUnavailable(
                f"weights.store.path = {str(base.parent)!r}: it does not exist on node "
                f"{settings.node}; mount a tmpfs there, or use /dev/shm"
            )
        self._leftovers = Leftovers(base)
        with locked(base):
            for folder in (settings.folder.parent, settings.folder):
                self._files.make_folder(folder)
            self._hold = own_folder(settings.folder)
            if settings.returns:
                self._files.write(settings.folder / RETURNS, b"")
            self._leftovers.sweep()
        self._slots = Slots(
            settings.node, settings.folder, files=self._files, why_no_room=settings.why_no_room
        )
        self._files.write(settings.folder / _MARK, secrets.token_hex(8).encode())
        self._assembler = Assembler(self._slots, settings.why_no_room)

    def close(self, *, clear: bool) -> None:
        """Close; with ``clear``, also remove the files."""
        self._is_closed.set()
        with self._lock:
            self._assembler.close()
            if clear:
                self._slots.clear()
            else:
                self._slots.mapped_files.close()
            self._hold.release()
        if not clear:
            return
        with locked(self._base):
            remove_if_empty(self.settings.folder.parent)
            remove_if_empty(self._base)

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    # -- state, records ---------------------------------------------------------------------

    def state(self) -> NodeState:
        with self._exclusive():
            return self._slots.state

    def record(self, write: Write) -> StoreRecord:
        with self._exclusive():
            return self._slots.record(write)

    def num_bytes(self) -> int:
        return self._slots.num_bytes()

    def mark(self) -> tuple[str, str]:
        """A file's path and contents: a process that reads the same shares this file system."""
        path = self.settings.folder / _MARK
        return str(path), (self._files.read(path) or b"").decode()

    # -- writing ----------------------------------------------------------------------------

    def begin(self, record: StoreRecord, current: Write | None) -> dict[str, str]:
        """Allocate the space for a write; segment name -> path."""
        with self._exclusive():
            with locked(self._base):
                self._leftovers.sweep()  # their memory may be needed
            return {name: str(path) for name, path in self._slots.begin(record, current).items()}

    def sink(
        self, record: StoreRecord, paths: Mapping[str, str], base: Write | None = None
    ) -> FileSink:
        """Receives the bytes of a write, for a writer in this process; all tensors whole."""
        return FileSink(paths, self._slots.mapped_files, self._files)

    def seal(self, record: StoreRecord) -> None:
        with self._exclusive():
            self._slots.seal(record)

    def commit(self, write: Write) -> None:
        with self._exclusive():
            self._slots.commit(write)

    # -- reading ----------------------------------------------------------------------------

    @contextmanager
    def reading(self, write: Write, unit: int) -> Iterator[tuple[Path, int, int]]:
        """File, offset and length of a unit; its bytes do not change meanwhile."""
        if self.is_closed:
            raise WeightsUnavailable(f"the store of node {self.node} is closed")
        with self._slots.pinned(write) as record:
            segments = record.segments_of(self.node)
            found = [segment for segment in segments if unit in segment.units]
            if not found:
                raise WeightsUnavailable(f"node {self.node} does not keep unit {unit} of {write}")
            path = self._slots.segment_path(write, found[0])
            yield path, found[0].units[unit], record.units[unit].num_bytes

    @contextmanager
    def kept(self, write: Write) -> Iterator[Mapping[str, memoryview]]:
        """The bytes of each tensor of a sealed write that this node keeps; they do not change
        meanwhile."""
        with self._slots.pinned(write) as record:
            segments = {one.file: one for one in record.segments_of(self.node)}
            mapped = {
                file: self._slots.mapped_files.of(self._slots.segment_path(write, segment)).view
                for file, segment in segments.items()
            }
            yield {
                place.tensor.name: mapped[place.file][place.offset : place.offset + place.num_bytes]
                for place in tensor_ranges(record.units, tuple(segments.values()))
            }

    def read(self, write: Write, unit: int, into: memoryview) -> None:
        """One unit's bytes, for a peer in this process."""
        with self.reading(write, unit) as (path, offset, num_bytes), path.open("rb") as stream:
            stream.seek(offset)
            if stream.readinto(into) != num_bytes:
                raise WeightsUnavailable(f"{path} is shorter than in its record")

    def unit_readers(self) -> Mapping[str, ReadUnit]:
        """Functions that read a unit, by name, for a peer in this process."""
        return {"memory": self.read}

    def assemble(
        self, record: StoreRecord, peers: Mapping[str, Peer], wanted: AssemblyRequest
    ) -> AssembledFolder:
        if self.is_closed:
            raise WeightsUnavailable(f"the store of node {self.node} is closed")
        return self._assembler.assemble(record, peers, wanted)

    def give_back(self, path: str) -> None:
        self._assembler.give_back(path)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            if self.is_closed:
                raise WeightsUnavailable(f"the store of node {self.node} is closed")
            try:
                yield
            except OSError as error:
                raise WeightsUnavailable(f"node {self.node}: {error}") from error
