"""A folder from which an engine can load one version: what is here, and what is not from peers.

Always true: every tensor in a folder that is handed out has been hashed where it now stands and
is what the record says, unless whoever loads it does that itself: then the folder says what the
fingerprints are; a unit that cannot be had anywhere means no folder at all; what fails at one
holder is asked of the next.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from engines import bulk
from engines.protocol import FINGERPRINTS
from rollout.errors import WeightsUnavailable
from rollout.weights.fingerprint import head_of
from rollout.weights.store import same_path
from rollout.weights.store.commit import Write
from rollout.weights.store.files import Region
from rollout.weights.store.layout import Range, Segment, plan_segments, ranges
from rollout.weights.store.limits import gib
from rollout.weights.store.records import Record
from rollout.weights.store.slots import Slots

logger = logging.getLogger(__name__)

_FOLDER = "assembled"
_STREAMS = 4
# Two read as fast as memory can be read.
_HASHERS = min(4, max(2, len(os.sched_getaffinity(0))))
# What of a checkpoint's folder is weights, and so is not taken from there.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


# One unit's bytes, unproved; raises OSError or WeightsUnavailable where they cannot be had so.
Read = Callable[[Write, int, memoryview], None]


class Peer(Protocol):
    """The agent of another node, as far as reading goes."""

    def ways(self) -> Mapping[str, Read]:
        """How it can be read from, by name; what is to be tried first comes first."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a folder shall be.

    Attributes:
        model_path: a checkpoint, for the files beside the weights.
        name: never used before; the folder's path is then the same on every node that is given it.
        is_proved: False leaves what is on this node to be proved by the engine that loads it.
    """

    model_path: str | None = None
    name: str = ""
    is_proved: bool = True


@dataclass(frozen=True, slots=True)
class Assembled:
    """A folder to load from, until it is given back.

    Attributes:
        local_bytes: that were here; fetched_bytes: that came from peers.
        by: which of those came which way.
        troubles: what was damaged or could not be read on the way, in words.
    """

    path: str
    local_bytes: int = 0
    fetched_bytes: int = 0
    by: Mapping[str, int] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Everywhere:
    """A folder on each node of an engine, to load from until they are given back.

    Attributes:
        path: the same on all of them.
    """

    path: str
    on: Mapping[str, Assembled]


class Assembler:
    """Makes such folders on one node, one at a time; engines that want the same share one."""

    def __init__(self, slots: Slots, why_no_room: Callable[[int], str] = lambda _: "") -> None:
        self._slots = slots
        self._why_no_room = why_no_room
        self._turn = threading.Lock()
        self._held: dict[tuple[Write, bool], _Held] = {}
        # What an earlier process handed out, nobody gives back.
        same_path.forget_all(slots.folder.parent, slots.folder)
        slots.files.remove_folder(slots.folder / _FOLDER)

    def assemble(self, record: Record, peers: Mapping[str, Peer], wanted: Wanted) -> Assembled:
        """All of ``record``.

        Raises:
            WeightsUnavailable: naming the first unit that cannot be had, and why.
        """
        key, name = (record.write, wanted.is_proved), wanted.name
        with self._turn:
            held = self._held.get(key)
            if held is None:
                held = self._made(record, peers, wanted)
                self._held[key] = held
            held.num_users += 1
            if not name:
                return held.assembled
            folder, path = Path(held.assembled.path), self._slots.folder.parent / name
            held.links[name] = path
            held.stack.callback(same_path.forget, path, folder)
            try:
                same_path.lead(path, folder)
            except OSError:
                self._give_back(key, name)
                raise
            return replace(held.assembled, path=str(path))

    def _made(self, record: Record, peers: Mapping[str, Peer], wanted: Wanted) -> _Held:
        files = self._slots.files
        kind = "proved" if wanted.is_proved else "to-prove"
        folder = self._slots.folder / _FOLDER / f"{record.write.number}-{kind}"
        with ExitStack() as stack:
            stack.callback(files.remove_folder, folder)
            files.make_folder(folder)
            local: Sequence[Segment] = ()
            if record.write in self._slots.state.sealed:
                stack.enter_context(self._slots.pinned(record.write))
                local = record.segments_of(self._slots.node)
            assembly = _Assembly(self._slots, record, local, peers, self._why_no_room)
            assembled = assembly.into(folder, is_proved=wanted.is_proved)
            if not wanted.is_proved:
                told = json.dumps(dict(record.fingerprints)).encode()
                files.write(folder / FINGERPRINTS, told)
            if wanted.model_path is not None:
                _link_beside(Path(wanted.model_path), folder)
            return _Held(assembled, stack.pop_all())

    def give_back(self, path: str) -> None:
        """The engine has read it, or will not.

        Args:
            path: or the name that it was assembled for.
        """
        with self._turn:
            for key, held in list(self._held.items()):
                if path == held.assembled.path or Path(path).name in held.links:
                    self._give_back(key, Path(path).name)

    def _give_back(self, key: tuple[Write, bool], name: str) -> None:
        held = self._held[key]
        if name in held.links:
            same_path.forget(held.links.pop(name), Path(held.assembled.path))
        held.num_users -= 1
        if not held.num_users:
            self._held.pop(key).stack.close()

    def close(self) -> None:
        """Take all back."""
        with self._turn:
            while self._held:
                self._held.popitem()[1].stack.close()


@dataclass(slots=True)
class _Held:
    assembled: Assembled
    stack: ExitStack
    num_users: int = 0
    links: dict[str, Path] = field(default_factory=dict)


class _Assembly:
    def __init__(
        self,
        slots: Slots,
        record: Record,
        local: Sequence[Segment],
        peers: Mapping[str, Peer],
        why_no_room: Callable[[int], str],
    ) -> None:
        self._slots = slots
        self._record = record
        self._local = local
        self._peers = peers
        self._why_no_room = why_no_room
        self._troubles: list[str] = []
        self._by: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._kept = {node: frozenset(record.kept.get(node, ())) for node in peers}

    def into(self, folder: Path, *, is_proved: bool) -> Assembled:
        good, whole = self._look_at_local(is_proved=is_proved)
        units = {unit for segment in whole for unit in segment.units}
        for segment in whole:
            self._slots.files.link(
                self._slots.segment_path(self._record.write, segment), folder / segment.file
            )
        missing = [unit for unit in range(len(self._record.units)) if unit not in units]
        if missing:
            self._bring(missing, good, folder)
        sizes = [unit.num_bytes for unit in self._record.units]
        local_bytes = sum(sizes[unit] for unit in units | good.keys())
        return Assembled(
            str(folder),
            local_bytes,
            sum(sizes) - local_bytes,
            dict(self._by),
            tuple(self._troubles),
        )

    def _look_at_local(self, *, is_proved: bool) -> tuple[dict[int, memoryview], list[Segment]]:
        """Units that are here and right, with their bytes; files in which all is right."""
        regions = {
            segment.file: self._slots.regions.of(
                self._slots.segment_path(self._record.write, segment)
            )
            for segment in self._local
        }
        bad = self._bad_units(regions) if is_proved else set()
        good: dict[int, memoryview] = {}
        whole: list[Segment] = []
        for segment in self._local:
            view = regions[segment.file].view
            if view[: len(segment.header)] != segment.header:
                self._trouble(f"{segment.file} here: its header is damaged")
            elif not bad.intersection(segment.units):
                whole.append(segment)
            for unit, offset in segment.units.items():
                if unit in bad:
                    self._trouble(f"unit {self._record.units[unit].name!r} here is damaged")
                else:
                    good[unit] = view[offset : offset + self._record.units[unit].num_bytes]
        return good, whole

    def _bad_units(self, regions: Mapping[str, Region]) -> set[int]:
        wanted = list(ranges(self._record.units, self._local))
        parts = [wanted[first::_HASHERS] for first in range(_HASHERS)]
        with ThreadPoolExecutor(_HASHERS) as pool:
            return set().union(*pool.map(partial(self._bad_among, regions), parts))

    def _bad_among(self, regions: Mapping[str, Region], part: Sequence[Range]) -> set[int]:
        """Units of which one of these tensors is not what the record says."""
        at = [regions[one.file].address + one.offset for one in part]
        heads = [head_of(one.tensor.name, one.tensor.dtype, one.tensor.shape) for one in part]
        found = bulk.copy_and_hash(heads, at, at, [one.num_bytes for one in part])
        told = self._record.fingerprints
        rows = zip(part, found, strict=True)
        return {one.unit for one, its in rows if its != told.get(one.tensor.name)}

    def _bring(self, missing: Sequence[int], good: Mapping[int, memoryview], folder: Path) -> None:
        segments = plan_segments(
            self._record.units, missing, self._record.segment_bytes, stem="fetched"
        )
        needed = sum(segment.num_bytes for segment in segments)
        if why_not := self._why_no_room(needed):
            raise WeightsUnavailable(f"no room for {gib(needed)} from other nodes: {why_not}")
        contents: dict[int, list[Range]] = {}
        for one in ranges(self._record.units, segments):
            contents.setdefault(one.unit, []).append(one)
        with ExitStack() as stack:
            for segment in segments:
                path = folder / segment.file
                self._slots.files.allocate(path, segment.num_bytes)
                region = self._slots.files.map(path)
                stack.callback(region.close)
                self._slots.files.put(region, 0, memoryview(segment.header))
                self._fill(segment, region, contents, good)

    def _fill(
        self,
        segment: Segment,
        region: Region,
        contents: Mapping[int, list[Range]],
        good: Mapping[int, memoryview],
    ) -> None:
        def fill(unit: int) -> None:
            offset = segment.units[unit]
            into = region.view[offset : offset + self._record.units[unit].num_bytes]

            def is_proved() -> bool:
                return not self._bad_among({segment.file: region}, contents[unit])

            try:
                self._fill_unit(unit, into, is_proved, good.get(unit))
            finally:
                into.release()

        with ThreadPoolExecutor(_STREAMS) as pool:
            # All have ended before an error goes on: the mapping they write to is then closed.
            done = [pool.submit(fill, unit) for unit in segment.units]
            wait(done, return_when=FIRST_EXCEPTION)
            pool.shutdown(cancel_futures=True)
        for one in done:
            if not one.cancelled():
                one.result()

    def _fill_unit(
        self,
        unit: int,
        into: memoryview,
        is_proved: Callable[[], bool],
        here: memoryview | None,
    ) -> None:
        name = self._record.units[unit].name
        tried = []
        if here is not None:
            into[:] = here
            if is_proved():
                return
        for where, way, read in self._sources(unit):
            try:
                read(self._record.write, unit, into)
            except (OSError, WeightsUnavailable) as error:
                tried.append(f"{where}: {error}")
                continue
            if is_proved():
                for one in tried:
                    self._trouble(f"unit {name!r} from {one}")
                with self._counting:
                    self._by[way] += len(into)
                return
            tried.append(f"{where}: damaged")
        raise WeightsUnavailable(
            f"unit {name!r} of {self._record.write} cannot be had: "
            f"{'; '.join(tried) or 'no other node keeps it'}"
        )

    def _sources(self, unit: int) -> Iterator[tuple[str, str, Read]]:
        """Every way from every holder, with words for where it leads."""
        for node in self._holders(unit):
            ways = self._peers[node].ways()
            for way, read in ways.items():
                yield (f"{node} by {way}" if len(ways) > 1 else node), way, read

    def _holders(self, unit: int) -> list[str]:
        """Who may be asked, not always in the same order: all are to carry their share."""
        holders = [node for node, kept in self._kept.items() if unit in kept]
        turn = unit % len(holders) if holders else 0
        return holders[turn:] + holders[:turn]

    def _trouble(self, what: str) -> None:
        logger.warning("store: node %s: %s", self._slots.node, what)
        self._troubles.append(what)


def _link_beside(model_path: Path, folder: Path) -> None:
    """Configuration and tokenizer, as an engine may look for them beside the weights."""
    for path in model_path.iterdir() if model_path.is_dir() else ():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            (folder / path.name).symlink_to(path.absolute())
