"""Locks that the kernel keeps: of folders, which go with their last holder, and of files.

Always true: a lock ends with its process, also after SIGKILL, and is seen from every container; no
forked child has one; a folder is removed only by a process that has its lock alone, and what a kill
leaves of a removal is removed by the next.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines.plain_json import read_json
from engines.process.own_files import OwnFolder, open_or_new_file

logger = logging.getLogger(__name__)

_NUM_BYTES = 512


class Hold:
    """One holder of a folder, until ``release``, or the end of its process.

    Args:
        stays: it is not removed if this was the last holder.

    Attributes:
        folder: its path.
    """

    def __init__(self, folder: OwnFolder, *, stays: bool = False) -> None:
        self.folder = Path(folder.path)
        self._own = folder
        _FOLDERS.add(folder)
        # Also at the end of the process, if the holder did not release it.
        let_go = _close if stays else _let_go
        self._release = weakref.finalize(self, let_go, folder, os.getpid())

    def is_intact(self) -> bool:
        """Whether the folder still is the one that is held."""
        return self._release.alive and self._own.is_locked_there()

    def release(self) -> None:
        """Let it go; it is removed if no other process holds it.  Repeated calls do nothing."""
        self._release()


def make_held(folder: Path, mode: int = 0o700) -> Hold:
    """A new folder, which is held.

    Raises:
        FileExistsError: something is there.
        OSError: it cannot be made.
    """
    return Hold(OwnFolder.make(str(folder), fcntl.LOCK_SH, mode))


def held(folder: Path) -> Hold | None:
    """One more hold of a folder that another process has made, or None if it is gone."""
    try:
        own = OwnFolder.open(str(folder))
    except OSError:
        return None
    try:
        own.lock(fcntl.LOCK_SH)
    except OSError:
        own.close()
        return None
    return Hold(own)


def own_folder(folder: Path) -> Hold:
    """A hold of a folder that stays when the last holder lets it go.

    Raises:
        OSError: it is not there, or not this user's.
    """
    own = OwnFolder.open(str(folder))
    try:
        own.lock(fcntl.LOCK_SH, os.O_CREAT)
    except BaseException:
        own.close()
        raise
    return Hold(own, stays=True)


def remove_unheld(
    folder: Path,
    rescue: Callable[[Path], object] = lambda folder: None,
    *,
    is_known: bool = False,
) -> bool:
    """Remove a folder of this user that no process holds; returns whether it was removed.

    Args:
        rescue: called before, for what is not to be lost.
        is_known: it is of this library, although it may never have been held.
    """
    try:
        own = OwnFolder.open(str(folder))
    except OSError:
        return False
    try:
        own.lock(fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_CREAT if is_known else 0)
    except FileNotFoundError:  # its maker was killed before; one that lives makes it again
        own.close()
        with suppress(OSError):
            folder.rmdir()
            return True
        return False
    except OSError:  # it is held, or the file system does not know
        own.close()
        return False
    logger.info("removing %s: its process has ended", folder)
    try:
        rescue(folder)
    except OSError as error:
        logger.warning("%s stays: %s", folder, error)
        own.close()
        return False
    _remove(own)
    return True


def _let_go(folder: OwnFolder, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has this object too
        return
    _FOLDERS.discard(folder)
    try:
        folder.try_alone()
    except BlockingIOError:  # who holds it still removes it
        folder.close()
        return
    except OSError:  # without locks it is its maker's
        pass
    _remove(folder)


def _close(folder: OwnFolder, pid: int) -> None:
    if os.getpid() == pid:
        _FOLDERS.discard(folder)
        folder.close()


def _remove(folder: OwnFolder) -> None:
    try:
        folder.remove()
    except OSError as error:
        logger.warning("%s is not removed: %s", folder.path, error)


class FileLock:
    """An open file; ``take`` locks it.

    Args:
        path: what is there is no link, and stays with its contents.

    Raises:
        OSError: it cannot be opened, or may be another user's.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_or_new_file(str(path))
        _FILES.add(self)

    def take(self) -> None:
        """Lock it.

        Raises:
            BlockingIOError: another process has locked it, or this one elsewhere.
            OSError: its file system has no locks.
        """
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, **values: str) -> None:
        """Write these values into it, with this process and its host."""
        # The lock is on this file, so it is not replaced.  One write of one length: a kill leaves
        # the old values or the new ones.
        known = {**values, "pid": os.getpid(), "host": socket.gethostname()}
        os.pwrite(self._descriptor, json.dumps(known).ljust(_NUM_BYTES).encode(), 0)

    def release(self) -> None:
        """Unlock and close it; repeated calls do nothing."""
        if self in _FILES:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child may be forked just now
            self.forget()

    def forget(self) -> None:
        """In a forked child: leave the lock to the parent alone."""
        _FILES.discard(self)
        os.close(self._descriptor)


def read_values(path: Path) -> Mapping[str, Any]:
    """What the last owner of a file has written, or empty if it cannot be read."""
    try:
        values = read_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def owner_of(path: Path) -> str:
    """Who has written a file last, in words."""
    values = read_values(path)
    known = "pid" in values and "host" in values
    return f"process {values['pid']} on {values['host']}" if known else "another process"


_FOLDERS: set[OwnFolder] = set()
_FILES: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_all() -> None:
    while _FOLDERS:
        _FOLDERS.pop().close()
    for lock in list(_FILES):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
