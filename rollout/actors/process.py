"""What is done once in the process that Ray starts for an actor of ours."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

_RAY_WORKER = "default_worker.py"


def is_own_process() -> bool:
    """Ray started this process for an actor or a task; a stub's actors live in their driver's."""
    return Path(sys.argv[0]).name == _RAY_WORKER


def keep_what_is_loaded() -> None:
    """Spare what is there by now from every later collection of garbage.

    Ray, its imports and ours are very many objects, and a full collection looks at each of them: a
    quarter of a group's CPU in a cycle, and a pause of a router that serves.  Not in a process
    that is not ours, whose garbage may be among them.
    """
    if is_own_process():
        gc.collect()
        gc.freeze()


def take_short_turns() -> None:
    """Let a Ray call in soon where another thread is busy all the time, as a router's can be.

    A call needs the interpreter several times, and each time waits until that thread is asked to
    let go of it: Python does so after 5 ms, here it is half of one.
    """
    if is_own_process():
        sys.setswitchinterval(0.0005)
