"""Processes that a test starts: run, watch their output, and see what they leave behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

ROOT = Path(__file__).parents[2]
MARK = "ROLLOUT_TEST_PROGRAM"


def importing_us(**variables: str) -> dict[str, str]:
    """An environment for a process that imports this repository, and what this process can."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def kill_listener(url: str) -> int:
    """Kill the process that listens at ``url`` with SIGKILL; its id."""
    port = urlsplit(url).port
    (pid,) = {
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }
    os.kill(pid, signal.SIGKILL)
    return int(pid)


class Program:
    """A Python program in a session of its own, marked so that its descendants can be found."""

    def __init__(self, *arguments: str, cwd: Path = ROOT) -> None:
        self.mark = uuid.uuid4().hex
        env = os.environ | {MARK: self.mark, "RAY_AUTH_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Read output until a line contains ``text``; fails with all output if it never does."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {text!r} in {timeout_s} s:\n{self.output}") from None
            if line is None:
                raise AssertionError(f"ended before {text!r}:\n{self.output}")
            self.output += line
            if text in line:
                return

    def finish(self, timeout_s: float) -> int:
        """Wait for the end; all output is then in ``output``."""
        status = self.process.wait(timeout_s)
        while (line := self._lines.get(timeout=30)) is not None:
            self.output += line
        return status

    def descendants(self, of: str = "") -> dict[int, str]:
        """Living processes it started at any remove, however they were reparented.

        Args:
            of: only those whose command line contains this.
        """
        found = {}
        for process in psutil.process_iter():
            try:
                if process.pid == self.process.pid or process.environ().get(MARK) != self.mark:
                    continue
                command = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and of in command:
                    found[process.pid] = command
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        """End it and everything it started."""
        if self.process.poll() is None:
            self.process.kill()
        for pid in self.descendants():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self.process.wait(10)
        self._reader.join(10)


@contextmanager
def program(*arguments: str, cwd: Path = ROOT) -> Iterator[Program]:
    """A ``Program`` that is ended with the block."""
    running = Program(*arguments, cwd=cwd)
    try:
        yield running
    finally:
        running.close()


def shared_memory_of(pid: int) -> set[Path]:
    """Files in /dev/shm that a process and those below it have mapped."""
    main = psutil.Process(pid)
    found = set()
    for process in [main, *main.children(recursive=True)]:
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                _, slash, name = line.partition(" /dev/shm/")
                path = Path("/dev/shm") / name
                if slash and path.exists():
                    found.add(path)
    return found


def sockets_of(pid: int) -> set[Path]:
    """Files of the Unix sockets of a process and those below it."""
    main = psutil.Process(pid)
    return {
        Path(one.laddr)
        for process in [main, *main.children(recursive=True)]
        for one in process.net_connections("unix")
        if isinstance(one.laddr, str) and one.laddr.startswith("/")
    }


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Poll ``is_so``; False if it was not so within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.05)
    return is_so()
