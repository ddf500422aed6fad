"""Files in tmpfs: a trainer writes buckets into them, engines on the same host read them.

Always true: a buffer's space is allocated before the first write (a write to a sparse file on a
full tmpfs kills the process with SIGBUS) and kept for the next push, because new pages cost ten
times the copy; a buffer that does not fit is refused before any space is allocated; a closed pool
has no files, unless the store reads them, with which they go; the next pool on the host removes the
files of killed trainers; a held buffer is written again only after its release, and only if the
file at its path still is its own, in full.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from engines.process.locks import Hold, held, make_held, remove_unheld
from engines.process.own_files import new_file
from engines.protocol.plain_text import describe
from engines.tensors.file_mapping import FileMapping
from engines.tensors.file_space import take_space
from rollout.core.errors import WeightsUnavailable
from rollout.core.machine import room_on, why_no_room
from rollout.core.os_errors import way_out
from rollout.core.pending import Pending
from rollout.weights.format.bucket_layout import LayoutCache, lay_out

logger = logging.getLogger(__name__)

Pin = Callable[[int, int], Callable[[], object]]
"""Prepares memory at an address, of so many bytes, for a GPU; returns what undoes it."""

FILE_NAME = "bucket.safetensors"
_PREFIX = "rollout-push"
# Engines unmap removed files within a second; this allows for a busy host.
UNMAP_S = 3.0
MORE_ROOM = "set weights.shared_memory_path elsewhere, or weights.transport to by_value"
"""What helps where a tmpfs folder has no room."""
# For the store's answer to an offer, which it gives at once.
_OFFER_S = 5.0
# Memory that stays free for everything else on the host.
SPARE_BYTES = 256 << 20


class ShmBuffer:
    """One folder with one file, mapped.  The file keeps its length, so engines may map it too.

    Args:
        pin: undone before the memory is unmapped.

    Attributes:
        folder: the path that an engine loads.
        view: the file's bytes.

    Raises:
        WeightsUnavailable: there is no space; no file remains.
    """

    def __init__(self, folder: Path, num_bytes: int, pin: Pin | None = None) -> None:
        self.folder = folder
        self.num_bytes = num_bytes
        room = room_on(folder.parent)
        if why_not := why_no_room(num_bytes, room, spare_bytes=SPARE_BYTES):
            what = f"no room for a bucket of {num_bytes} bytes"
            raise WeightsUnavailable(f"{what}: {why_not}; {MORE_ROOM}")
        try:
            self._mapping = self._create()
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsUnavailable(
                f"no room for a bucket of {num_bytes} bytes in {folder}: {error}; "
                f"{way_out(error, 'weights.shared_memory_path')}"
            ) from error
        self.view = self._mapping.view
        self._unpin = None if pin is None else pin(self._mapping.address, num_bytes)

    def _create(self) -> FileMapping:
        self.folder.mkdir(mode=0o700)
        descriptor = new_file(str(self.folder / FILE_NAME))
        try:
            take_space(descriptor, self.num_bytes)
            self._file = _identity(os.fstat(descriptor))
            return FileMapping(descriptor, self.num_bytes)
        finally:
            os.close(descriptor)

    def write_header(self, header: bytes) -> None:
        """Write the file's first bytes, which another process may have changed since."""
        self.view[: len(header)] = header

    def is_intact(self) -> bool:
        """Whether engines that open its path get this file; its bytes may be touched only then."""
        try:
            return _identity(os.stat(self.folder / FILE_NAME)) == self._file
        except OSError:
            return False

    def unmap(self) -> None:
        """Leave the file."""
        if self._unpin is not None:
            self._unpin()
        # A tensor over the file may not be collected yet; the mapping ends with the last one.
        self._mapping.close()

    def remove(self) -> None:
        """Remove the file. The kernel frees its memory when the last process has unmapped it."""
        self.unmap()
        shutil.rmtree(self.folder, ignore_errors=True)


class ShmBufferPool:
    """The buffers of one server's pushes. Thread-safe.

    Args:
        root: a folder in tmpfs, normally ``/dev/shm``.
        pin: called for each new buffer.

    Attributes:
        layouts: the file layouts of the buckets.
    """

    def __init__(self, root: str | Path = "/dev/shm", pin: Pin | None = None) -> None:
        root = Path(root)
        self._pin = pin
        # When files were last removed; engines may unmap them a little later.
        self._removed_at = time.monotonic() if remove_leftovers(root) else float("-inf")
        self.folder = new_folder(root)
        self._hold: Hold | None = None
        self.layouts = LayoutCache(partial(lay_out, stays=True))
        self._lock = threading.Lock()
        self._free: list[ShmBuffer] = []
        self._taken: list[ShmBuffer] = []
        self._num_made = 0

    def take(self, num_bytes: int) -> ShmBuffer:
        """A buffer of this size: a free one if there is one, else a new one.

        Raises:
            WeightsUnavailable: there is no space.
        """
        with self._lock:
            self._remove_damaged()
            buffer = next((free for free in self._free if free.num_bytes == num_bytes), None)
            if buffer is not None:
                self._free.remove(buffer)
            else:
                buffer = self._new(num_bytes)
            self._taken.append(buffer)
            return buffer

    def _remove_damaged(self) -> None:
        """Remove the free buffers whose file was removed, replaced or cut by another process."""
        for damaged in [free for free in self._free if not free.is_intact()]:
            logger.warning("%s was removed or cut by another process", damaged.folder / FILE_NAME)
            self._removed_at = time.monotonic()
            self._free.remove(damaged)
            damaged.remove()

    def made_folder(self) -> Path:
        """The folder of all buffers; it is made if there is none."""
        if self._hold is None or not self._hold.is_intact():
            self._hold = make_held(self.folder)
        return self.folder

    def _new(self, num_bytes: int) -> ShmBuffer:
        self.made_folder()
        while True:
            self._num_made += 1
            try:
                return ShmBuffer(self.folder / f"{self._num_made:06d}", num_bytes, self._pin)
            except WeightsUnavailable:
                if self._free:
                    # Buffers of other sizes use the space: the model's buckets have changed.
                    self.trim()
                elif time.monotonic() - self._removed_at > UNMAP_S:
                    raise
                else:  # engines may still map removed files
                    time.sleep(0.05)

    def give(self, buffer: ShmBuffer) -> None:
        """Return a buffer to the pool; it may be overwritten."""
        with self._lock:
            if buffer in self._taken:
                self._taken.remove(buffer)
                self._free.append(buffer)

    def join(self, folders: Sequence[Path]) -> Path:
        """A folder with links to the files in all these, for one load of an engine.

        Args:
            folders: of buffers, also of other pools on this host.
        """
        with self._lock:
            self._num_made += 1
            joined = self.made_folder() / f"{self._num_made:06d}-all"
        joined.mkdir(mode=0o700)
        for number, folder in enumerate(folders):
            link = joined / f"bucket-{number:05d}.safetensors"
            link.symlink_to(os.path.relpath(folder / FILE_NAME, joined))
        return joined

    def trim(self) -> None:
        """Remove the free buffers."""
        self._removed_at = time.monotonic()
        while self._free:
            self._free.pop().remove()

    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.num_bytes for buffer in self._free + self._taken)

    def close(self) -> None:
        """Remove all files, but those in use as long as the store reads them."""
        with self._lock:
            while self._free:
                self._free.pop().remove()
            while self._taken:
                self._taken.pop().unmap()
            hold, self._hold = self._hold, None
            if hold is not None:
                hold.release()


def _identity(file: os.stat_result) -> tuple[int, int, int]:
    """Which file it is, and its length."""
    return file.st_dev, file.st_ino, file.st_size


def new_folder(root: Path) -> Path:
    """A path for a folder of this process."""
    return root / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_leftovers(root: Path) -> int:
    """Remove the files of killed trainers; returns the number of their folders."""
    return sum(remove_unheld(folder) for folder in root.glob(f"{_PREFIX}-*"))


def is_in_pool(path: Path) -> bool:
    """Whether a bucket's folder is one of a pool, which goes with its trainer."""
    return path.parent.name.startswith(f"{_PREFIX}-")


def hold_pools(paths: Iterable[str]) -> list[Hold]:
    """Hold the folders of pools, with all in them, that buckets with these paths are in.

    What is in no pool needs no hold, and what is gone cannot be held.
    """
    pools: dict[Path, None] = {}
    for path in map(Path, paths):
        if is_in_pool(path):
            pools[path.parent] = None
            # Joined buckets are links, also into pools of other processes.
            pools |= {file.resolve().parents[1]: None for file in path.glob("*.safetensors")}
    return [hold for hold in map(held, pools) if hold is not None]


class PushBuffers:
    """Buffers taken from a pool, until all are released together."""

    def __init__(self, pool: ShmBufferPool) -> None:
        self._pool = pool
        self.layouts = pool.layouts
        self._taken: list[ShmBuffer] = []
        self._joined: list[Path] = []

    def take(self, num_bytes: int) -> ShmBuffer:
        """See ``ShmBufferPool.take``."""
        self._taken.append(self._pool.take(num_bytes))
        return self._taken[-1]

    def give(self, buffer: ShmBuffer) -> None:
        """It is held until the release of all."""

    def joined(self, folders: Sequence[Path] = ()) -> Path:
        """A folder with links to the files in these, or in all that are held, until the release."""
        own = [buffer.folder for buffer in self._taken]
        self._joined.append(self._pool.join(folders or own))
        return self._joined[-1]

    def release(self) -> None:
        """Give all to the pool."""
        while self._joined:
            shutil.rmtree(self._joined.pop(), ignore_errors=True)
        while self._taken:
            self._pool.give(self._taken.pop(0))


class StoreCopies:
    """The buffers of pushes that have ended, as long as the store may read them.

    The store holds the pools of those that it was offered, so they outlive this process.
    """

    def __init__(self) -> None:
        self._by_version: list[tuple[int, PushBuffers]] = []
        self._answer: weakref.finalize[[Pending[None]], StoreCopies] | None = None

    def add(self, version: int, buffers: PushBuffers) -> None:
        """A push of this version has ended."""
        self._by_version.append((version, buffers))

    def offered(self, answer: Pending[None] | None) -> None:
        """The copies of the last push were offered; the store holds them when it has answered."""
        if answer is not None:
            if self._answer is not None:
                self._answer.detach()
            # Also at the end of the process, before the pool of these copies goes.
            self._answer = weakref.finalize(self, _await_answer, answer)

    def close(self) -> None:
        """Wait until the store holds what it was offered."""
        if self._answer is not None:
            self._answer()

    def free(self, reads: int | None) -> None:
        """The next push begins.

        Args:
            reads: the version that the store reads now; the buffers of all others are released.
        """
        for version, buffers in self._by_version:
            if version != reads:
                buffers.release()
        self._by_version = [entry for entry in self._by_version if entry[0] == reads]


def _await_answer(answer: Pending[None]) -> None:
    try:
        answer.result(_OFFER_S)
    except Exception as error:
        logger.warning("store: the last version may not be kept: %s", describe(error))
