"""Assembles a folder from which an engine loads one version: local units, and others from peers.

Always true: every tensor in a folder has been verified against the record in its place, unless the
engine verifies what it loads: then the folder contains the fingerprints; if a unit is unavailable,
there is no folder; if reading from one peer fails, the next one is tried.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from engines.protocol import FINGERPRINTS
from engines.protocol.plain_text import size_text
from engines.tensors import bulk_copy
from engines.tensors.file_mapping import FileMapping
from engines.tensors.fingerprint import head_of
from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.layout.commit import Write
from rollout.weights.store.layout.placement import (
    Segment,
    TensorRange,
    plan_segments,
    tensor_ranges,
)
from rollout.weights.store.layout.record import StoreRecord
from rollout.weights.store.node.base_folder import create_link, remove_link, remove_links
from rollout.weights.store.node.slots import Kept, Slots

logger = logging.getLogger(__name__)

_FOLDER = "assembled"
_STREAMS = 4
# Two use all memory bandwidth.
_HASHERS = min(4, max(2, len(os.sched_getaffinity(0))))
# Weights in a checkpoint's folder; they are not linked.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


# Reads one unit's bytes, unverified; raises OSError or WeightsUnavailable.
ReadUnit = Callable[[Write, int, memoryview], None]


class Peer(Protocol):
    """The agent of another node, for reading."""

    def unit_readers(self) -> Mapping[str, ReadUnit]:
        """Functions that read a unit, by name of the transport, in order of preference."""
        ...


@dataclass(frozen=True, slots=True)
class AssemblyRequest:
    """A request for a folder.

    Attributes:
        model_path: a checkpoint, for the files beside the weights.
        name: unique; the folder's path has it, and is the same on every node.
        is_verified: False if the engine that loads the folder verifies this node's units.
    """

    model_path: str | None = None
    name: str = field(default_factory=lambda: f"for-{uuid.uuid4().hex}")
    is_verified: bool = True


@dataclass(frozen=True, slots=True)
class AssembledFolder:
    """A folder to load from, until it is released.

    Attributes:
        local_bytes: bytes from this node; fetched_bytes: bytes from peers.
        by: fetched bytes by transport.
        troubles: damaged units and failed reads, as text.
    """

    path: str
    local_bytes: int = 0
    fetched_bytes: int = 0
    by: Mapping[str, int] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FoldersOnNodes:
    """A folder on each node of an engine, until they are released.

    Attributes:
        path: the same on all of them.
    """

    path: str
    folders: Mapping[str, AssembledFolder]


class Assembler:
    """Assembles folders on one node, one at a time; engines of one version share a folder."""

    def __init__(self, slots: Slots, why_no_room: Callable[[int], str] = lambda _: "") -> None:
        self._slots = slots
        self._why_no_room = why_no_room
        self._exclusive = threading.Lock()
        self._used: dict[tuple[Write, bool], _UsedFolder] = {}
        # Folders of an earlier process are not released otherwise.
        remove_links(slots.folder.parent, slots.folder)
        slots.files.remove_folder(slots.folder / _FOLDER)

    def assemble(
        self, record: StoreRecord, peers: Mapping[str, Peer], wanted: AssemblyRequest
    ) -> AssembledFolder:
        """All of ``record``.

        Raises:
            WeightsUnavailable: names the first unavailable unit, and the reason.
        """
        key = record.write, wanted.is_verified
        with self._exclusive:
            used = self._used.get(key)
            if used is None:
                used = self._used[key] = self._made(record, peers, wanted)
            path = self._slots.folder.parent / wanted.name
            used.links.add(path)
            try:
                create_link(path, Path(used.assembled.path))
            except OSError:
                self._give_back(key, path)
                raise
            return replace(used.assembled, path=str(path))

    def _made(
        self, record: StoreRecord, peers: Mapping[str, Peer], wanted: AssemblyRequest
    ) -> _UsedFolder:
        files = self._slots.files
        kind = "verified" if wanted.is_verified else "to-verify"
        folder = self._slots.folder / _FOLDER / f"{record.write.number}-{kind}"
        with ExitStack() as stack:
            stack.callback(files.remove_folder, folder)
            for path in (folder.parent, folder):
                files.make_folder(path)
            kept: Kept | None = None
            with suppress(WeightsUnavailable):  # all of it comes from other nodes
                kept = stack.enter_context(self._slots.pinned(record.write))
            assembly = _Assembly(self._slots, record, kept, peers, self._why_no_room)
            assembled = assembly.into(folder, is_verified=wanted.is_verified)
            if not wanted.is_verified:
                fingerprints = json.dumps(dict(record.fingerprints)).encode()
                files.write(folder / FINGERPRINTS, fingerprints)
            if wanted.model_path is not None:
                _link_beside(Path(wanted.model_path), folder)
            return _UsedFolder(assembled, stack.pop_all())

    def give_back(self, name: str) -> None:
        """Release a folder, by the name of its request or by its path."""
        path = self._slots.folder.parent / Path(name).name
        with self._exclusive:
            for key, used in list(self._used.items()):
                if path in used.links:
                    self._give_back(key, path)

    def _give_back(self, key: tuple[Write, bool], path: Path) -> None:
        used = self._used[key]
        used.links.remove(path)
        remove_link(path, Path(used.assembled.path))
        if not used.links:
            self._used.pop(key).stack.close()

    def close(self) -> None:
        with self._exclusive:
            for key, used in list(self._used.items()):
                for path in list(used.links):
                    self._give_back(key, path)


@dataclass(slots=True)
class _UsedFolder:
    """A folder, and the paths by which engines load from it."""

    assembled: AssembledFolder
    stack: ExitStack
    links: set[Path] = field(default_factory=set)


class _Assembly:
    def __init__(
        self,
        slots: Slots,
        record: StoreRecord,
        kept: Kept | None,
        peers: Mapping[str, Peer],
        why_no_room: Callable[[int], str],
    ) -> None:
        self._slots = slots
        self._record = record
        self._local = kept.record.segments_of(slots.node) if kept else ()
        self._slot = kept.folder if kept else Path()
        self._here: dict[int, memoryview] = {}
        self._peers = peers
        self._why_no_room = why_no_room
        self._troubles: list[str] = []
        self._by: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._kept = {node: frozenset(record.kept.get(node, ())) for node in peers}

    def into(self, folder: Path, *, is_verified: bool) -> AssembledFolder:
        intact = self._intact_segments(is_verified=is_verified)
        for segment in intact:
            self._slots.files.link(self._slot / segment.file, folder / segment.file)
        linked = {unit for segment in intact for unit in segment.units}
        missing = [unit for unit in range(len(self._record.units)) if unit not in linked]
        if missing:
            self._fill_in(missing, folder)
        fetched = sum(self._by.values())
        local = self._record.num_bytes - fetched
        return AssembledFolder(str(folder), local, fetched, dict(self._by), tuple(self._troubles))

    def _intact_segments(self, *, is_verified: bool) -> list[Segment]:
        """The segments on this node that are whole; notes the intact units of all."""
        mapped_files = {
            segment.file: self._slots.mapped_files.of(self._slot / segment.file)
            for segment in self._local
        }
        bad = self._bad_units(mapped_files) if is_verified else set()
        for unit in sorted(bad):
            self._trouble(f"unit {self._record.units[unit].name!r} on this node is damaged")
        intact = []
        for segment in self._local:
            view = mapped_files[segment.file].view
            for unit in segment.units.keys() - bad:
                begin = segment.units[unit]
                self._here[unit] = view[begin : begin + self._record.units[unit].num_bytes]
            if view[: len(segment.header)] != segment.header:
                self._trouble(f"{segment.file} on this node: its header is damaged")
            elif not bad.intersection(segment.units):
                intact.append(segment)
        return intact

    def _bad_units(self, mapped_files: Mapping[str, FileMapping]) -> set[int]:
        wanted = list(tensor_ranges(self._record.units, self._local))
        parts = [wanted[first::_HASHERS] for first in range(_HASHERS)]
        with ThreadPoolExecutor(_HASHERS) as pool:
            return set().union(*pool.map(partial(self._bad_among, mapped_files), parts))

    def _bad_among(
        self, mapped_files: Mapping[str, FileMapping], part: Sequence[TensorRange]
    ) -> set[int]:
        """Units of which one of these tensors differs from the record."""
        at = [mapped_files[place.file].address + place.offset for place in part]
        heads = [
            head_of(place.tensor.name, place.tensor.dtype, place.tensor.shape) for place in part
        ]
        found = bulk_copy.copy_and_hash(heads, at, at, [place.num_bytes for place in part])
        expected = self._record.fingerprints
        rows = zip(part, found, strict=True)
        return {
            place.unit
            for place, fingerprint in rows
            if fingerprint != expected.get(place.tensor.name)
        }

    def _fill_in(self, missing: Sequence[int], folder: Path) -> None:
        """Make files of these units."""
        segments = plan_segments(
            self._record.units, missing, self._record.segment_bytes, stem="fetched"
        )
        needed = sum(segment.num_bytes for segment in segments)
        if why_not := self._why_no_room(needed):
            raise WeightsUnavailable(f"no room for {size_text(needed)} from other nodes: {why_not}")
        for segment in segments:
            path = folder / segment.file
            self._slots.files.allocate(path, segment.num_bytes)
            with closing(self._slots.files.map(path)) as region:
                self._slots.files.put(region, 0, memoryview(segment.header))
                self._fill(segment, region)

    def _fill(self, segment: Segment, region: FileMapping) -> None:
        places: dict[int, list[TensorRange]] = {unit: [] for unit in segment.units}
        for place in tensor_ranges(self._record.units, [segment]):
            places[place.unit].append(place)

        def fill(unit: int) -> None:
            begin = segment.units[unit]
            with region.view[begin : begin + self._record.units[unit].num_bytes] as into:
                self._fill_unit(
                    unit, into, lambda: not self._bad_among({segment.file: region}, places[unit])
                )

        with ThreadPoolExecutor(_STREAMS) as pool:
            # All threads have ended before an error is raised: it closes the mapping they write to.
            done = [pool.submit(fill, unit) for unit in segment.units]
            wait(done, return_when=FIRST_EXCEPTION)
            pool.shutdown(cancel_futures=True)
        for future in done:
            if not future.cancelled():
                future.result()

    def _fill_unit(self, unit: int, into: memoryview, is_verified: Callable[[], bool]) -> None:
        name = self._record.units[unit].name
        tried = []
        for where, way, read in self._sources(unit):
            try:
                read(self._record.write, unit, into)
            except (OSError, WeightsUnavailable) as error:
                tried.append(f"{where}: {error}")
                continue
            if is_verified():
                for failure in tried:
                    self._trouble(f"unit {name!r} from {failure}")
                if way:
                    with self._counting:
                        self._by[way] += len(into)
                return
            tried.append(f"{where}: damaged")
        raise WeightsUnavailable(
            f"unit {name!r} of {self._record.write} cannot be had: "
            f"{'; '.join(tried) or 'no other node keeps it'}"
        )

    def _sources(self, unit: int) -> Iterator[tuple[str, str, ReadUnit]]:
        """This node, and every transport from every node that keeps the unit: description,
        transport, reader."""
        if unit in self._here:
            yield "this node", "", self._copy
        for node in self._holders(unit):
            ways = self._peers[node].unit_readers()
            for way, read in ways.items():
                yield (f"{node} by {way}" if len(ways) > 1 else node), way, read

    def _copy(self, write: Write, unit: int, into: memoryview) -> None:
        into[:] = self._here[unit]

    def _holders(self, unit: int) -> list[str]:
        """Nodes that keep the unit; the order differs by unit, to balance the load."""
        holders = [node for node, kept in self._kept.items() if unit in kept]
        turn = unit % len(holders) if holders else 0
        return holders[turn:] + holders[:turn]

    def _trouble(self, what: str) -> None:
        logger.warning("store: node %s: %s", self._slots.node, what)
        self._troubles.append(what)


def _link_beside(model_path: Path, folder: Path) -> None:
    """Link configuration and tokenizer: an engine may read them beside the weights."""
    for path in model_path.iterdir() if model_path.is_dir() else ():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            (folder / path.name).symlink_to(path.absolute())
