"""Up to four processes that judge, each started by the first judgement that finds none free.

Always true: a judgement ends within its time, once its process runs.  A process that needed longer,
or has ended, is replaced by the next judgement.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines.process.background import start_timer
from engines.protocol.plain_text import one_line

_CHILD = Path(__file__).with_name("child.py")
_MOST_CHILDREN = 4
_START_S = 60.0
"""Importing sympy takes one second, and longer from a network's file system."""
_GRACE_S = 1.0
"""After it a process whose parent is no more ends itself."""
_MOST_CHARACTERS = 1 << 18
_MOST_WARNINGS = 3

logger = logging.getLogger(__name__)


class MathJudges:
    """Judges of texts; their processes end when this is collected, or when its process ends.

    Args:
        timeout_s: of one judgement.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_MOST_CHILDREN, "math-judge")
        self._free: list[_Child] = []  # the last is taken first, so that few are started
        self._living: set[_Child] = set()
        self._num_warnings = 0
        weakref.finalize(self, _end_all, self._living)

    async def is_right(self, text: str, answers: Sequence[str]) -> bool:
        """Whether the text has one of the answers.

        Args:
            text: a model's; of a long one its end is read.
            answers: as LaTeX.

        Raises:
            RuntimeError: no process can be started.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._judge, text, answers)

    def _judge(self, text: str, answers: Sequence[str]) -> bool:
        child = self._free_child()
        try:
            is_right, is_last = child.call(text[-_MOST_CHARACTERS:], answers, self._timeout_s)
        except _ChildEnded as ended:
            self._end(child)
            self._warn(str(ended), text)
            return False
        if is_last:
            self._end(child)
        else:
            self._free.append(child)
        if is_right is None:
            self._warn("failed", text)
        return bool(is_right)

    def _free_child(self) -> _Child:
        with contextlib.suppress(IndexError):  # none is free, or no more
            while True:
                child = self._free.pop()
                if child.is_alive():
                    return child
                self._end(child)
        child = _Child(self._timeout_s + _GRACE_S)
        self._living.add(child)
        try:
            child.await_start()
        except BaseException:
            self._end(child)
            raise
        return child

    def _end(self, child: _Child) -> None:
        self._living.discard(child)
        child.end()

    def _warn(self, what: str, text: str) -> None:
        self._num_warnings += 1
        if self._num_warnings > _MOST_WARNINGS:
            return
        is_final = self._num_warnings == _MOST_WARNINGS
        logger.warning(
            "rewards.math: a judgement %s, so the reward is 0.0; the sample's text ends in: %s%s",
            what,
            one_line(text[-80:]),
            "; more such samples are not logged" if is_final else "",
        )


class _ChildEnded(Exception):
    """The process has ended during a call: the text of this says how."""


class _Child:
    """One process: a request is a line of JSON, as is an answer, and they alternate."""

    def __init__(self, alarm_s: float) -> None:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(alarm_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )

    def await_start(self) -> None:
        try:
            self._exchange(b"", _START_S)
        except _ChildEnded as ended:
            raise RuntimeError(
                f"rewards.math: there is no process that judges: its start {ended}; why is in this "
                "program's standard error"
            ) from None

    def call(self, text: str, answers: Sequence[str], timeout_s: float) -> tuple[bool | None, bool]:
        """Whether the text is right, if that is known, and whether the process ends now.

        Raises:
            _ChildEnded: it has ended before that.
        """
        request = json.dumps([text, list(answers)]).encode() + b"\n"
        is_right, is_last = json.loads(self._exchange(request, timeout_s))
        return is_right, is_last

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # of a request that was not read
                    pipe.close()

    def _exchange(self, request: bytes, timeout_s: float) -> bytes:
        """Write the request and return the next line.

        Raises:
            _ChildEnded: there is none in time.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            self._process.kill()

        deadline = start_timer(timeout_s, kill, "math-judge-deadline")
        answer = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(request)
                stdin.flush()
                answer = stdout.readline()
        finally:
            deadline.cancel()
        deadline.join()  # or it could kill the process during the next call
        if is_late.is_set():
            raise _ChildEnded(f"took longer than {timeout_s:g} s")
        if not answer.endswith(b"\n"):
            raise _ChildEnded(f"made its process exit with status {self._process.wait()}")
        return answer


def _end_all(living: set[_Child]) -> None:
    for child in list(living):
        child.end()
