"""Writes the bytes of a push into the segments of all nodes, and hashes them.

Always true: every tensor of the record is written once and completely, or the write fails; a failed
node is left out and does not affect others; each piece is read from memory once, for its hash and
all its copies.

Tensors in memory that go to one local node are copied in batches; all others piece by piece.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Protocol

from engines.tensors.file_mapping import FileMapping
from engines.tensors.fingerprint import Buffer, head_of, host_fingerprint_of, start
from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.format.pushed_files import FileBytes
from rollout.weights.store.layout.placement import TensorRange, tensor_ranges
from rollout.weights.store.layout.record import StoreRecord
from rollout.weights.store.node.files import Files, MappedSegments, PendingCopy

logger = logging.getLogger(__name__)

# Small enough to be in a core's cache when it is copied, after the hash.
_PIECE_BYTES = 128 << 10
# In one call: a write can be cancelled between calls.
_BATCH_BYTES = 64 << 20
# Errors of an agent that is unreachable or refuses.
AGENT_ERRORS = (OSError, WeightsUnavailable)


@dataclass(frozen=True, slots=True)
class MemoryBytes:
    """A tensor's bytes in memory.

    Attributes:
        address: of the first byte; 0 if unknown.
    """

    view: memoryview
    address: int = 0

    @classmethod
    def of(cls, data: Buffer) -> MemoryBytes:
        """The bytes of this buffer."""
        view = memoryview(data).cast("B")
        if isinstance(data, bytes):
            return cls(view, ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0)
        if view.readonly or not view:  # its address is unknown
            return cls(view)
        return cls(view, ctypes.addressof(ctypes.c_char.from_buffer(view)))

    @property
    def num_bytes(self) -> int:
        return len(self.view)

    def pieces(self, num_bytes: int) -> Iterator[memoryview]:
        """Slices of up to ``num_bytes``."""
        for first in range(0, len(self.view), num_bytes):
            yield self.view[first : first + num_bytes]


TensorContent = Buffer | MemoryBytes | FileBytes


class NodeSink(Protocol):
    """Receives one node's share; all methods may raise OSError."""

    def open(self, place: TensorRange) -> None:
        """The next pieces are this tensor's, in order."""
        ...

    def put(self, piece: memoryview) -> None: ...
    def rebuild(self, place: TensorRange, changes: bytes, fingerprint: str) -> None:
        """This tensor is that of the write that the sink begins from, with these changes.

        Args:
            fingerprint: of the result.
        """
        ...

    def close(self) -> None:
        """The write is complete, or has failed."""
        ...


class FileSink:
    """A node whose files this process can map."""

    def __init__(
        self, paths: Mapping[str, str], mapped_files: MappedSegments, files: Files
    ) -> None:
        self._of_file = {file: mapped_files.of(Path(path)) for file, path in paths.items()}
        self._files = files
        self._region: FileMapping | None = None
        self._offset = 0

    def region(self, file: str) -> FileMapping:
        """The mapping of one of the node's segments."""
        return self._of_file[file]

    def open(self, place: TensorRange) -> None:
        self._region, self._offset = self.region(place.file), place.offset

    def put(self, piece: memoryview) -> None:
        assert self._region is not None
        self._files.put(self._region, self._offset, piece)
        self._offset += len(piece)

    def rebuild(self, place: TensorRange, changes: bytes, fingerprint: str) -> None:
        raise AssertionError(f"{place.tensor.name}: to copy it whole is quicker")

    def close(self) -> None:
        self._region = None

    def copy(self, tensors: Iterable[tuple[TensorRange, MemoryBytes]]) -> list[str]:
        """Copy each tensor from its address to its place; returns the fingerprints."""
        return self._files.copy(
            [
                PendingCopy(
                    head_of(place.tensor.name, place.tensor.dtype, place.tensor.shape),
                    self.region(place.file),
                    place.offset,
                    content.address,
                    place.num_bytes,
                )
                for place, content in tensors
            ]
        )


class SegmentWriter:
    """Writes one version.

    Args:
        changes_of: what a tensor has changed since the write that ``based`` have, or None if it is
            sent whole.
        based: nodes that make tensors of these changes and of that write.

    Attributes:
        failed: nodes that were left out, and the reasons.
        sent_bytes: of tensors and changes, to nodes whose files this process cannot map.
    """

    def __init__(
        self,
        record: StoreRecord,
        sinks: Mapping[str, NodeSink],
        changes_of: Callable[[str], bytes | None] | None = None,
        based: Iterable[str] = (),
    ) -> None:
        self.failed: dict[str, str] = {}
        self.sent_bytes = 0
        self._changes_of = changes_of
        self._based = {node for node in based if not isinstance(sinks.get(node), FileSink)}
        self._record = record
        self._sinks = dict(sinks)
        self._places: dict[str, dict[str, TensorRange]] = {}
        for node in sinks:
            for place in tensor_ranges(record.units, record.segments_of(node)):
                self._places.setdefault(place.tensor.name, {})[node] = place
        self._fingerprints: dict[str, str] = {}
        self._taken: set[str] = set()

    def take(self, tensors: Iterable[tuple[str, TensorContent]]) -> None:
        """Write these tensors; those in memory must not change until this returns.

        Raises:
            WeightMismatch: a tensor is unknown, comes twice, or has another size.
            WeightsUnavailable: so many nodes failed that no node keeps a unit.
        """
        waiting: dict[str, list[tuple[TensorRange, MemoryBytes]]] = {}
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

    def _places_of(self, name: str, content: FileBytes | MemoryBytes) -> Mapping[str, TensorRange]:
        """Node -> place of the tensor there."""
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

    def _copy(self, waiting: Mapping[str, Sequence[tuple[TensorRange, MemoryBytes]]]) -> None:
        """Copy from memory into files of these nodes, many tensors in a call."""
        for node, tensors in waiting.items():
            sink = self._sinks[node]
            assert isinstance(sink, FileSink)
            try:
                found = sink.copy(tensors)
            except AGENT_ERRORS as error:
                self._leave_out(node, error)
                continue
            names = (place.tensor.name for place, _ in tensors)
            self._fingerprints.update(zip(names, found, strict=True))

    def _take(
        self, name: str, content: FileBytes | MemoryBytes, places: Mapping[str, TensorRange]
    ) -> None:
        tensor = next(iter(places.values())).tensor
        hasher = start(tensor.name, tensor.dtype, tensor.shape)
        changes = None if self._changes_of is None else self._changes_of(name)
        if changes is not None and len(changes) >= content.num_bytes:
            changes = None
        sinks, rebuilding = [], []
        for node, place in places.items():
            if changes is not None and node in self._based:
                rebuilding.append(node)
            elif self._to(node, methodcaller("open", place)):
                sinks.append((node, self._sinks[node].put))
                if not isinstance(self._sinks[node], FileSink):
                    self.sent_bytes += content.num_bytes
        for piece in content.pieces(_PIECE_BYTES):
            hasher.update(piece)
            for node, put in tuple(sinks):
                try:
                    put(piece)
                except AGENT_ERRORS as error:
                    sinks.remove((node, put))
                    self._leave_out(node, error)
        found = self._fingerprints[name] = host_fingerprint_of(hasher)
        for node in rebuilding:
            assert changes is not None
            if self._to(node, methodcaller("rebuild", places[node], changes, found)):
                self.sent_bytes += len(changes)

    def _to(self, node: str, act: Callable[[NodeSink], None]) -> bool:
        """Call the node's sink; returns whether the node is still in the write."""
        sink = self._sinks.get(node)
        if sink is None:
            return False
        try:
            act(sink)
        except AGENT_ERRORS as error:
            self._leave_out(node, error)
            return False
        return True

    def _leave_out(self, node: str, error: Exception) -> None:
        self.failed[node] = str(error)
        logger.warning("store: node %s left out of %s: %s", node, self._record.write, error)
        with suppress(*AGENT_ERRORS):  # the reason is known already
            self._sinks.pop(node).close()
        check_covered(self._record, self._sinks, self.failed)

    def finish(self) -> StoreRecord:
        """The record with its fingerprints, when all tensors are written.

        Raises:
            WeightMismatch: names a missing tensor.
        """
        missing = [name for name in self._places if name not in self._fingerprints]
        if missing:
            raise WeightMismatch(
                f"{len(missing)} tensors are missing, first {missing[0]!r}", tensor=missing[0]
            )
        return self._record.sealed(self._fingerprints)

    def close(self) -> None:
        """Close all sinks; a node that has not received everything fails here."""
        with ExitStack() as stack:
            for node in self._sinks:
                stack.callback(self._to, node, methodcaller("close"))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes without a failure so far."""
        return tuple(self._sinks)


def check_covered(record: StoreRecord, nodes: Iterable[str], failed: Mapping[str, str]) -> None:
    """Raise if no node keeps a unit of the write.

    Raises:
        WeightsUnavailable: names the unit, and why each node failed.
    """
    uncovered = record.uncovered(tuple(nodes))
    if uncovered:
        raise WeightsUnavailable(
            f"no node is left for unit {record.units[uncovered[0]].name!r} of {record.write} and "
            f"{len(uncovered) - 1} more{failure_text(failed)}"
        )


def failure_text(failed: Mapping[str, str]) -> str:
    """The failed nodes with reasons, which may begin with the node, in brackets."""
    reasons = {node: why.removeprefix(f"node {node}").lstrip(": ") for node, why in failed.items()}
    return f" ({'; '.join(map(': '.join, reasons.items()))})" if failed else ""
