"""A program that says what it finds when it starts, as JSON on its standard output.

    python -m tests.support.forking.witness_worker WORD...

Each word names a function below; ``says`` is the report.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Any

PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_GET_CHILD_SUBREAPER = 2, 3, 37


def says() -> None:
    print(json.dumps({"seen": seen(), "drawn": drawn()}), flush=True)


def torch() -> None:
    """What a process that has imported torch draws, and an operation in several threads."""
    library: Any = importlib.import_module("torch")
    numpy: Any = importlib.import_module("numpy")
    first = library.rand(4).tolist()
    library.set_num_threads(2)
    product = library.ones(600, 600) @ library.ones(600, 600)
    library.manual_seed(1)
    report = {
        "seen": {
            "product": product.sum().item(),
            "has_cuda": library.cuda.is_initialized(),
            "seeded": library.rand(2).tolist(),
        },
        "drawn": {"numpy": numpy.random.random(), "torch": first},
    }
    print(json.dumps(report), flush=True)


def seen() -> dict[str, Any]:
    """What two processes that are started alike both find."""
    status = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("Sig", "Umask", "Cap", "NoNewPrivs", "Threads", "Cpus_allowed:"))
    )
    del status["SigQ"]
    is_leader = os.getsid(0) == os.getpid()
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "descriptors": {
            fd: os.readlink(f"/proc/self/fd/{fd}").partition("[")[0]
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        },
        "environment": dict(os.environ),
        "environment_in_proc": _words("environ"),
        "command_in_proc": _words("cmdline"),
        "name": Path("/proc/self/comm").read_text(),
        "program": os.readlink("/proc/self/exe"),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": [sys.modules["__main__"].__file__, __name__, bool(__spec__)],
        "flags": str(sys.flags),
        "folder": os.getcwd(),
        "root": os.readlink("/proc/self/root"),
        "session": "its own" if is_leader else os.getsid(0),
        "group": "its own" if os.getpgid(0) == os.getpid() else os.getpgid(0),
        "status": status,
        "handlers": {
            str(number): str(signal.getsignal(number)).partition(" at ")[0]
            for number in signal.valid_signals()
        },
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "nice": os.nice(0),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "processor_ids": sorted(os.sched_getaffinity(0)),
        "ends_with_parent": _option(PR_GET_PDEATHSIG),
        "is_dumpable": ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0),
        "is_reaper": _option(PR_GET_CHILD_SUBREAPER),
        "streams": [
            [one.fileno(), one.encoding, one.errors, one.line_buffering, one.closed]
            for one in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "temporary": tempfile.gettempdir(),
        "collects": gc.isenabled(),
        "threads": [one.name for one in threading.enumerate()],
        "is_main_thread": threading.current_thread() is threading.main_thread(),
        "children": multiprocessing.active_children(),
        "parent": str(multiprocessing.parent_process()),
        "process_name": multiprocessing.current_process().name,
    }


def drawn() -> dict[str, Any]:
    """What no other process draws."""
    with tempfile.NamedTemporaryFile() as file:
        name = file.name
    return {
        "random": random.random(),
        "uuid": str(uuid.uuid4()),
        "uuid1": str(uuid.uuid1()),
        "temporary": name,
        "authkey": bytes(multiprocessing.current_process().authkey).hex(),
    }


def lines() -> None:
    """Repeats its standard input."""
    for line in sys.stdin:
        print(line.upper(), end="", flush=True)


def exits() -> None:
    sys.exit(7)


def gives_a_reason() -> None:
    sys.exit("for a reason")


def raises() -> None:
    raise ValueError("a bad value")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


def leaves_at_once() -> None:
    print("lost, because it is in a buffer")
    os._exit(5)


def ends_late() -> None:
    """A thread and a function at the end, and output that only the end writes."""
    atexit.register(print, "at the end")
    main = threading.main_thread()
    threading.Thread(target=lambda: (main.join(), print("from a thread"))).start()
    print("from the program")


def waits() -> None:
    print("waits", flush=True)
    threading.Event().wait()


def _words(name: str) -> list[str]:
    return Path(f"/proc/self/{name}").read_text().split("\0")


def _option(number: int) -> int:
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(number, ctypes.byref(value), 0, 0, 0)
    return value.value


if __name__ == "__main__":
    for word in sys.argv[1:]:
        globals()[word]()
