"""Folders that go when the last process that holds them lets them go, or has ended.

Always true: the kernel says who holds a folder, by locks of a file in it, so a pid that means
another process elsewhere is no matter; a hold ends with its process, however that ends, and a
forked child has none; a folder is removed only by a process that has its lock alone, and what a
kill leaves of a removal is removed by the next.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_LOCK = ".held"
_OPEN: set[int] = set()


class Hold:
    """One holder of a folder, until ``release``, or the end of its process.

    Attributes:
        folder: its path.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor = descriptor
        _OPEN.add(descriptor)
        # Also at the end of the process, if the holder did not release it.
        self._release = weakref.finalize(self, _let_go, folder, descriptor, os.getpid())

    def is_intact(self) -> bool:
        """Whether the folder still is the one that is held."""
        return self._release.alive and _is_lock_of(self.folder, self._descriptor)

    def release(self) -> None:
        """Let it go; it is removed if no other process holds it.  Repeated calls do nothing."""
        self._release()


def make_held(folder: Path, mode: int = 0o700) -> Hold:
    """A new folder, which is held.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        folder.mkdir(mode=mode, exist_ok=True)
        try:
            descriptor = _opened(folder, os.O_CREAT)
        except FileNotFoundError:  # without a lock yet, it was taken for a leftover
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s has no lock (%s): what a kill leaves of it stays", folder, error)
        if _is_lock_of(folder, descriptor):
            return Hold(folder, descriptor)
        os.close(descriptor)


def held(folder: Path) -> Hold | None:
    """One more hold of a folder that another process has made; None if it is gone."""
    try:
        descriptor = _opened(folder)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_lock_of(folder, descriptor):
            return Hold(folder, descriptor)
    except OSError:
        pass
    os.close(descriptor)
    return None


def remove_unheld(folder: Path, rescue: Callable[[Path], None] = lambda folder: None) -> bool:
    """Remove a folder of this user that no process holds; returns whether it was removed.

    Args:
        rescue: called before, for what is not to be lost.
    """
    try:
        if not _is_own_folder(folder):
            return False
        descriptor = _opened(folder)
    except FileNotFoundError:  # its maker was killed before; one that lives makes it again
        with suppress(OSError):
            folder.rmdir()
            return True
        return False
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is held, or the file system does not know
        os.close(descriptor)
        return False
    logger.info("removing %s: its process has ended", folder)
    try:
        rescue(folder)
    except OSError as error:
        logger.warning("%s stays: %s", folder, error)
        os.close(descriptor)
        return False
    _remove(folder, descriptor)
    return True


def _opened(folder: Path, flags: int = 0) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _is_own_folder(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _is_lock_of(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder / _LOCK), os.fstat(descriptor))
    except OSError:
        return False


def _let_go(folder: Path, descriptor: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has this object too
        return
    _OPEN.discard(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # who holds it still removes it
        os.close(descriptor)
        return
    except OSError:  # without locks it is its maker's
        pass
    _remove(folder, descriptor)


def _remove(folder: Path, descriptor: int) -> None:
    """Remove a folder, whose lock goes last: then a removal that was killed is done again."""
    try:
        if not _is_lock_of(folder, descriptor):
            return
        for name in set(os.listdir(folder)) - {_LOCK}:
            _remove_entry(folder / name)
        if left := set(os.listdir(folder)) - {_LOCK}:
            logger.warning("%s is not removed: %s cannot be", folder, ", ".join(sorted(left)))
            return
        (folder / _LOCK).unlink()
    except OSError as error:
        logger.warning("%s is not removed: %s", folder, error)
        return
    finally:
        os.close(descriptor)
    with suppress(OSError):  # another process removes it, too
        folder.rmdir()


def _remove_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _forget_all() -> None:
    while _OPEN:
        os.close(_OPEN.pop())


os.register_at_fork(after_in_child=_forget_all)
