"""The result of a call under way, for threads and for tasks; and an event loop in a thread.

Always true: only a ``PendingWithCallback`` runs code of its caller, and it does so in the thread
that waits for it.  An error that no caller has read is logged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterable
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar

from pydantic import Field

from engines.process.background import Then, keep_thread
from engines.protocol.plain_text import describe
from rollout.core.arguments import checked, wrong_type
from rollout.core.errors import RolloutError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Timeout = Annotated[float, Field(ge=0)] | None
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)


def _unchanged(error: BaseException) -> BaseException:
    return error


class Pending(Generic[T]):
    """A call under way.  Use ``result()`` in a thread and ``await`` in a coroutine.

    Args:
        loop: the event loop that runs the call, or None if it runs elsewhere.
        why_late: called when a caller waited too long: what the call waits for; may be empty.
    """

    def __init__(
        self,
        future: Future[T],
        *,
        object_ref: Any = None,
        translate: Callable[[BaseException], BaseException] = _unchanged,
        loop: asyncio.AbstractEventLoop | None = None,
        why_late: Callable[[], str] = str,
    ) -> None:
        self._future = future
        self._why_late = why_late
        self._translate = translate
        self._object_ref = object_ref
        self._loop = loop
        self._is_read = False

    def __repr__(self) -> str:
        state = "running"
        if self._future.cancelled():
            state = "cancelled"
        elif self._future.done():
            error = self._future.exception()
            state = "done" if error is None else f"failed: {describe(error, with_type=True)}"
        return f"<{type(self).__name__}: {state}>"

    @property
    def object_ref(self) -> Any:
        """The Ray ObjectRef of the call.

        Raises:
            RolloutError: it has none, because it is no single call of an actor.
        """
        if self._object_ref is None:
            raise RolloutError(
                "this call has no object_ref: it is no single call of a Ray actor; use result() or "
                "await"
            )
        self._is_read = True
        return self._object_ref

    @checked
    def result(self, timeout_s: Timeout = None) -> T:
        """The result of the call, or its error.

        Args:
            timeout_s: seconds to wait, or None for no limit.

        Raises:
            TypeError, ValueError: ``timeout_s`` is no such number.
            TimeoutError: the call did not end within ``timeout_s``; it continues.
            RolloutError: this is the event loop that runs the call, which would wait for itself.
        """
        self._check_thread()
        self._is_read = True
        with suppress(FutureTimeout, FutureCancelled):
            self._future.exception(timeout_s)
        if not self._future.done():
            parts = [f"no answer within {timeout_s:g} s", self._why_late(), "the call goes on"]
            raise TimeoutError("; ".join(filter(None, parts)))
        try:
            return self._future.result()
        except Exception as error:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        """Raise what the caller understands; an error that is passed on keeps its cause."""
        translated = self._translate(error)
        if translated is error:
            raise error
        raise translated from None

    def __iter__(self) -> NoReturn:
        raise TypeError("this call is under way: its result is that of result(), or of await")

    def then(self, act: Callable[[], None], change: Callable[[T], T] | None = None) -> Pending[T]:
        """The same call, followed by ``act``, which runs however the call ended.

        Args:
            act: without arguments; its own error is logged.
            change: turns the result into another one, after ``act``; ``object_ref`` keeps the
                first.

        Raises:
            TypeError: it is no function.
        """
        if not callable(act):
            raise wrong_type("act", act, f"a function, not a {type(act).__name__}")
        after: Future[T] = Future()

        def pass_on(before: Future[T]) -> None:
            try:
                act()
            except Exception:
                logger.exception("the action after a call failed")
            if before.cancelled():
                after.cancel()
                after.set_running_or_notify_cancel()
            elif error := before.exception():
                after.set_exception(error)
            else:
                result = before.result()
                after.set_result(result if change is None else change(result))

        self._is_read = True
        self._future.add_done_callback(pass_on)
        return Pending(
            after, object_ref=self._object_ref, translate=self._translate, loop=self._loop
        )

    def _check_thread(self) -> None:
        if self._loop is None or self._future.done():
            return
        with suppress(RuntimeError):  # no event loop runs in this thread
            if asyncio.get_running_loop() is self._loop:
                raise RolloutError(
                    "result() waits for a call that this event loop must run, so it would wait for "
                    "ever; use await"
                )

    def __del__(self) -> None:
        if not getattr(self, "_is_read", True):
            self._future.add_done_callback(_log_error)

    def cancel(self) -> None:
        """Cancel a call that runs in this process; others, and those that ended, stay."""
        self._future.cancel()

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        self._is_read = True
        try:
            # Shielded: a caller that is cancelled stops waiting, but does not stop the call.
            return await asyncio.shield(asyncio.wrap_future(self._future))
        except Exception as error:
            self._raise(error)


def _log_error(future: Future[Any]) -> None:
    """Log the error of a call whose ``Pending`` was dropped."""
    if not future.cancelled() and (error := future.exception()):
        logger.error(
            "a call failed, and no caller waited for it: %s", describe(error, with_type=True)
        )


class PendingWithCallback(Pending[T]):
    """Two calls, and a callback between them.

    The first call has begun.  ``callback`` runs once, in the thread that waits in ``result()`` or
    ``await``, for only there may the caller's memory be freed safely.  Then the second call begins.
    If no thread or task waits, it never runs and the second call never begins.

    Args:
        callback: its error is the error of the whole, and the second call never begins.
        begin_second: starts the second call.
        merge: the result of the whole, from those of both calls.
        after_error: a note on an error of ``callback``: what the first call has left behind.
    """

    def __init__(
        self,
        first: Pending[T],
        callback: Callable[[], object],
        begin_second: Callable[[], Pending[T]],
        merge: Callable[[T, T], T],
        after_error: str,
    ) -> None:
        super().__init__(Future())
        self._first = first
        self._callback = callback
        self._begin_second = begin_second
        self._merge = merge
        self._after_error = after_error
        self._callback_lock = threading.Lock()
        self._is_called = False
        first._is_read = True
        first._future.add_done_callback(self._stop_after_failure)

    @checked
    def result(self, timeout_s: Timeout = None) -> T:
        self._is_read = True
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._go_on(self._first.result(timeout_s))
        return super().result(None if ends_s is None else max(0.0, ends_s - time.monotonic()))

    async def _wait(self) -> T:
        self._is_read = True
        self._go_on(await self._first)
        return await super()._wait()

    def _go_on(self, done: T) -> None:
        """Run the callback and begin the second call, unless that was done before."""
        with self._callback_lock:
            if self._is_called:
                return
            self._is_called = True
            try:
                self._callback()
                second = self._begin_second()
            except BaseException as error:
                error.add_note(self._after_error)
                self._future.set_exception(error)
                raise
        second._is_read = True
        second._future.add_done_callback(lambda _: self._finish(done, second))

    def _stop_after_failure(self, before: Future[T]) -> None:
        if before.cancelled():
            self._future.cancel()
        elif error := before.exception():
            self._future.set_exception(self._first._translate(error))

    def _finish(self, done: T, second: Pending[T]) -> None:
        future = second._future
        if future.cancelled():
            self._future.cancel()
        elif error := future.exception():
            self._future.set_exception(second._translate(error))
        else:
            self._future.set_result(self._merge(done, future.result()))


class LoopThread:
    """An event loop in a new thread, for callers without a loop.

    Always true: a call that was submitted ends, with an error if the loop is closed before.  A call
    that raises ``SystemExit`` or ``KeyboardInterrupt`` ends with it, and the loop goes on.  In a
    forked child, which has no such thread, a call is refused.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._is_closing = False
        self._submit_lock = threading.Lock()
        self.loop = asyncio.new_event_loop()
        # The loop's own, which can be left behind while a call in it goes on.
        self._worker_threads: list[threading.Thread] = []
        self._workers = ThreadPoolExecutor(
            thread_name_prefix=f"{name}-worker",
            initializer=lambda: self._worker_threads.append(threading.current_thread()),
        )
        self.loop.set_default_executor(self._workers)
        self._thread = keep_thread(self._run, name, Then.IS_OVER)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        is_over = False
        while not is_over:
            try:
                self.loop.run_forever()
                is_over = True
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio lets them end its loop
                logger.error("%s: a call raised %r; its others go on", self._name, error)
        self.loop.close()

    def submit(self, awaitable: Awaitable[T], why_late: Callable[[], str] = str) -> Pending[T]:
        """Start ``awaitable`` on the loop; returns at once.

        Args:
            why_late: see ``Pending``.

        Raises:
            RolloutError: the loop is closed, or of another process.
        """
        why = self.why_not_here
        if not why:
            with self._submit_lock:
                if not self._is_closing:
                    future = asyncio.run_coroutine_threadsafe(self._run_one(awaitable), self.loop)
                    return Pending(future, loop=self.loop, why_late=why_late)
            why = f"{self._name} is closed: no call is possible after stop or close"
        if asyncio.iscoroutine(awaitable):
            awaitable.close()
        raise RolloutError(why)

    @property
    def why_not_here(self) -> str:
        """Why it takes no calls of this process, in whatever state it is."""
        if os.getpid() == self._pid:
            return ""
        return (
            f"{self._name} was made in process {self._pid}, of which this one is a fork: it works "
            "there only; make or connect one here"
        )

    async def _run_one(self, awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
            raise RolloutError(f"{self._name} was closed while this call was under way") from None

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closing

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks and end the thread; what does not end in time is logged, and left.

        Raises nothing, so that it hides no error.
        """
        if self.why_not_here:
            return
        with self._submit_lock:
            if self._is_closing:
                return
            self._is_closing = True
        until_s = time.monotonic() + timeout_s
        asyncio.run_coroutine_threadsafe(self._end(until_s), self.loop)
        self._workers.shutdown(wait=False, cancel_futures=True)
        for thread in (self._thread, *self._worker_threads):
            if thread is threading.current_thread():
                continue
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                logger.error(
                    "%s is closed, and its thread %s still runs, %s",
                    self._name,
                    thread.name,
                    place_of_thread(thread.ident),
                )

    async def _end(self, until_s: float) -> None:
        """End all tasks, and the loop in any case."""
        try:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                left_s = until_s - time.monotonic()
                done, left = await asyncio.wait(tasks, timeout=max(0.1, 0.5 * left_s))
                for task in done:  # the error of a call is in its future, too
                    if not task.cancelled():
                        task.exception()
                for task in left:
                    place = place_of_task(task)
                    logger.error("%s is closed, and its task goes on, %s", self._name, place)
            await self.loop.shutdown_asyncgens()
        finally:
            self.loop.stop()


def place_of_error(error: BaseException) -> str:
    """File and line where it was raised, the last that is of no library, or empty if there is
    none."""
    return _own_place(traceback.extract_tb(error.__traceback__))


def place_of_thread(thread: int | None) -> str:
    """Where a thread is now, for a text."""
    frame = sys._current_frames().get(thread or 0)
    return _in_words("" if frame is None else _own_place(traceback.extract_stack(frame)))


def place_of_task(task: asyncio.Task[Any]) -> str:
    """Where a task waits, for a text."""
    frames = list[traceback.FrameSummary]()
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, ""))
        coroutine = getattr(coroutine, "cr_await", None)
    return _in_words(_own_place(frames))


def _in_words(place: str) -> str:
    return f"at {place}" if place else "in code of a library"


def _own_place(frames: Iterable[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
