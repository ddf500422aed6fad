"""Settings for the process that Ray starts for one of our actors."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

from rollout.config.sources.environment import log_to_stderr

_RAY_WORKER = "default_worker.py"
# By default 700, 10, 10.
_COLLECTION_THRESHOLDS = 10_000, 20, 20
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _TRIM_BYTES = -1, 128 << 20
_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 << 20


def is_own_process() -> bool:
    """Whether Ray started this process for an actor or a task; actors of the stub share one."""
    return Path(sys.argv[0]).name == _RAY_WORKER


def keep_what_is_loaded() -> None:
    """``collect_rarely``, but only in our own process: another one may hold garbage now."""
    if is_own_process():
        log_to_stderr()
        collect_rarely()


def collect_rarely() -> None:
    """Exclude all current objects from garbage collections, and let those visit more new ones.

    Ray and all imports are very many objects, and a full collection visits each of them: a quarter
    of a group's CPU in a cycle, and a pause of a serving router.  A command on 512 engines makes
    thousands of objects that all live until its end, and each collection meanwhile visits them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)


def tune_worker() -> None:
    """For a worker of agents: threads read chats beside its event loop, and make many lists."""
    log_to_stderr()
    collect_rarely()
    switch_threads_often()
    keep_freed_memory()


def collect_in_sweeps() -> None:
    """Collect garbage only where a router does it in its sweeps (``rollout.router.proxy.context``).

    A collection visits every list of every reply that is read as tokens: with 200 streams of 4 096
    tokens each one took 60 to 150 ms, and all of them 60 % of the router's CPU.
    """
    log_to_stderr()
    collect_rarely()
    gc.disable()


def switch_threads_often() -> None:
    """Shorten the wait of a call for the interpreter while another thread is busy.

    A call of Ray, or of an event loop, needs the interpreter several times, and waits each time for
    the busy thread, for example the router's, or one that reads a chat.  Python switches threads
    after 5 ms by default; here after 0.5 ms.  For a process of our own.
    """
    sys.setswitchinterval(0.0005)


def keep_freed_memory() -> None:
    """Keep memory that is freed in this process, up to a bound, for its next use.

    A router takes and frees memory for each reply.  glibc gives large blocks back to the kernel at
    once, and then each page costs a fault at its next use: most of the CPU of a reply of 1 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
