"""The files of one node: two slots, and which of them counts.

    <node>/slotA/seg_000.safetensors ...    the node's share of one version
    <node>/slotA/record.json                there only when all of that is written
    <node>/committed.json                   the slot that counts

Always true: the committed slot is never written to; a slot without a good record holds nothing;
what a new process finds here is what the old one had finished.  So at any moment in which all
processes are killed, the version that was committed last is whole.

Nothing here knows of other nodes, clocks or sockets.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout.errors import WeightsUnavailable
from rollout.weights.store.commit import NodeState, Write
from rollout.weights.store.files import Files, Regions
from rollout.weights.store.layout import Segment
from rollout.weights.store.limits import gib
from rollout.weights.store.records import Record, dump, load

logger = logging.getLogger(__name__)

_SLOTS = ("slotA", "slotB")
_RECORD = "record.json"
_COMMITTED = "committed.json"


class Slots:
    """What one node keeps of a run.

    Args:
        folder: the node's; whatever an earlier process left in it is adopted.
        why_no_room: told how many bytes more are wanted, says why they cannot be had, or nothing.
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
        self.regions = Regions(self.files)
        self._why_no_room = why_no_room
        self._records: dict[str, Record] = {}
        self._committed: Write | None = None
        self._turn = threading.Lock()
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

    def _check_sizes(self, slot: str, record: Record) -> None:
        for segment in record.segments_of(self.node):
            size = self.files.size(self.folder / slot / segment.file)
            if size != segment.num_bytes:
                raise WeightsUnavailable(
                    f"{self.node}/{slot}/{segment.file} has {size} bytes, not {segment.num_bytes}"
                )

    # -- looking ----------------------------------------------------------------------------

    @property
    def state(self) -> NodeState:
        """What this node can say about versions."""
        sealed = frozenset(record.write for record in self._records.values())
        return NodeState(self._committed, sealed)

    def record(self, write: Write) -> Record:
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
        """Where a file of a sealed write is."""
        return self.folder / self._slot_of(write) / segment.file

    @contextmanager
    def pinned(self, write: Write) -> Iterator[Record]:
        """Meanwhile the slot of ``write`` is not written to; gives its record.

        Raises:
            WeightsUnavailable: this node does not keep it.
        """
        with self._turn:
            slot = self._slot_of(write)
            record = self._records[slot]
            self._pins[slot] += 1
        try:
            yield record
        finally:
            with self._turn:
                self._pins[slot] -= 1

    def num_bytes(self) -> int:
        """Of all segments there are."""
        return sum(
            self.files.size(self.folder / slot / name) or 0
            for slot in _SLOTS
            for name in self.files.names(self.folder / slot)
        )

    # -- writing, in the order of a write ---------------------------------------------------

    def begin(self, record: Record, counts: Write | None) -> dict[str, Path]:
        """Take the space for this node's share of a write; segment name -> path to fill.

        Args:
            counts: the write that counts; if it is here and its commit was never heard, it is
                committed first, so that it is not what is written over.

        Raises:
            WeightsUnavailable: there is no room, or the slot is being read.
        """
        if counts is not None and counts in self.state.sealed:
            self.commit(counts)
        segments = record.segments_of(self.node)
        self._check_room(segments)
        with self._turn:  # once it has no record, nobody can begin to read it
            slot = self._free_slot()
            self._records.pop(slot, None)
        folder = self.folder / slot
        if self.files.size(folder / _RECORD) is not None:
            self.files.remove(folder / _RECORD)
            self.files.sync(folder)
        self._lay_out(slot, segments)
        for segment in segments:
            self.files.write_at(folder / segment.file, 0, segment.header)
        for other in _SLOTS:  # its turn is next, and what is free now may not be then
            if other not in self._records:
                self._lay_out(other, segments)
        return {segment.file: folder / segment.file for segment in segments}

    def _free_slot(self) -> str:
        """The slot to write to: the one that does not count."""
        slot = _SLOTS[0]
        counting = [name for name, one in self._records.items() if one.write == self._committed]
        if counting:
            slot = next(name for name in _SLOTS if name not in counting)
        if self._pins[slot]:
            raise WeightsUnavailable(f"node {self.node}: {slot} is being read; not overwritten")
        return slot

    def _check_room(self, segments: tuple[Segment, ...]) -> None:
        wanted = sum(segment.num_bytes for segment in segments)
        more = 2 * wanted - self.num_bytes()
        why_not = self._why_no_room(more) if more > 0 else ""
        if why_not:
            raise WeightsUnavailable(
                f"node {self.node} cannot keep {gib(wanted)} in each of two slots: {why_not}"
            )

    def _lay_out(self, slot: str, segments: tuple[Segment, ...]) -> None:
        """Files of these sizes, and no others, in a slot that holds nothing."""
        folder = self.folder / slot
        self.files.make_folder(folder)
        wanted = {segment.file: segment.num_bytes for segment in segments}
        for name in self.files.names(folder):
            if name not in wanted:
                self.regions.forget(folder / name)
                self.files.remove(folder / name)
        for name, num_bytes in wanted.items():
            if self.files.size(folder / name) == num_bytes:
                continue
            self.regions.forget(folder / name)
            try:
                self.files.allocate(folder / name, num_bytes)
            except OSError as error:
                raise WeightsUnavailable(
                    f"node {self.node}: no space for {slot}/{name} ({gib(num_bytes)}): {error}"
                ) from error

    def seal(self, record: Record) -> None:
        """All bytes of the write are in: say so.  Done twice it is done once."""
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
        """From now on this write counts.  Done twice it is done once.

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
        body = {"write": [write.number, write.version, write.write_id], "slot": slot}
        self.files.replace(self.folder / _COMMITTED, json.dumps(body).encode())
        self._committed = write

    def clear(self) -> None:
        """Give all memory back."""
        self._records = {}
        self._committed = None
        self.regions.close()
        self.files.remove_folder(self.folder)


def _read_committed(data: bytes) -> Write | None:
    try:
        body = json.loads(data)
        number, version, write_id = body["write"]
        return Write(int(number), int(version), str(write_id))
    except (ValueError, KeyError, TypeError) as error:
        # It is renamed into place whole, so somebody else wrote here.
        logger.error("store: %s is damaged (%s); nothing counts as committed", _COMMITTED, error)
        return None
