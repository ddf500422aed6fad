"""The agent of one node: its slots, and the calls that the coordinator makes.

Always true: it can be killed at any moment, and its successor continues with the files it finds;
one call at a time changes the slots; all the node's files are removed when the agent is closed with
``clear``, or by another run's agent when no process holds their folder any more.

Its methods block on file operations: call them in a thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engines.process.locks import own_folder
from rollout.core.errors import WeightsUnavailable
from rollout.core.machine import room_on, why_no_room
from rollout.weights.store.layout.commit import Write
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
        """Why so many bytes more do not fit on the node."""
        return why_no_room(num_bytes, room_on(self.base), spare_bytes=self.spare_bytes)


class StoreAgent(Slots):
    """Keeps one node's files; adopts those of an earlier agent of the same run.

    Raises:
        WeightsUnavailable: its folder would not be in tmpfs, or is not this user's alone.
    """

    def __init__(self, settings: AgentSettings, files: Files | None = None) -> None:
        self.settings = settings
        self._base = base = Path(settings.base)
        if not base.parent.is_dir():  # made, it would be a folder on the root disk
            raise WeightsUnavailable(
                f"weights.store.path = {str(base.parent)!r}: it does not exist on node "
                f"{settings.node}; mount a tmpfs there, or use /dev/shm"
            )
        files = files or Files()
        self._leftovers = Leftovers(base)
        with locked(base):
            for folder in (settings.folder.parent, settings.folder):
                files.make_folder(folder)
            self._hold = own_folder(settings.folder)
            if settings.returns:
                files.write(settings.folder / RETURNS, b"")
            self._leftovers.sweep()
        super().__init__(
            settings.node, settings.folder, files=files, why_no_room=settings.why_no_room
        )
        files.write(settings.folder / _MARK, secrets.token_hex(8).encode())
        self._assembler = Assembler(self, settings.why_no_room)

    def close(self, *, clear: bool) -> None:
        """Close; with ``clear``, also remove the files."""
        self._is_closed.set()
        with self._one_call:
            self._assembler.close()
            self.mapped_files.close()
            if clear:
                self.files.remove_folder(self.folder)
            self._hold.release()
        if clear:
            with locked(self._base):
                remove_if_empty(self.folder.parent)
                remove_if_empty(self._base)

    def mark(self) -> tuple[str, str]:
        """A file's path and contents: a process that reads the same shares this file system."""
        path = self.settings.folder / _MARK
        return str(path), (self.files.read(path) or b"").decode()

    # -- writing ----------------------------------------------------------------------------

    def begin(self, record: StoreRecord, current: Write | None) -> dict[str, str]:
        with self._exclusive(), locked(self._base):
            self._leftovers.sweep()  # their memory may be needed
        return super().begin(record, current)

    def sink(
        self, record: StoreRecord, paths: Mapping[str, str], base: Write | None = None
    ) -> FileSink:
        """Receives the bytes of a write, for a writer in this process; all tensors whole."""
        return FileSink(paths, self.mapped_files, self.files)

    # -- reading ----------------------------------------------------------------------------

    @contextmanager
    def reading(self, write: Write, unit: int) -> Iterator[tuple[Path, int, int]]:
        """File, offset and length of a unit; its bytes do not change meanwhile."""
        self.check_open()
        with self.pinned(write) as kept:
            for segment in kept.record.segments_of(self.node):
                if unit in segment.units:
                    path = kept.folder / segment.file
                    yield path, segment.units[unit], kept.record.units[unit].num_bytes
                    return
            raise WeightsUnavailable(f"node {self.node} does not keep unit {unit} of {write}")

    @contextmanager
    def kept(self, write: Write) -> Iterator[Mapping[str, memoryview]]:
        """The bytes of each tensor of a sealed write that this node keeps; they do not change
        meanwhile."""
        with self.pinned(write) as kept:
            segments = kept.record.segments_of(self.node)
            mapped = {
                segment.file: self.mapped_files.of(kept.folder / segment.file).view
                for segment in segments
            }
            yield {
                place.tensor.name: mapped[place.file][place.offset : place.offset + place.num_bytes]
                for place in tensor_ranges(kept.record.units, segments)
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
        self.check_open()
        return self._assembler.assemble(record, peers, wanted)

    def give_back(self, path: str) -> None:
        self._assembler.give_back(path)
