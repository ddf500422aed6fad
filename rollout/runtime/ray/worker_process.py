"""Settings for the process that Ray starts for one of our actors."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

_RAY_WORKER = "default_worker.py"


def is_own_process() -> bool:
    """Whether Ray started this process for an actor or a task; actors of the stub share one."""
    return Path(sys.argv[0]).name == _RAY_WORKER


def keep_what_is_loaded() -> None:
    """Exclude all current objects from later garbage collections.

    Ray and all imports are very many objects, and a full collection visits each of them: a quarter
    of a group's CPU in a cycle, and a pause of a serving router.  Only in our own process, because
    another one may hold garbage now.
    """
    if is_own_process():
        gc.collect()
        gc.freeze()


def take_short_turns() -> None:
    """Shorten the wait of a Ray call for the interpreter while another thread is busy.

    A call needs the interpreter several times, and waits each time for the busy thread, for
    example the router's.  Python switches threads after 5 ms by default; here after 0.5 ms.
    """
    if is_own_process():
        sys.setswitchinterval(0.0005)
