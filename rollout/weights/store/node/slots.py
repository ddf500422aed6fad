"""The files of one node: two slots, each with one record, whose name says what it counts for.

    <node>/slotA/seg_000.safetensors ...    the node's share of one version
    <node>/slotA/sealed.json                the record: all segments are written
    <node>/slotA/committed.json             the same file, renamed: the version counts

Always true: the slot of the last committed write is never written to; a slot without a valid record
is empty; one call at a time changes the slots; a new process finds the completed steps of the old
one.  So if all processes are killed at any moment, the version that was committed last is complete.

This module uses no other nodes, clocks or sockets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from engines.protocol.plain_text import size_text
from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.layout.commit import NodeState, Write
from rollout.weights.store.layout.placement import Segment
from rollout.weights.store.layout.record import StoreRecord, dump, load
from rollout.weights.store.node.files import Files, MappedSegments

logger = logging.getLogger(__name__)

_SLOTS = ("slotA", "slotB")
_SEALED, _COMMITTED = "sealed.json", "committed.json"


class Kept(NamedTuple):
    """One version in a slot.

    Attributes:
        folder: of its segments.
    """

    record: StoreRecord
    folder: Path
    is_committed: bool


class Slots:
    """The slots of one node and run.

    Args:
        folder: the node's; files of an earlier process in it are adopted.
        why_no_room: why so many more bytes cannot be allocated; an empty string if they can.
    """

    def __init__(
        self,
        node: str,
        folder: Path,
        *,
        files: Files | None = None,
        why_no_room: Callable[[int], str] = lambda _: "",
    ) -> None:
        self.node = node
        self.folder = folder
        self.files = files or Files()
        self.mapped_files = MappedSegments(self.files)
        self._why_no_room = why_no_room
        self._kept: dict[str, Kept] = {}
        self._one_call = threading.Lock()
        self._pinning = threading.Lock()
        self._pins = dict.fromkeys(_SLOTS, 0)
        self._is_closed = threading.Event()
        self.files.make_folder(self.folder)
        for slot in _SLOTS:
            for name in (_COMMITTED, _SEALED):
                self._adopt(slot, name)

    def _adopt(self, slot: str, name: str) -> None:
        path = self.folder / slot / name
        data = self.files.read(path)
        if data is None:
            return
        try:
            record = load(data, where=f"{self.node}/{slot}/{name}")
            self._check_sizes(slot, record)
        except WeightsUnavailable as error:
            logger.error("store: %s; the slot counts as empty", error)
            return
        self._kept[slot] = Kept(record, path.parent, name == _COMMITTED)

    def _check_sizes(self, slot: str, record: StoreRecord) -> None:
        for segment in record.segments_of(self.node):
            size = self.files.size(self.folder / slot / segment.file)
            if size != segment.num_bytes:
                raise WeightsUnavailable(
                    f"{self.node}/{slot}/{segment.file} has {size} bytes, not {segment.num_bytes}"
                )

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    def check_open(self) -> None:
        if self.is_closed:
            raise WeightsUnavailable(f"the store of node {self.node} is closed")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._one_call:
            self.check_open()
            try:
                yield
            except OSError as error:
                raise WeightsUnavailable(f"node {self.node}: {error}") from error

    # -- state, records ---------------------------------------------------------------------

    def state(self) -> NodeState:
        with self._exclusive():
            return self._state()

    def _state(self) -> NodeState:
        kept = tuple(self._kept.values())
        committed = max((slot.record.write for slot in kept if slot.is_committed), default=None)
        return NodeState(committed, frozenset(slot.record.write for slot in kept))

    def record(self, write: Write) -> StoreRecord:
        """The record of a sealed write.

        Raises:
            WeightsUnavailable: this node does not keep it.
        """
        with self._exclusive():
            return self._kept[self._slot_of(write)].record

    def _slot_of(self, write: Write) -> str:
        for slot, kept in self._kept.items():
            if kept.record.write == write:
                return slot
        raise WeightsUnavailable(f"node {self.node} does not keep {write}")

    @contextmanager
    def pinned(self, write: Write) -> Iterator[Kept]:
        """Meanwhile the slot of ``write`` is not overwritten."""
        with self._pinning:
            slot = self._slot_of(write)
            kept = self._kept[slot]
            self._pins[slot] += 1
        try:
            yield kept
        finally:
            with self._pinning:
                self._pins[slot] -= 1

    def num_bytes(self) -> int:
        return sum(
            self.files.size(self.folder / slot / name) or 0
            for slot in _SLOTS
            for name in self.files.names(self.folder / slot)
        )

    # -- writing, in the order of a write ---------------------------------------------------

    def begin(self, record: StoreRecord, current: Write | None) -> dict[str, str]:
        """Allocate this node's share of a write; segment name -> path to fill.

        Args:
            current: the current write.  If this node keeps it and has missed its commit, it is
                committed first, so that it is not overwritten.

        Raises:
            WeightsUnavailable: there is no space, or the slot is being read.
        """
        with self._exclusive():
            if current is not None and current in self._state().sealed:
                self._commit(current)
            segments = record.segments_of(self.node)
            self._check_room(segments)
            with self._pinning:  # without a record no reader can start
                slot = self._free_slot()
                self._kept.pop(slot, None)
            folder = self.folder / slot
            for name in (_COMMITTED, _SEALED):
                self.files.remove(folder / name)
            self._lay_out(slot, segments)
            for segment in segments:
                self.files.write_at(folder / segment.file, 0, segment.header)
            for other in _SLOTS:  # it is next; the free space may be used by then
                if other not in self._kept:
                    self._lay_out(other, segments)
            return {segment.file: str(folder / segment.file) for segment in segments}

    def _free_slot(self) -> str:
        """The slot to write to: the one that is not committed."""
        committed = self._state().committed
        slot = _SLOTS[0]
        if committed is not None and self._slot_of(committed) == slot:
            slot = _SLOTS[1]
        if self._pins[slot]:
            raise WeightsUnavailable(f"node {self.node}: {slot} is being read; not overwritten")
        return slot

    def _check_room(self, segments: tuple[Segment, ...]) -> None:
        wanted = sum(segment.num_bytes for segment in segments)
        more = 2 * wanted - self.num_bytes()
        why_not = self._why_no_room(more) if more > 0 else ""
        if why_not:
            raise WeightsUnavailable(
                f"node {self.node} cannot keep {size_text(wanted)} in each of two slots: {why_not}"
            )

    def _lay_out(self, slot: str, segments: tuple[Segment, ...]) -> None:
        """Make an empty slot contain exactly files of these sizes."""
        folder = self.folder / slot
        self.files.make_folder(folder)
        wanted = {segment.file: segment.num_bytes for segment in segments}
        for name in self.files.names(folder):
            if name not in wanted:
                self.mapped_files.forget(folder / name)
                self.files.remove(folder / name)
        for name, num_bytes in wanted.items():
            if self.files.size(folder / name) == num_bytes:
                continue
            self.mapped_files.forget(folder / name)
            try:
                self.files.allocate(folder / name, num_bytes)
            except OSError as error:
                raise WeightsUnavailable(
                    f"node {self.node}: no space for {slot}/{name} ({size_text(num_bytes)}): "
                    f"{error}"
                ) from error

    def seal(self, record: StoreRecord) -> None:
        """Write the record: all bytes of the write are there. Idempotent."""
        with self._exclusive():
            if record in (kept.record for kept in self._kept.values()):
                return
            slot = self._free_slot()
            self._check_sizes(slot, record)
            folder = self.folder / slot
            self.files.replace(folder / _SEALED, dump(record))
            self._kept[slot] = Kept(record, folder, is_committed=False)

    def commit(self, write: Write) -> None:
        """Make this write the committed one. Idempotent.

        Raises:
            WeightsUnavailable: it is not sealed here, or a later one has been committed.
        """
        with self._exclusive():
            self._commit(write)

    def _commit(self, write: Write) -> None:
        slot, committed = self._slot_of(write), self._state().committed
        if committed is not None and committed > write:
            raise WeightsUnavailable(f"node {self.node} has {committed} committed, so not {write}")
        kept = self._kept[slot]
        if not kept.is_committed:
            self.files.rename(kept.folder / _SEALED, kept.folder / _COMMITTED)
            self._kept[slot] = kept._replace(is_committed=True)
