"""Files in tmpfs that a trainer writes buckets into and engines of the same host read.

Always true: a slot's space is taken before it is written (a sparse file on a full tmpfs ends the
writer with SIGBUS) and kept for the next push, because first touch costs ten times the copy;
what does not fit is refused before anything is taken; a pool leaves no file behind when it is
closed, and what a killed trainer left is removed by the next pool on the host.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import psutil

from engines.mapping import FileMapping
from rollout.errors import WeightsUnavailable
from rollout.weights.layout import Layouts
from rollout.weights.tmpfs import take_space

logger = logging.getLogger(__name__)

FILE_NAME = "bucket.safetensors"
_PREFIX = "rollout-push"
# Engines let go of files that were removed within a second; more than that, for a busy host.
LET_GO_S = 3.0
# What must stay for everything else on the host.
SPARE_BYTES = 256 << 20


class Slot:
    """One folder with one file, mapped.  The file keeps its length, so engines may map it too.

    Attributes:
        folder: what an engine is told to load.
        view: the file's bytes.

    Raises:
        WeightsUnavailable: there is no room; nothing is left of it.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self.num_bytes = num_bytes
        self._header = b""
        if why_not := why_no_room(num_bytes, folder.parent):
            raise WeightsUnavailable(f"no room for a bucket of {num_bytes} bytes: {why_not}")
        try:
            self._mapping = self._made()
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsUnavailable(
                f"no room for a bucket of {num_bytes} bytes in {folder}: {error}"
            ) from error
        self.view = self._mapping.view

    def _made(self) -> FileMapping:
        self.folder.mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.folder / FILE_NAME, flags, 0o600)
        try:
            take_space(descriptor, self.num_bytes)
            return FileMapping(descriptor, self.num_bytes)
        finally:
            os.close(descriptor)

    def write_header(self, header: bytes) -> None:
        """The file's first bytes."""
        if header is not self._header:
            self.view[: len(header)] = header
            self._header = header

    def remove(self) -> None:
        """Give its memory back; whoever has it mapped keeps it until then."""
        # A tensor over it may still be about to be collected; its pages go with the last one.
        self._mapping.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class SlotPool:
    """The slots of one server's pushes.  Its methods may be called from any thread.

    Args:
        root: a folder in tmpfs, normally ``/dev/shm``.

    Attributes:
        layouts: of what the slots hold.
    """

    def __init__(self, root: str | Path = "/dev/shm") -> None:
        root = Path(root)
        # When files went whose memory engines may give back a little later.
        self._removed_at = time.monotonic() if remove_leftovers(root) else float("-inf")
        started = psutil.Process().create_time()
        owner = f"{os.getpid()}-{started:.2f}"
        self.folder = root / f"{_PREFIX}-{owner}-{secrets.token_hex(4)}"
        self.layouts = Layouts()
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._taken: list[Slot] = []
        self._num_made = 0
        # At the end of the process too, however the pool's owner ended.
        self._remove = weakref.finalize(self, _remove_own, self.folder, os.getpid())

    def take(self, num_bytes: int) -> Slot:
        """A free slot of this size: one that has it already, if there is one.

        Raises:
            WeightsUnavailable: there is no room.
        """
        with self._lock:
            slot = next((one for one in self._free if one.num_bytes == num_bytes), None)
            if slot is not None:
                self._free.remove(slot)
            else:
                slot = self._new(num_bytes)
            self._taken.append(slot)
            return slot

    def _new(self, num_bytes: int) -> Slot:
        if not self.folder.exists():
            self.folder.mkdir(mode=0o700)
        while True:
            self._num_made += 1
            try:
                return Slot(self.folder / f"{self._num_made:06d}", num_bytes)
            except WeightsUnavailable:
                if self._free:
                    # Slots of other sizes stand in the way: the model's buckets have changed.
                    self.trim()
                elif time.monotonic() - self._removed_at > LET_GO_S:
                    raise
                else:  # engines may still have mapped what was removed
                    time.sleep(0.05)

    def give(self, slot: Slot) -> None:
        """It may be written again."""
        with self._lock:
            if slot in self._taken:
                self._taken.remove(slot)
                self._free.append(slot)

    def trim(self) -> None:
        """Remove the slots nobody has taken."""
        self._removed_at = time.monotonic()
        while self._free:
            self._free.pop().remove()

    def num_bytes(self) -> int:
        """Memory that all slots hold."""
        return sum(slot.num_bytes for slot in self._free + self._taken)

    def close(self) -> None:
        with self._lock:
            for slot in self._free + self._taken:
                slot.remove()
            self._free, self._taken = [], []
            self._remove()


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a child that was forked has this object too
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(root: Path) -> int:
    """Remove the files of trainers that were killed; returns of how many."""
    num_removed = 0
    for folder in root.glob(f"{_PREFIX}-*"):
        parts = folder.name.removeprefix(f"{_PREFIX}-").split("-")
        with suppress(ValueError, IndexError):
            if not _lives(int(parts[0]), float(parts[1])):
                logger.info("removing %s: its process has ended", folder)
                shutil.rmtree(folder, ignore_errors=True)
                num_removed += 1
    return num_removed


def _lives(pid: int, started: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started) < 1.0
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def why_no_room(num_bytes: int, folder: str | Path, *, spare_bytes: int = SPARE_BYTES) -> str:
    """Why so many bytes more cannot be taken in a tmpfs folder; empty if they can."""
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if num_bytes > free:
        return f"{folder} has {free} bytes free, {num_bytes} are needed (in Docker: --shm-size)"
    available = psutil.virtual_memory().available
    if num_bytes + spare_bytes > available:
        return f"the host has {available} bytes of memory left, {num_bytes} are needed"
    return ""
