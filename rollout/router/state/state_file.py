"""The state of a server's routers that outlives each of them, in shared memory.

Always true: one process at a time has its lock, which the kernel takes back when that process ends.
The memory is that of the process which made the file and of those that have opened it; when all
have ended, nothing is left.  It is at most ``max_bytes``.  A record is there as a whole, or not:
its length is written last, and no record without a length is read.  What must not be written in
part is a number of eight bytes: one instruction writes it, and a process is killed between two.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from enum import IntEnum
from typing import NamedTuple

logger = logging.getLogger(__name__)

_PORT = struct.Struct("<I")
# Three numbers: the block's size as a power of two, with the record's kind and number; its owner;
# its length.  The first one of a block is written before anything else in it.
_NUMBER_BYTES = 8
_HEAD = 3 * _NUMBER_BYTES
_FIRST = 4096
_LEAST_ORDER = 9
_STEP = 1 << 20
MOST_BYTES = 1 << 30


class Kind(IntEnum):
    """Of a record: see ``stored_replies`` and ``session_store``."""

    ATTEMPT = 1
    EVENTS = 2
    SESSION = 3


class Record(NamedTuple):
    """A record that was found."""

    kind: Kind
    owner: int
    number: int
    place: int


class StateFile:
    """A file in memory, which other processes of this machine open by its path.

    Args:
        path: ``path`` of another one, of which this is the same.

    Attributes:
        path: as long as the process that made the file has it open.
        num_lost: records that did not fit.

    Raises:
        OSError: from all of its methods, if that process has ended, or is hidden from this one.
    """

    def __init__(self, path: str, max_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self.num_lost = 0
        self._max_bytes = max_bytes
        self._opened = -1
        self._map: mmap.mmap | None = None
        self._numbers = memoryview(bytearray()).cast("Q")
        self._end = self._reserved = _FIRST
        self._free: dict[int, list[int]] = {}
        self._num_owners = 0

    def __reduce__(self) -> tuple[type[StateFile], tuple[str, int]]:
        return StateFile, (self.path, self._max_bytes)

    @classmethod
    def make(cls, max_bytes: int = MOST_BYTES) -> StateFile:
        """A new one; its memory is used as soon as something is written."""
        file = os.memfd_create("rollout-router")
        os.ftruncate(file, max_bytes)
        made = cls(f"/proc/{os.getpid()}/fd/{file}", max_bytes)
        made._opened = file
        return made

    @property
    def is_there(self) -> bool:
        """Whether this process can open it."""
        try:
            return self._file >= 0
        except OSError as error:
            logger.error("the state of the routers, %s, cannot be opened: %s", self.path, error)
            return False

    def lock(self) -> None:
        """Wait until no other process has the lock, and keep it as long as this process lives."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    @property
    def port(self) -> int:
        """The port of the router; 0 before the first one has one."""
        data = os.pread(self._file, _PORT.size, 0)
        return int(_PORT.unpack(data)[0]) if data else 0

    @port.setter
    def port(self, port: int) -> None:
        os.pwrite(self._file, _PORT.pack(port), 0)

    # -- records ----------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Those of earlier processes; to be called first."""
        self._map = mmap.mmap(self._file, self._max_bytes)
        self._numbers = memoryview(self._map).cast("Q")
        records, at = list[Record](), _FIRST
        while at < self._max_bytes - _HEAD:
            first, owner, length = self._numbers[at // _NUMBER_BYTES : at // _NUMBER_BYTES + 3]
            order, kind, number = first & 0xFF, first >> 8 & 0xFF, first >> 32
            if not order:
                break
            if length:
                records.append(Record(Kind(kind), owner, number, at))
                self._num_owners = max(self._num_owners, owner)
            else:
                self._free.setdefault(order, []).append(at)
            at += 1 << order
        self._end = at
        self._reserved = max(_FIRST, os.fstat(self._file).st_blocks * 512)
        return records

    def new_owner(self) -> int:
        """A number that no owner of records has."""
        self._num_owners += 1
        return self._num_owners

    def put(self, kind: Kind, owner: int, number: int, data: bytes, room: int = 0) -> int:
        """Write a record; its place, or 0 if there is no room for it.

        Args:
            room: bytes that it may have after ``extend``.
        """
        mapped, length = self._map, len(data)
        order = max(_LEAST_ORDER, (max(room, length) + _HEAD - 1).bit_length())
        free = self._free.get(order)
        at = free.pop() if free else self._new(order)
        if at and mapped is not None:
            begin, head = at + _HEAD, at // _NUMBER_BYTES
            mapped[begin : begin + length] = data
            self._numbers[head] = order | kind << 8 | number << 32
            self._numbers[head + 1] = owner
            self._numbers[head + 2] = length
        return at

    def extend(self, at: int, begin: int, data: bytes) -> None:
        """Write more of a record, behind its first ``begin`` bytes, into the room that it has."""
        mapped, end = self._map, begin + len(data)
        if mapped is not None:
            mapped[at + _HEAD + begin : at + _HEAD + end] = data
            self._numbers[at // _NUMBER_BYTES + 2] = end

    def read(self, at: int) -> bytes:
        """The record at a place."""
        assert self._map is not None
        begin = at + _HEAD
        return self._map[begin : begin + self._numbers[at // _NUMBER_BYTES + 2]]

    def remove(self, at: int) -> None:
        """Remove the record at a place; 0 is none."""
        if at and self._map is not None:
            self._numbers[at // _NUMBER_BYTES + 2] = 0
            self._free.setdefault(self._map[at], []).append(at)

    def _new(self, order: int) -> int:
        at, end = self._end, self._end + (1 << order)
        try:
            if self._map is None or end > self._max_bytes:
                raise OSError(f"it has {self._max_bytes} bytes at most")
            if end > self._reserved:
                until = min(self._max_bytes, end + _STEP)
                os.posix_fallocate(self._file, self._reserved, until - self._reserved)
                self._reserved = until
        except OSError as error:
            if not self.num_lost:
                logger.error(
                    "the state of the router is not all in %s: %s; generation goes on, and a "
                    "router that dies loses tokens of requests and turns of sessions",
                    self.path,
                    error,
                )
            self.num_lost += 1
            return 0
        self._end = end
        # Another process finds the end of this block even if its record is never written.
        self._numbers[at // _NUMBER_BYTES] = order
        return at

    def close(self) -> None:
        if self._opened >= 0:
            os.close(self._opened)
            self._opened = -1

    @property
    def _file(self) -> int:
        if self._opened < 0:
            self._opened = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._opened
