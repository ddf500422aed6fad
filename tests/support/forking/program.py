"""A forked process becomes a Python program, with all that ``exec`` would have given it.

What stays of the process that it was forked from: the modules that are imported, the seed of
hashes, and torch's number of threads until the program sets it.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import mmap
import multiprocessing
import os
import runpy
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

PR_SET_NAME = 15
PR_SET_MM = 35
PR_SET_MM_MAP = 14
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Variables that the C library reads when a process starts -> the same options of ``mallopt``."""

PREPARATIONS: list[Callable[[], object]] = []
"""What a process does before it runs its module, beyond the below: modules that are imported for
others to be forked add to it."""

_libc = ctypes.CDLL(None, use_errno=True)
_shown: list[object] = []  # keeps the memory that the kernel reads


def execute(program: str, command: list[str], env: dict[str, str]) -> NoReturn:
    """In place of ``os.execvpe``, for Python with ``-m module ...`` or ``file ...``."""
    become(command, env, partial(_run_module, command))


def become(command: list[str], env: Mapping[str, str], job: Callable[[], object]) -> NoReturn:
    """This process, a fork with one thread, does the job as a program of its own, and ends."""
    _close_as_exec()
    _reset_signals()
    os.environ.clear()
    os.environ.update(env)
    for name, option in ALLOCATOR.items():
        if name in env:
            _libc.mallopt(option, int(env[name]))
    show(command, env)
    _start_again(command)
    _run_to_the_end(job)


def place_descriptors(received: Mapping[int, int]) -> None:
    """Closes all descriptors but these, and gives each its number.

    Args:
        received: by the number that each is to have.
    """
    above = 1 + max(received)
    moved = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in received.items()
    }
    _close_all_but(set(moved.values()))
    for number, fd in moved.items():
        os.dup2(fd, number)
        os.close(fd)


def show(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Has ``/proc`` show this command and environment, and the name of the program.

    Raises:
        OSError: the kernel cannot.
    """
    arguments = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = mmap.mmap(
        -1, len(arguments) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    memory[:] = arguments + variables
    held = ctypes.c_char.from_buffer(memory)
    begin = ctypes.addressof(held)
    middle, end = begin + len(arguments), begin + len(arguments) + len(variables)
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    # By their numbers in proc(5): code, data, the beginning of the heap, the stack.
    code_begin, code_end, data_begin, data_end, heap, stack = (
        int(fields[number - 3]) for number in (26, 27, 45, 46, 47, 28)
    )
    _libc.sbrk.restype = ctypes.c_void_p
    layout = struct.pack(
        "11QQIi",
        *(code_begin, code_end, data_begin, data_end, heap, _libc.sbrk(0), stack),
        *(begin, middle, middle, end),
        *(0, 0, -1),  # the auxiliary vector and the executable stay
    )
    buffer = ctypes.create_string_buffer(layout)
    numbers = PR_SET_MM_MAP, ctypes.addressof(buffer), len(layout), 0
    if _libc.prctl(PR_SET_MM, *map(ctypes.c_ulong, numbers)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _shown[:] = [memory, held]
    _libc.prctl(PR_SET_NAME, os.fsencode(Path(command[0]).name), 0, 0, 0)


def descriptors() -> set[int]:
    """Those that are open in this process."""
    listed = os.listdir("/proc/self/fd")  # among them that of the listing, which is closed by now
    return {int(name) for name in listed if os.path.lexists(f"/proc/self/fd/{name}")}


def _close_as_exec() -> None:
    _close_all_but({fd for fd in descriptors() if os.get_inheritable(fd)})


def _close_all_but(kept: set[int]) -> None:
    for fd in descriptors() - kept:
        os.close(fd)


def _reset_signals() -> None:
    """What has a handler gets the usual one, what is ignored stays so; then as Python starts."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _start_again(command: list[str]) -> None:
    """What a process draws or finds out when it starts, and libraries keep."""
    sys.orig_argv[:] = command
    sys.path[0] = os.getcwd()
    importlib.invalidate_caches()
    tempfile.tempdir = None
    multiprocessing.current_process().authkey = os.urandom(32)
    # Seeded when they are imported; ``random`` does it itself after a fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "setproctitle" in sys.modules:
        # It writes over the memory of the command that ``exec`` was given, and of the environment.
        sys.modules["setproctitle"].setproctitle = _show_title
    gc.enable()


def _show_title(title: str) -> None:
    show([title], {})


def _run_module(command: list[str]) -> None:
    for prepare in PREPARATIONS:
        prepare()
    if command[1] != "-m":
        sys.argv[:] = command[1:]
        runpy.run_path(command[1], run_name="__main__")
        return
    _, _, module, *arguments = command
    sys.argv[:] = ["-m", *arguments]  # runpy puts the file in the first place
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_to_the_end(job: Callable[[], object]) -> NoReturn:
    """Ends the process as the interpreter ends it after its main module."""
    status = 0
    try:
        job()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            atexit._run_exitfuncs()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("Py_Exit returned")
