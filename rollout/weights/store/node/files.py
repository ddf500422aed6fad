"""All file operations of the store, as small steps.

Always true: a step happens completely or not at all, except steps that write bytes: they may stop
anywhere, because a process can be killed.  Nothing is flushed: what is in tmpfs outlives every
process, and no boot.  Tests use another object that stops at a chosen step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from engines.process.own_files import open_or_new_file
from engines.tensors import bulk_copy
from engines.tensors.file_mapping import FileMapping
from engines.tensors.file_space import take_space
from engines.tensors.fingerprint import Buffer
from rollout.weights.store.node.base_folder import make_private_folder


class PendingCopy(NamedTuple):
    """Bytes in memory that are copied into a mapped file.

    Attributes:
        head: the prefix of their hash.
        source: their address.
    """

    head: bytes
    region: FileMapping
    offset: int
    source: int
    num_bytes: int


class Files:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Make a folder in one that exists, or accept the one that only this user can enter."""
        make_private_folder(path).close()

    def names(self, path: Path) -> list[str]:
        """Names in a folder, or empty if it does not exist."""
        return sorted(os.listdir(path)) if path.is_dir() else []

    def read(self, path: Path) -> bytes | None:
        """Contents of a small file, or None if it does not exist."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, path: Path, data: Buffer) -> None:
        """Replace a small file; its bytes may stop anywhere."""
        with os.fdopen(open_or_new_file(str(path), os.O_TRUNC), "wb") as file:
            file.write(data)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def size(self, path: Path) -> int | None:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def allocate(self, path: Path, num_bytes: int) -> None:
        """Create a file of this length with all its space: on a full tmpfs a write to a sparse file
        kills the process with SIGBUS.  So does reading a mapped file that was shortened: a longer
        file is replaced by a new one.

        Raises:
            OSError: there is no space; the file is removed.
        """
        if (self.size(path) or 0) > num_bytes:
            path.unlink()
        descriptor = open_or_new_file(str(path))
        try:
            take_space(descriptor, num_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def link(self, target: Path, link: Path) -> None:
        """Add a name for the same file."""
        os.link(target, link)

    def map(self, path: Path) -> FileMapping:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return FileMapping(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        """Write bytes of an existing file; they may stop anywhere."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            view = memoryview(data)
            while view:
                done = os.pwrite(descriptor, view, offset)
                view, offset = view[done:], offset + done
        finally:
            os.close(descriptor)

    def put(self, region: FileMapping, offset: int, data: memoryview) -> None:
        """Copy bytes into a mapped file; they may stop anywhere."""
        region.view[offset : offset + len(data)] = data

    def copy(self, incoming: Sequence[PendingCopy]) -> list[str]:
        """The same for many; returns their fingerprints. The bytes may stop anywhere."""
        return bulk_copy.copy_and_hash(
            [copy.head for copy in incoming],
            [copy.region.address + copy.offset for copy in incoming],
            [copy.source for copy in incoming],
            [copy.num_bytes for copy in incoming],
        )

    def replace(self, path: Path, data: Buffer) -> None:
        """Replace a small file, completely or not at all."""
        beside = path.with_name(f"{path.name}.new")
        self.write(beside, data)
        self.rename(beside, path)


class MappedSegments:
    """Cached mappings: mapping a file again costs more than copying into it."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._mapped: dict[Path, tuple[tuple[int, int], FileMapping]] = {}

    def of(self, path: Path) -> FileMapping:
        """The mapping of the file that has this name now.

        Raises:
            OSError: the file does not exist.
        """
        stat = path.stat()
        which, mapping = self._mapped.get(path, (None, None))
        if mapping is None or which != (stat.st_ino, stat.st_size):
            self.forget(path)
            mapping = self._files.map(path)
            self._mapped[path] = (stat.st_ino, stat.st_size), mapping
        return mapping

    def forget(self, path: Path) -> None:
        """Unmap this file; what still views it keeps its memory."""
        if path in self._mapped:
            self._mapped.pop(path)[1].close()

    def close(self) -> None:
        for path in list(self._mapped):
            self.forget(path)
