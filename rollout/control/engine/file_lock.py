"""A file that one process has locked, with who that is.

Always true: the lock ends with its process, also after SIGKILL, and no forked child holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_NUM_BYTES = 512


class FileLock:
    """An open file; ``take`` locks it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, mode)
        _OPEN.add(self)

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
        if self in _OPEN:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child may be forked just now
            self.forget()

    def forget(self) -> None:
        """In a forked child: leave the lock to the parent alone."""
        _OPEN.discard(self)
        os.close(self._descriptor)


def read_values(path: Path) -> Mapping[str, Any]:
    """What the last owner of a file has written; empty if it cannot be read."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def owner_of(path: Path) -> str:
    """Who has written a file last, in words."""
    values = read_values(path)
    known = "pid" in values and "host" in values
    return f"process {values['pid']} on {values['host']}" if known else "another process"


_OPEN: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_OPEN):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
