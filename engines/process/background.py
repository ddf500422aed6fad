"""Every task and thread of ours, started in one place, so that none ends without a word.

Always true: what is started here has a name.  Work with a result (``start_task``,
``in_own_thread``) gives its error to the one that takes the result, and an error that is not taken
is logged.  Work without one (``keep_task``, ``keep_thread``) is logged as it fails, and says here
what follows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from enum import Enum
from typing import Any, NoReturn, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_KEPT: set[asyncio.Task[None]] = set()


class Then(Enum):
    """What follows when work has failed.  Its value is what the log says of that."""

    IS_OVER = "it is not started again"
    STARTS_AGAIN = "it starts again"
    PROCESS_ENDS = "this process ends"


def start_task(work: Awaitable[T], name: str) -> asyncio.Task[T]:
    """A task whose result the caller takes: it keeps the task, which asyncio does not."""
    return asyncio.create_task(work if asyncio.iscoroutine(work) else _awaited(work), name=name)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def keep_task(
    run: Callable[[], Coroutine[Any, Any, None]], name: str, then: Then
) -> asyncio.Task[None]:
    """A task whose result is not taken.  It ends when ``run`` returns, or when it is cancelled.

    Args:
        run: makes the coroutine; called again if it ``STARTS_AGAIN``, after a pause of 1 to 30 s.
        then: what follows when it raises, also a ``CancelledError`` of its own.
    """
    task = asyncio.create_task(_kept(run, name, then), name=name)
    _KEPT.add(task)
    task.add_done_callback(_KEPT.discard)
    return task


async def _kept(run: Callable[[], Coroutine[Any, Any, None]], name: str, then: Then) -> None:
    pauses = _Pauses(asyncio.get_running_loop().time)
    while True:
        try:
            await run()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            _log(name, error, then)
        except Exception as error:
            _log(name, error, then)
        else:
            return
        if then is not Then.STARTS_AGAIN:
            return
        await asyncio.sleep(pauses.next_s())


def in_own_thread(work: Callable[[], T], name: str) -> Future[T]:
    """The result of ``work``, which blocks.

    A new thread runs it, whatever other work waits for the threads of a pool, and Python can end
    before it has.  A ``StopIteration`` is a ``RuntimeError``, as in generators (PEP 479): a future
    of asyncio would never end by it.
    """
    future: Future[T] = _Result(name)
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except StopIteration as error:
            failure = RuntimeError(f"{name}: StopIteration")
            failure.__cause__ = error
            future.set_exception(failure)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class _Result(Future[T]):
    """A future whose error is logged if it is not taken."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._is_taken = False

    def result(self, timeout: float | None = None) -> T:
        self._is_taken = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._is_taken = True
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self._is_taken = True
        super().add_done_callback(fn)

    def __del__(self) -> None:
        if not self._is_taken and self.done() and (error := super().exception()) is not None:
            logger.error("%s failed, and its result is not taken", self._name, exc_info=error)


def keep_thread(run: Callable[[], None], name: str, then: Then) -> threading.Thread:
    """A thread that has begun; it ends when ``run`` returns, and Python can end before it has.

    Args:
        run: called again if it ``STARTS_AGAIN``, after a pause of 1 to 30 s.
        then: what follows when it raises.

    Raises:
        RuntimeError: this process can have no more threads.
    """
    thread = threading.Thread(target=_keep, args=(run, name, then), name=name, daemon=True)
    thread.start()
    return thread


def _keep(run: Callable[[], None], name: str, then: Then) -> None:
    pauses = _Pauses(time.monotonic)
    while True:
        try:
            run()
        except BaseException as error:
            _log(name, error, then)
        else:
            return
        if then is not Then.STARTS_AGAIN:
            return
        threading.Event().wait(pauses.next_s())


def start_timer(delay_s: float, act: Callable[[], None], name: str) -> threading.Timer:
    """A thread that calls ``act`` once, unless it is cancelled before."""

    def run() -> None:
        try:
            act()
        except BaseException as error:
            _log(name, error, Then.IS_OVER)

    timer = threading.Timer(delay_s, run)
    timer.name, timer.daemon = name, True
    timer.start()
    return timer


class _Pauses:
    """Twice as long each time; short again after it went well for longer than the longest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._next_s = _FIRST_PAUSE_S

    def next_s(self) -> float:
        now_s = self._clock()
        if now_s - self._began_s > 2 * _LONGEST_PAUSE_S:
            self._next_s = _FIRST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_PAUSE_S)
        self._began_s = now_s + pause_s
        return pause_s


def _log(name: str, error: BaseException, then: Then) -> None:
    is_last = then is Then.PROCESS_ENDS
    level = logging.CRITICAL if is_last else logging.ERROR
    logger.log(level, "%s failed with %r; %s", name, error, then.value, exc_info=error)
    if is_last:
        _end_process()


def _end_process() -> NoReturn:
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(1)
