"""Owner side of the guard process: start it, send commands, read reports.

Nothing here blocks or awaits; ``EngineProcess`` does the waiting.  The pipe ends are closed on
exec and the guard also watches the owner's process, so neither another engine of this owner nor a
forked helper can keep this engine alive.  Dropping the last reference kills the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from engines.process import engine_records
from engines.process.guard import TOKEN_VARIABLE
from engines.process.own_files import make_folders, open_or_new_file
from engines.process.process_identity import find_processes, identify, kill_all
from engines.protocol import ProcessIdentity

NOTE, TERMINATE, KILL = b"n", b"t", b"k"
_SCRIPT = Path(__file__).with_name("guard.py")


@dataclass(slots=True)
class GuardReport:
    """What a guard has reported so far.

    Attributes:
        guard_pid: None until the guard has reported.
        guard: its start time by its pid.
        pid: the command's own process, leader of its session, or None until it is started.
        identity: by which the command is found again, also after this process has ended.
        exit_status: as ``Popen.returncode``, or None while it runs.  -9 also where the guard was
            killed, since the kernel then kills the command.
        is_noted: the guard has carried out ``note``.
        num_killed: processes that had to be killed, known once it is gone.
        is_end: every process of the command is reaped.
    """

    guard_pid: int | None = None
    guard: dict[int, int] = field(default_factory=dict)
    pid: int | None = None
    identity: ProcessIdentity | None = None
    exit_status: int | None = None
    is_noted: bool = False
    num_killed: int = 0
    is_end: bool = False

    def take(self, line: bytes, token: str) -> None:
        """Add a line of the guard, whose command has this token."""
        word, *texts = line.decode().split()
        numbers = [int(text) for text in texts]
        match word:
            case "started":
                self.guard_pid, self.pid = numbers
                self.identity = identify(self.pid, token)
                guard = identify(self.guard_pid)
                self.guard = {} if guard is None else {guard.pid: guard.started}
            case "noted":
                self.is_noted = True
            case "exited":
                (self.exit_status,) = numbers
            case "gone":
                (self.num_killed,) = numbers
                self.is_end = True


class GuardStart(Protocol):
    """The process that starts a guard and ends."""

    def poll(self) -> int | None: ...


class GuardedProcess:
    """One command under one guard.

    Attributes:
        report: of the guard, up to the last ``hear``.
        is_gone: every process of the command is reaped.
        is_lost: the guard died before it could report.
        log_start: length of the log before this command wrote to it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: Path,
        cwd: Path | None = None,
        cleanup: Sequence[str] = (),
        folder_variable: str = "",
        name: str = "",
    ) -> None:
        self.report = GuardReport()
        self.is_gone = False
        self.is_lost = False
        self.log_start = 0
        self._token = secrets.token_hex(16)
        self._known: dict[int, int] = {}  # pid -> start time
        self._unread = b""
        self._lock = threading.Lock()  # health and control may run in threads of their own
        order = {
            "command": list(command),
            "env": {**env, TOKEN_VARIABLE: self._token},
            "cwd": None if cwd is None else str(cwd),
            "cleanup": list(cleanup),
            "folder_variable": folder_variable,
            "name": name,
        }
        line = json.dumps(order).encode() + b"\n"  # before anything is open that could leak
        command_read, command_write = os.pipe()
        report_read, report_write = os.pipe()
        self._commands = os.fdopen(command_write, "wb", buffering=0)
        self._reports = os.fdopen(report_read, "rb", buffering=0)
        os.set_blocking(report_read, False)
        try:
            make_folders(str(log_path.parent))
            with os.fdopen(open_or_new_file(str(log_path), os.O_APPEND), "ab") as log:
                self.log_start = log.seek(0, os.SEEK_END)
                pipes = command_read, report_write
                guard = [sys.executable, "-I", "-S", str(_SCRIPT), *map(str, pipes)]
                env = _guard_environment(self._token)
                self._launcher = start_guard(
                    GuardLaunch([*guard, str(os.getpid())], env, pipes, log, order)
                )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(command_read)
            os.close(report_write)
        self.send(line)

    def send(self, command: bytes) -> None:
        """Sends a command; does nothing if the guard has ended."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            while command and not self._commands.closed:
                command = command[self._commands.write(command) :]

    def hear(self) -> None:
        """Reads the reports of the guard since the last call."""
        with self._lock:
            self._launcher.poll()
            if self._reports.closed:
                return
            while part := self._reports.read(4096):
                self._unread += part
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                self.report.take(line, self._token)
            if part is not None and self._is_guard_reaped():  # end of file: the guard has exited
                self.is_gone = self.report.is_end
                self.is_lost = not self.is_gone
                if self.is_lost and self.report.exit_status is None:
                    self.report.exit_status = -signal.SIGKILL
                self._close()

    def _is_guard_reaped(self) -> bool:
        """True once no zombie of ours is left; the guard is our child only if we adopt orphans."""
        if self._launcher.poll() is None:
            return False
        if self.report.guard_pid is None:
            return True
        try:
            return os.waitpid(self.report.guard_pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    def processes(self) -> dict[int, int]:
        """The engine's processes below the guard at this moment: pid -> start time."""
        return find_processes("", self.report.guard).engine

    def note(self) -> None:
        """Remembers the engine's processes, here and in the guard, for a clean-up after it."""
        self.send(NOTE)
        self._known |= self.processes()

    def sweep(self) -> bool:
        """After the guard was lost: kills the remaining processes; True while anything is left.

        With the last of them the files go that the guard would have removed.

        Finds the processes noted earlier (by start time too, so a reused pid is safe), those that
        still carry the token in their environment, and the descendants of both.  What escapes: a
        process born after the last note that left its parent *and* overwrote its environment,
        under a guard that was killed.
        """
        living = find_processes(self._token, self._known).engine
        self._known |= living
        kill_all(living)
        # The kernel may free the lock of the guard's folder a moment after its pipes.
        return bool(living) or not engine_records.clear_files(self._token)

    def _close(self) -> None:
        self._commands.close()
        self._reports.close()


@dataclass(frozen=True, slots=True)
class GuardLaunch:
    """What a guard is started with.

    Attributes:
        command: its own.
        env: its environment.  Not the engine's: an LD_PRELOAD meant for it must not affect the
            guard.
        pipes: which the guard inherits.
        log: of its output and the engine's.
        order: what the guard will read from the first pipe; the tests, which start guards in
            another way, see here of what.
    """

    command: list[str]
    env: dict[str, str]
    pipes: tuple[int, int]
    log: BinaryIO
    order: Mapping[str, Any]


def start_guard(launch: GuardLaunch) -> GuardStart:
    """Starts a guard."""
    return subprocess.Popen(
        launch.command,
        stdin=subprocess.DEVNULL,
        stdout=launch.log,
        stderr=launch.log,
        env=launch.env,
        pass_fds=launch.pipes,
        start_new_session=True,
    )


def _guard_environment(token: str) -> dict[str, str]:
    names = ("PATH", "LD_LIBRARY_PATH")  # the latter may hold libpython
    return {TOKEN_VARIABLE: token} | {n: os.environ[n] for n in names if n in os.environ}
