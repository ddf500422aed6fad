"""A process that reads what is long, so that the router's event loop goes on meanwhile.

A parser holds the interpreter's lock for as long as its input is, and a thread does not help.  A
chat of many short messages takes 34 ms of CPU for 7 MiB, and 145 ms where its tokens are kept; no
client may hold up the others for more than 50 ms (``tests/rollout/router/test_waits.py``).  Always
true: one call at a time.  Clients take turns, so a client waits for
at most one call of each other one, whatever these have sent; calls of one client keep their order.
A call has a deadline, after which the process is killed and the next call starts another; one whose
client has left ends sooner.  It ends with its router.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from engines.process.background import start_timer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST_BYTES_ON_LOOP = 1 << 20
"""A longer body is read here: the router needs 2 ms and more to parse one of this length."""
_DEADLINE_S = 60.0
"""Limit of one call: for so long one client can delay another.  8 MiB take 6 s."""
_LEFT_S = 1.0
"""So long a call goes on whose client has left: to start the process again costs about as much."""
_NICENESS = 5


class ReadingFailed(Exception):
    """The process did not answer."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call that waits, or runs."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: asyncio.Future[Any]


class ReadingProcess:
    """Calls functions of modules, which are pure; started by the first call.

    Args:
        deadline_s: of one call.
    """

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(1, "reading")
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: dict[str, deque[_Call]] = {}  # by client, the next turn first
        self._running: _Call | None = None

    async def call(self, function: Callable[[*Ts], T], *arguments: *Ts, client: str = "") -> T:
        """What the function returns; it raises what the function raises.

        Args:
            client: for whom it is read.

        Raises:
            ReadingFailed: the process did not answer in time, or has crashed.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, arguments, loop.create_future())
        self._waiting.setdefault(client, deque()).append(call)
        self._next(loop)
        try:
            result: T = await call.result
        except asyncio.CancelledError:
            if call is self._running:
                loop.call_later(_LEFT_S, self._end_left, call)
            raise
        return result

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the next call, of the client whose turn it is, unless one runs."""
        while self._waiting and self._running is None:
            client, calls = next(iter(self._waiting.items()))
            call = calls.popleft()
            if not calls:
                del self._waiting[client]
            if call.result.done():  # its client has left
                continue
            self._running = call
            done = loop.run_in_executor(self._thread, self._call, call.function, call.arguments)
            done.add_done_callback(partial(self._ended, loop, client, call))

    def _ended(
        self,
        loop: asyncio.AbstractEventLoop,
        client: str,
        call: _Call,
        done: asyncio.Future[Any],
    ) -> None:
        self._running = None
        if (calls := self._waiting.pop(client, None)) is not None:
            self._waiting[client] = calls  # behind those who came meanwhile
        if done.cancelled():
            call.result.cancel()
        elif (error := done.exception()) is not None:
            if not call.result.done():
                call.result.set_exception(error)
        elif not call.result.done():
            call.result.set_result(done.result())
        if not loop.is_closed():
            self._next(loop)

    def _end_left(self, call: _Call) -> None:
        """End a call whose client has left, if it still runs."""
        if call is self._running and (process := self._process) is not None:
            process.kill()  # the thread then finds it ended

    def close(self) -> None:
        for calls in self._waiting.values():
            for call in calls:
                call.result.cancel()
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = start_timer(self._deadline_s, process.kill, "reading-deadline")
        try:
            pickle.dump((function, arguments), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            error, result = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as lost:
            self._end()
            raise ReadingFailed(
                f"a long request was not read within {self._deadline_s:.0f} s, or the process that "
                f"reads such requests ended: {type(lost).__name__}"
            ) from lost
        finally:
            deadline.cancel()
        if error is not None:
            raise error
        return result

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


def main() -> None:
    """Answer calls until the router closes the pipe, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the router
    os.nice(_NICENESS)
    calls, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while True:
        try:
            function, arguments = pickle.load(calls)
        except EOFError:
            return
        answer: tuple[Exception | None, Any]
        try:
            answer = None, function(*arguments)
        except Exception as error:
            answer = error.with_traceback(None), None
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
