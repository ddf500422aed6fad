"""Files that stay mapped from one push to the next: a trainer's slots in tmpfs.

Always true: only a file whose writer promises that it will never be another length is kept (one
that is cut under a mapping ends the process), and only as long as it has its name: a few seconds
after a trainer's slots were removed, their memory is free.

Reading such a file costs three times the copy, and so does mapping it again: tmpfs has pages of
4 KiB, and each has to be looked up.  A file that stays mapped is copied at memory speed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from engines.embedded.memory.batched_copy import Copy, copy_all
from engines.process.background import Then, keep_thread
from engines.tensors.file_mapping import FileMapping

_LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class MappedFile:
    """One file.

    Attributes:
        contents: its bytes; the mapping ends with this object, when no copy uses it any more.
        header: the one that ``copies`` were made from.
        copies: where its tensors belong, in batches.
    """

    contents: FileMapping
    header: bytes = b""
    copies: list[list[Copy]] = field(default_factory=list, repr=False)

    def copy(self, batch: list[Copy]) -> None:
        copy_all(self.contents.address, batch)


_Identity = tuple[int, int, int]
"""Device, inode, number of bytes."""


class MappedFiles:
    """The files that are kept mapped.  Thread-safe."""

    def __init__(self, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._kept: dict[Path, tuple[_Identity, MappedFile]] = {}
        self._is_watched = False

    def find(self, path: Path, descriptor: int) -> MappedFile | None:
        """The open file that has this name, if it is kept."""
        with self._lock:
            kept = self._kept.get(path)
        return kept[1] if kept and kept[0] == _identity(os.fstat(descriptor)) else None

    def keep(self, path: Path, descriptor: int) -> MappedFile:
        """Map a file and keep the mapping.

        Raises:
            OSError: it cannot be mapped.
        """
        stat = os.fstat(descriptor)
        mapped = MappedFile(FileMapping(descriptor, stat.st_size, is_writable=False))
        with self._lock:
            self._kept[path] = _identity(stat), mapped
            if not self._is_watched:
                self._is_watched = True
                keep_thread(self._watch, "mapped-files", Then.STARTS_AGAIN)
        return mapped

    def num_kept(self) -> int:
        return len(self._kept)

    def _watch(self) -> None:
        """Ends when nothing is kept."""
        pause = threading.Event()
        while True:
            pause.wait(self._look_every_s)
            with self._lock:
                for path, (identity, _) in list(self._kept.items()):
                    if not _is_there(path, identity):
                        del self._kept[path]
                if not self._kept:
                    self._is_watched = False
                    return


def _identity(stat: os.stat_result) -> _Identity:
    return stat.st_dev, stat.st_ino, stat.st_size


def _is_there(path: Path, identity: _Identity) -> bool:
    try:
        return _identity(path.stat()) == identity
    except OSError:
        return False
