"""The lock under which the threads of a process make what they share."""

from __future__ import annotations

import os
import threading

_LOCKS: dict[int, threading.RLock] = {}


def making() -> threading.RLock:
    """The lock of this process.

    A fork has another one, because a thread that it does not have may have held its parent's.
    """
    return _LOCKS.setdefault(os.getpid(), threading.RLock())
