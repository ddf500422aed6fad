"""The files of one node: two slots, and which of them is committed.

    <node>/slotA/seg_000.safetensors ...    the node's share of one version
    <node>/slotA/record.json                exists only when all segments are written
    <node>/committed.json                   the committed slot

Always true: the committed slot is never written to; a slot without a valid record is empty; a new
process finds the completed steps of the old one.  So if all processes are killed at any moment, the
version that was committed last is complete.

This module uses no other nodes, clocks or sockets.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.plain_json import WRONG_FORM, read_json
from engines.protocol.plain_text import size_text
from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.layout.commit import NodeState, Write
from rollout.weights.store.layout.placement import Segment
from rollout.weights.store.layout.record import StoreRecord, dump, load
from rollout.weights.store.node.files import Files, MappedSegments

logger = logging.getLogger(__name__)

_SLOTS = ("slotA", "slotB")
_RECORD = "record.json"
_COMMITTED = "committed.json"


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
        self._records: dict[str, StoreRecord] = {}
        self._committed: Write | None = None
        self._exclusive = threading.Lock()
        self._pins: dict[str, int] = dict.fromkeys(_SLOTS, 0)
        self._adopt()

    def _adopt(self) -> None:
        self.files.make_folder(self.folder)
        for slot in _SLOTS:
            data = self.files.read(self.folder / slot / _RECORD)
            if data is None:
                continue
            try:
                record = load(data, where=f"{self.node}/{slot}/{_RECORD}")
                self._check_sizes(slot, record)
            except WeightsUnavailable as error:
                logger.error("store: %s; the slot counts as empty", error)
                continue
            self._records[slot] = record
        data = self.files.read(self.folder / _COMMITTED)
        if data is not None:
            self._committed = _read_committed(data)

    def _check_sizes(self, slot: str, record: StoreRecord) -> None:
        for segment in record.segments_of(self.node):
            size = self.files.size(self.folder / slot / segment.file)
            if size != segment.num_bytes:
                raise WeightsUnavailable(
                    f"{self.node}/{slot}/{segment.file} has {size} bytes, not {segment.num_bytes}"
                )

    # -- state, records ---------------------------------------------------------------------

    @property
    def state(self) -> NodeState:
        sealed = frozenset(record.write for record in self._records.values())
        return NodeState(self._committed, sealed)

    def record(self, write: Write) -> StoreRecord:
        """The record of a sealed write.

        Raises:
            WeightsUnavailable: this node does not keep it.
        """
        return self._records[self._slot_of(write)]

    def _slot_of(self, write: Write) -> str:
        for slot, record in self._records.items():
            if record.write == write:
                return slot
        raise WeightsUnavailable(f"node {self.node} does not keep {write}")

    def segment_path(self, write: Write, segment: Segment) -> Path:
        """Path of a segment of a sealed write."""
        return self.folder / self._slot_of(write) / segment.file

    @contextmanager
    def pinned(self, write: Write) -> Iterator[StoreRecord]:
        """Meanwhile the slot of ``write`` is not overwritten; yields its record."""
        with self._exclusive:
            slot = self._slot_of(write)
            record = self._records[slot]
            self._pins[slot] += 1
        try:
            yield record
        finally:
            with self._exclusive:
                self._pins[slot] -= 1

    def num_bytes(self) -> int:
        return sum(
            self.files.size(self.folder / slot / name) or 0
            for slot in _SLOTS
            for name in self.files.names(self.folder / slot)
        )

    # -- writing, in the order of a write ---------------------------------------------------

    def begin(self, record: StoreRecord, current: Write | None) -> dict[str, Path]:
        """Allocate this node's share of a write; segment name -> path to fill.

        Args:
            current: the current write.  If this node keeps it and has missed its commit, it is
                committed first, so that it is not overwritten.

        Raises:
            WeightsUnavailable: there is no space, or the slot is being read.
        """
        if current is not None and current in self.state.sealed:
            self.commit(current)
        segments = record.segments_of(self.node)
        self._check_room(segments)
        with self._exclusive:  # without a record no reader can start
            slot = self._free_slot()
            self._records.pop(slot, None)
        folder = self.folder / slot
        if self.files.size(folder / _RECORD) is not None:
            self.files.remove(folder / _RECORD)
            self.files.sync(folder)
        self._lay_out(slot, segments)
        for segment in segments:
            self.files.write_at(folder / segment.file, 0, segment.header)
        for other in _SLOTS:  # it is next; the free space may be used by then
            if other not in self._records:
                self._lay_out(other, segments)
        return {segment.file: folder / segment.file for segment in segments}

    def _free_slot(self) -> str:
        """The slot to write to: the one that is not committed."""
        slot = _SLOTS[0]
        committed = [
            name for name, record in self._records.items() if record.write == self._committed
        ]
        if committed:
            slot = next(name for name in _SLOTS if name not in committed)
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
        slot = self._free_slot()
        if self._records.get(slot) == record:
            return
        self._check_sizes(slot, record)
        folder = self.folder / slot
        for segment in record.segments_of(self.node):
            self.files.sync(folder / segment.file)
        self.files.replace(folder / _RECORD, dump(record))
        self._records[slot] = record

    def commit(self, write: Write) -> None:
        """Make this write the committed one. Idempotent.

        Raises:
            WeightsUnavailable: it is not sealed here, or a later one has been committed.
        """
        if self._committed == write:
            return
        slot = self._slot_of(write)
        if self._committed is not None and self._committed > write:
            raise WeightsUnavailable(
                f"node {self.node} has {self._committed} committed, so not {write}"
            )
        body = {"write": write.to_json(), "slot": slot}
        self.files.replace(self.folder / _COMMITTED, json.dumps(body).encode())
        self._committed = write

    def clear(self) -> None:
        """Remove all files."""
        self._records = {}
        self._committed = None
        self.mapped_files.close()
        self.files.remove_folder(self.folder)


def _read_committed(data: bytes) -> Write | None:
    try:
        body = read_json(data)
        number, version, write_id = body["write"]
        return Write(int(number), int(version), str(write_id))
    except WRONG_FORM as error:
        # It is replaced atomically, so another program wrote it.
        logger.error("store: %s is damaged (%s); no write counts as committed", _COMMITTED, error)
        return None
