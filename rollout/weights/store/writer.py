"""The bytes of a push into the segments of all nodes, hashed on the way.

Always true: every tensor of the record has been written once and whole, or the write has failed;
a node that fails is left out and hinders no other; each piece is read from memory once, for its
hash and for every copy of it.

What goes from memory into the files of this node alone is copied by one call for many tensors; all
else piece by piece.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Protocol

from rollout.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.fingerprint import Buffer, head_of, host_fingerprint_of, start
from rollout.weights.store.files import Files, Incoming, Region, Regions
from rollout.weights.store.layout import Range, ranges
from rollout.weights.store.records import Record

logger = logging.getLogger(__name__)

# Small enough to be in a core's cache when it is copied, after it was read to be hashed.
_PIECE_BYTES = 128 << 10
# So much by one call: then somebody may want the write to be given up.
_BATCH_BYTES = 64 << 20
# What an agent that cannot be reached, or that refuses, may raise.
FAILURES = (OSError, WeightsUnavailable)


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """A tensor's bytes in memory.

    Attributes:
        address: where they are; 0 if that is not known.
    """

    view: memoryview
    address: int = 0

    @classmethod
    def of(cls, data: Buffer) -> MemoryBytes:
        """What is in this buffer."""
        view = memoryview(data).cast("B")
        if isinstance(data, bytes):
            return cls(view, ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0)
        if view.readonly or not view:  # Python does not tell
            return cls(view)
        return cls(view, ctypes.addressof(ctypes.c_char.from_buffer(view)))

    @property
    def num_bytes(self) -> int:
        return len(self.view)

    def pieces(self, num_bytes: int) -> Iterator[memoryview]:
        """One after the other."""
        for first in range(0, len(self.view), num_bytes):
            yield self.view[first : first + num_bytes]


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A tensor's bytes in a file that somebody else may shorten at any time: read, not mapped,
    for then that is an error and not the end of the process."""

    descriptor: int
    offset: int
    num_bytes: int

    def pieces(self, num_bytes: int) -> Iterator[memoryview]:
        """One after the other, in one buffer that stays in a core's cache.

        Raises:
            OSError: the file is shorter now.
        """
        buffer = memoryview(bytearray(min(num_bytes, self.num_bytes)))
        offset, end = self.offset, self.offset + self.num_bytes
        while offset < end:
            count = os.preadv(self.descriptor, [buffer[: end - offset]], offset)
            if not count:
                raise OSError("the pushed file was cut while it was read")
            yield buffer[:count]
            offset += count


Content = Buffer | MemoryBytes | FileBytes


class Sink(Protocol):
    """Where one node's share goes; any of these may raise OSError."""

    def open(self, place: Range) -> None:
        """The pieces to come are this tensor's, in order."""
        ...

    def put(self, piece: memoryview) -> None: ...
    def close(self) -> None:
        """All has arrived; or the write has failed."""
        ...


class FileSink:
    """A node whose files this process can map."""

    def __init__(self, paths: Mapping[str, str], regions: Regions, files: Files) -> None:
        self._of_file = {file: regions.of(Path(path)) for file, path in paths.items()}
        self._files = files
        self._region: Region | None = None
        self._offset = 0

    def region(self, file: str) -> Region:
        """The bytes of one of the node's segments."""
        return self._of_file[file]

    def open(self, place: Range) -> None:
        self._region, self._offset = self.region(place.file), place.offset

    def put(self, piece: memoryview) -> None:
        assert self._region is not None
        self._files.put(self._region, self._offset, piece)
        self._offset += len(piece)

    def close(self) -> None:
        self._region = None

    def copy(self, tensors: Iterable[tuple[Range, MemoryBytes]]) -> list[str]:
        """Each from its address to its place; their fingerprints."""
        return self._files.copy(
            [
                Incoming(
                    head_of(place.tensor.name, place.tensor.dtype, place.tensor.shape),
                    self.region(place.file),
                    place.offset,
                    content.address,
                    place.num_bytes,
                )
                for place, content in tensors
            ]
        )


class Writing:
    """One write under way.

    Attributes:
        failed: nodes that were left out, and why.
    """

    def __init__(self, record: Record, sinks: Mapping[str, Sink]) -> None:
        self.failed: dict[str, str] = {}
        self._record = record
        self._sinks = dict(sinks)
        self._places: dict[str, dict[str, Range]] = {}
        for node in sinks:
            for place in ranges(record.units, record.segments_of(node)):
                self._places.setdefault(place.tensor.name, {})[node] = place
        self._fingerprints: dict[str, str] = {}
        self._taken: set[str] = set()

    def take(self, tensors: Iterable[tuple[str, Content]]) -> None:
        """Write these tensors; those in memory stay as they are until this returns.

        Raises:
            WeightMismatch: one that the record has not, has already, or has in another size.
            WeightsUnavailable: so many nodes have failed that a unit is kept by none.
        """
        waiting: dict[str, list[tuple[Range, MemoryBytes]]] = {}
        num_bytes = 0
        for name, content in tensors:
            if not isinstance(content, FileBytes | MemoryBytes):
                content = MemoryBytes.of(content)
            places = self._places_of(name, content)
            nodes = [node for node in places if node in self._sinks]
            if (
                isinstance(content, FileBytes)
                or not content.address
                or len(nodes) != 1
                or not isinstance(self._sinks[nodes[0]], FileSink)
            ):
                self._take(name, content, places)
                continue
            waiting.setdefault(nodes[0], []).append((places[nodes[0]], content))
            num_bytes += content.num_bytes
            if num_bytes >= _BATCH_BYTES:
                self._copy(waiting)
                waiting, num_bytes = {}, 0
        self._copy(waiting)

    def _places_of(self, name: str, content: FileBytes | MemoryBytes) -> Mapping[str, Range]:
        """Where it goes on which nodes."""
        places = self._places.get(name)
        if places is None or name in self._taken:
            what = "is not in the manifest" if places is None else "comes twice"
            raise WeightMismatch(f"tensor {name!r} {what}", tensor=name)
        place = next(iter(places.values()))
        if content.num_bytes != place.num_bytes:
            raise WeightMismatch(
                f"tensor {name!r} has {content.num_bytes} bytes, its shape makes {place.num_bytes}",
                tensor=name,
            )
        self._taken.add(name)
        return places

    def _copy(self, waiting: Mapping[str, Sequence[tuple[Range, MemoryBytes]]]) -> None:
        """From memory into files of these nodes, many by one call."""
        for node, tensors in waiting.items():
            sink = self._sinks[node]
            assert isinstance(sink, FileSink)
            try:
                found = sink.copy(tensors)
            except FAILURES as error:
                self._leave_out(node, error)
                continue
            names = (place.tensor.name for place, _ in tensors)
            self._fingerprints.update(zip(names, found, strict=True))

    def _take(
        self, name: str, content: FileBytes | MemoryBytes, places: Mapping[str, Range]
    ) -> None:
        tensor = next(iter(places.values())).tensor
        hasher = start(tensor.name, tensor.dtype, tensor.shape)
        sinks = []
        for node, its_place in places.items():
            if self._to(node, methodcaller("open", its_place)):
                sinks.append((node, self._sinks[node].put))
        for piece in content.pieces(_PIECE_BYTES):
            hasher.update(piece)
            for node, put in tuple(sinks):
                try:
                    put(piece)
                except FAILURES as error:
                    sinks.remove((node, put))
                    self._leave_out(node, error)
        self._fingerprints[name] = host_fingerprint_of(hasher)

    def _to(self, node: str, act: Callable[[Sink], None]) -> bool:
        """Whether that node is still in the write."""
        sink = self._sinks.get(node)
        if sink is None:
            return False
        try:
            act(sink)
        except FAILURES as error:
            self._leave_out(node, error)
            return False
        return True

    def _leave_out(self, node: str, error: Exception) -> None:
        self.failed[node] = str(error)
        logger.warning("store: node %s left out of %s: %s", node, self._record.write, error)
        with suppress(*FAILURES):  # what went wrong is known already
            self._sinks.pop(node).close()
        check_covered(self._record, self._sinks, self.failed)

    def finish(self) -> Record:
        """Everything is in: the record with its fingerprints.

        Raises:
            WeightMismatch: naming a tensor that never came.
        """
        missing = [name for name in self._places if name not in self._fingerprints]
        if missing:
            raise WeightMismatch(
                f"{len(missing)} tensors never came, first {missing[0]!r}", tensor=missing[0]
            )
        return self._record.sealed(self._fingerprints)

    def close(self) -> None:
        """No more comes; a node that has not taken all is found out here."""
        for node in list(self._sinks):
            self._to(node, lambda sink: sink.close())

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those that have taken everything so far."""
        return tuple(self._sinks)


def check_covered(record: Record, nodes: Iterable[str], failed: Mapping[str, str]) -> None:
    """Refuse a write of which a unit is kept by no node.

    Raises:
        WeightsUnavailable: naming the unit and why each node fell out.
    """
    uncovered = record.uncovered(tuple(nodes))
    if uncovered:
        why = "; ".join(f"{node}: {error}" for node, error in failed.items())
        raise WeightsUnavailable(
            f"{record.write} is not kept: no node is left for unit "
            f"{record.units[uncovered[0]].name!r} and {len(uncovered) - 1} more ({why})"
        )
