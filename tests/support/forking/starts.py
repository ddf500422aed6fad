"""Starts engines and ranks by the fork server of this process, or by ``exec``.

Forked is a module of an ``Origin`` whose start depends on nothing that a fork cannot change:
``why_exec`` has the rule.  All else, and every process of a test that is marked ``exec``, is
started as in production.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from engines.http.key_check import CONTROL_KEY, SAMPLING_KEY
from engines.process import guarded_process
from engines.process.guarded_process import GuardLaunch, GuardStart
from tests.support.forking import server
from tests.support.forking.origins import Origin, own_origin, real_origins
from tests.support.forking.program import ALLOCATOR

ROOT = Path(__file__).parents[3]
# Read when they are used, or set again in a forked process.  No fork server imports Ray, which sets
# many in this process when a test starts it, as torch does when a test imports its compiler.
_CAN_DIFFER = re.compile(
    "|".join(
        (
            "PYTEST_CURRENT_TEST|PYTHONBREAKPOINT",
            guarded_process.TOKEN_VARIABLE,
            SAMPLING_KEY,
            CONTROL_KEY,
            "CUDA_DEVICE_ORDER|CUDA_VISIBLE_DEVICES",
            r"RAY_\w+|TORCHINDUCTOR_CACHE_DIR",
            *ALLOCATOR,
        )
    )
)
_INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cap", "NoNew", "Cpus_allowed:")
_LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
_STATUS_UNKNOWN = 255


class ForkServerDied(AssertionError):
    """With the last lines that it wrote."""


class ForkedProcess:
    """A child of the fork server, used as a ``subprocess.Popen`` with text.

    Attributes:
        returncode: None until ``poll``, ``wait`` or ``communicate`` has seen its end.
    """

    def __init__(
        self, args: Sequence[str], pid: int, handle: int, status: socket.socket, **pipes: int
    ) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._handle = handle
        self._status = status
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(pipes[name], mode) if name in pipes else None
            for name, mode in (("stdin", "w"), ("stdout", "r"), ("stderr", "r"))
        )
        self._read: dict[IO[str], list[str]] = {}
        self._readers: dict[IO[str], threading.Thread] = {}

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def _look(self, timeout_s: float | None) -> int | None:
        """Its status; None if it has not ended after this time."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if poll.poll(None if timeout_s is None else 1000 * max(0.0, timeout_s)):
                text = self._status.recv(64)
                # Unknown where the server is dead.
                self.returncode = int(text) if text else _STATUS_UNKNOWN
                self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended; the handle is of no other process
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(
        self, input: str | None = None, timeout: float | None = None
    ) -> tuple[str | None, str | None]:
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.stdin is not None and not self.stdin.closed:
            with suppress(BrokenPipeError):  # it has closed its end
                self.stdin.write(input or "")
                self.stdin.close()
        for pipe in (self.stdout, self.stderr):
            if pipe is not None and pipe not in self._readers:
                self._read[pipe] = texts = []
                reader = threading.Thread(target=partial(_read_all, pipe, texts), daemon=True)
                reader.start()
                self._readers[pipe] = reader
        for reader in self._readers.values():
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        stdout, stderr = (
            "".join(self._read[pipe]) if pipe is not None else None
            for pipe in (self.stdout, self.stderr)
        )
        return stdout, stderr

    def __del__(self) -> None:
        self._status.close()
        os.close(self._handle)


def _read_all(pipe: IO[str], texts: list[str]) -> None:
    with pipe:
        texts.append(pipe.read())


class ForkServer:
    """A fork server and what it inherited from this process.

    Raises:
        ForkServerDied: it cannot start.
    """

    def __init__(self, origin: Origin) -> None:
        self.env = origin.environment()
        self.inherited = inherited()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(origin.python, "-m", server.__name__),
                    *(str(theirs.fileno()), str(os.getpid()), *origin.modules),
                ],
                cwd=ROOT,
                env={**self.env, **server.ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
            )
        hello = self.requests.recv(server.MOST_BYTES)
        if not hello:
            raise self._died()
        self.why_not = str(json.loads(hello)["why_not"])

    def fork(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        descriptors: Mapping[int, int],
        *,
        is_guard: bool = False,
        is_session: bool = False,
    ) -> tuple[int, int, socket.socket]:
        """A child: its pid, a handle of it, and where its exit status comes.

        Args:
            descriptors: by the number that each has in the child.

        Raises:
            ForkServerDied: it has ended.
        """
        request = {
            "command": list(command),
            "env": dict(env),
            "cwd": cwd,
            "numbers": list(descriptors),
            "is_guard": is_guard,
            "is_session": is_session,
        }
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                fds = [theirs.fileno(), *descriptors.values()]
                socket.send_fds(self.requests, [json.dumps(request).encode()], fds)
            text, handles, _, _ = socket.recv_fds(status, 64, 1)
        except (BrokenPipeError, ConnectionResetError):
            text, handles = b"", []
        if not text:
            status.close()
            raise self._died()
        (handle,) = handles
        os.set_inheritable(handle, False)
        return int(text), handle, status

    def _died(self) -> ForkServerDied:
        status = self.process.wait()
        text = os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace")
        self.close()
        last = "\n".join(text.splitlines()[-20:])
        return ForkServerDied(f"the fork server ended with status {status}:\n{last}")

    def close(self) -> None:
        """Ends it; its children go on."""
        self.requests.close()
        self.process.wait()
        self.log.close()


class Starts:
    """How this process starts engines and ranks.

    Args:
        origins: of the fork servers that it may have.

    Attributes:
        is_forking: whether what can be forked is.
        servers: of this process by interpreter, each started by the first that needs it.
        reasons: why a program was not forked, of each in order.
    """

    def __init__(self, origins: Sequence[Origin]) -> None:
        self._origins = origins
        self.is_forking = False
        self.servers: dict[str, ForkServer] = {}
        self.reasons: list[str] = []
        self._lock = threading.Lock()

    def start_guard(self, launch: GuardLaunch) -> GuardStart:
        """In place of ``guarded_process.start_guard``."""
        with self._lock:
            if self._is_forked(launch.order["command"], launch.order["env"]):
                with open(os.devnull, "rb") as null:
                    std = {0: null.fileno(), 1: launch.log.fileno(), 2: launch.log.fileno()}
                    return ForkedProcess(
                        launch.command,
                        *self._fork(
                            launch.order["command"][0],
                            launch.command,
                            launch.env,
                            os.getcwd(),
                            std | {fd: fd for fd in launch.pipes},
                            is_guard=True,
                            is_session=True,
                        ),
                    )
        return _start_guard(launch)

    def start_module(
        self, module: str, *arguments: object, **streams: bool
    ) -> subprocess.Popen[str] | ForkedProcess:
        """A module of ours as a program, in the root of the repository.

        Args:
            streams: ``stdin``, ``stdout`` and ``stderr`` that are pipes; else they are ours.
        """
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with self._lock:
            if self._is_forked(command, os.environ):
                return self._start_forked(command, streams)
        piped = {name: subprocess.PIPE for name, is_pipe in streams.items() if is_pipe}
        # Not what the C library has besides: readline sets variables there.
        return subprocess.Popen(command, cwd=ROOT, env=os.environ, text=True, **piped)  # type: ignore[call-overload]

    def _start_forked(self, command: list[str], streams: Mapping[str, bool]) -> ForkedProcess:
        ours: dict[str, int] = {}
        descriptors = {0: 0, 1: 1, 2: 2}
        theirs: list[int] = []
        try:
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                if streams.get(name):
                    read_fd, write_fd = os.pipe()
                    is_in = name == "stdin"
                    ours[name] = write_fd if is_in else read_fd
                    descriptors[number] = read_fd if is_in else write_fd
                    theirs.append(descriptors[number])
            forked = self._fork(sys.executable, command, os.environ, str(ROOT), descriptors)
        except BaseException:
            for fd in ours.values():
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return ForkedProcess(command, *forked, **ours)

    def _fork(self, python: str, *args: Any, **kwargs: Any) -> tuple[int, int, socket.socket]:
        try:
            return self.servers[python].fork(*args, **kwargs)
        except ForkServerDied:
            del self.servers[python]  # the next test has a new one
            raise

    def _is_forked(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        why = self._why_exec(command, env)
        if why:
            self.reasons.append(why)
        return not why

    def _why_exec(self, command: Sequence[str], env: Mapping[str, str]) -> str:
        if not self.is_forking:
            return "this test starts all by exec"
        origin = next((one for one in self._origins if one.is_of(command)), None)
        if origin is None:
            return f"{' '.join(command[:3])} is no module that is forked"
        if why := origin.why_not():
            return why
        if origin.python not in self.servers:
            self.servers[origin.python] = ForkServer(origin)
        forking = self.servers[origin.python]
        given, usual = (
            {name: value for name, value in found.items() if name not in origin.read_late}
            for found in (env, forking.env)
        )
        return forking.why_not or why_exec(given, usual, forking.inherited)

    def close(self) -> None:
        """Ends the fork servers that there are."""
        with self._lock:
            while self.servers:
                self.servers.popitem()[1].close()


def why_exec(env: Mapping[str, str], base: Mapping[str, str], inherited_before: object) -> str:
    """Why a process with this environment must be started by ``exec``; empty if it need not.

    A library may have read any variable when the server imported it; what else a process inherits,
    a fork inherits from the server.

    Args:
        base: the environment of this process when it started the server.
        inherited_before: by the server.
    """
    names = sorted(
        name
        for name in env.keys() | base.keys()
        if env.get(name) != base.get(name) and not _CAN_DIFFER.fullmatch(name)
    )
    if names:
        return f"{', '.join(names)} may have been read at an import"
    if env.get("CUDA_VISIBLE_DEVICES"):
        return "it has GPUs"
    if inherited() != inherited_before:
        return "this process has other limits or signals than when it started the fork server"
    return ""


def inherited() -> object:
    """What a process inherits, besides descriptors, environment and folder."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    return (
        [line for line in status if line.startswith(_INHERITED)],
        os.getpriority(os.PRIO_PROCESS, 0),
        [resource.getrlimit(getattr(resource, name)) for name in _LIMITS],
    )


_start_guard = guarded_process.start_guard
STARTS = Starts([own_origin(), *real_origins()])
