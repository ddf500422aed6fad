"""Every touch of the file system by the store, one small step each.

Always true: a step has happened whole or not at all, except those that bring bytes, which may
stop anywhere: a process can be killed between any two steps and within those.  Tests put another
object in its place that stops at a chosen step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engines import bulk
from engines.mapping import FileMapping
from rollout.weights.fingerprint import Buffer
from rollout.weights.tmpfs import take_space


class Incoming(NamedTuple):
    """Bytes in memory on their way into a region.

    Attributes:
        head: what their fingerprint begins with.
        source: their address.
    """

    head: bytes
    region: Region
    offset: int
    source: int
    num_bytes: int


class Files:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, path: Path) -> list[str]:
        """What is in a folder; nothing if there is no such folder."""
        return sorted(os.listdir(path)) if path.is_dir() else []

    def read(self, path: Path) -> bytes | None:
        """A small file; None if there is none."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, path: Path, data: Buffer) -> None:
        """A small file, in the place of what was there; its bytes may stop anywhere."""
        path.write_bytes(data)

    def sync(self, path: Path) -> None:
        """Returns when the file, or the folder's list of names, would survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """A folder with all in it."""
        shutil.rmtree(path, ignore_errors=True)

    def size(self, path: Path) -> int | None:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def allocate(self, path: Path, num_bytes: int) -> None:
        """A file of this length whose space is taken: on a full tmpfs a write to a sparse file
        would end the process with SIGBUS.  So would reading a mapped one that became shorter: one
        that is longer gives way to a new one.

        Raises:
            OSError: there is no space; what there was of the file is gone.
        """
        if (self.size(path) or 0) > num_bytes:
            path.unlink()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            take_space(descriptor, num_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def link(self, target: Path, link: Path) -> None:
        """Another name for the same file."""
        os.link(target, link)

    def map(self, path: Path) -> Region:
        """A file's bytes in memory, to be read and written."""
        return Region(path)

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        """Some bytes of a file that exists; they may stop anywhere."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            view = memoryview(data)
            while view:
                done = os.pwrite(descriptor, view, offset)
                view, offset = view[done:], offset + done
        finally:
            os.close(descriptor)

    def put(self, region: Region, offset: int, data: memoryview) -> None:
        """Bytes into a region; they may stop anywhere."""
        region.view[offset : offset + len(data)] = data

    def copy(self, incoming: Sequence[Incoming]) -> list[str]:
        """The same for many, and the fingerprint of each; they may stop anywhere."""
        return bulk.copy_and_hash(
            [one.head for one in incoming],
            [one.region.address + one.offset for one in incoming],
            [one.source for one in incoming],
            [one.num_bytes for one in incoming],
        )

    def replace(self, path: Path, data: Buffer) -> None:
        """A small file, whole or not at all."""
        beside = path.with_name(f"{path.name}.new")
        self.write(beside, data)
        self.sync(beside)
        self.rename(beside, path)
        self.sync(path.parent)


class Region:
    """A file mapped into memory.

    Attributes:
        inode: of the file that was mapped; another one may have its name by now.
        address: of the first byte of ``view``.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            stat = os.fstat(descriptor)
            self.inode = stat.st_ino
            self.num_bytes = stat.st_size
            self._mapping = FileMapping(descriptor, stat.st_size)
        finally:
            os.close(descriptor)
        self.address = self._mapping.address
        self.view = self._mapping.view

    def close(self) -> None:
        # Somebody's traceback may still hold a piece of it: then it is unmapped when that goes.
        self._mapping.close()


class Regions:
    """Mappings that are kept: mapping a file anew costs more than copying into it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._kept: dict[Path, Region] = {}

    def of(self, path: Path) -> Region:
        """The mapping of the file that has this name now.

        Raises:
            OSError: there is no such file.
        """
        stat = path.stat()
        region = self._kept.get(path)
        if region is not None and (region.inode, region.num_bytes) == (stat.st_ino, stat.st_size):
            return region
        if region is not None:
            self._kept.pop(path).close()
        region = self._files.map(path)
        self._kept[path] = region
        return region

    def forget(self, folder: Path) -> None:
        """Unmap what is below ``folder``."""
        for path in [one for one in self._kept if one.is_relative_to(folder)]:
            self._kept.pop(path).close()

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()
