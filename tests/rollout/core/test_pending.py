"""Results of calls: who waits, where, and what becomes of an error that no caller reads.

Two calls and the caller's turn between them: who runs it, when, and how often.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from concurrent.futures import Future
from contextlib import suppress

import pytest

from rollout.core.errors import RolloutError
from rollout.core.pending import LoopThread, Pending, PendingWithCallback
from tests.support.waits import forever

NOTE = "the first call is done"


class Calls:
    """Two calls that a test ends, and what happened in which order."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.first: Future[str] = Future()
        self.second: Future[str] = Future()
        self.log: list[str] = []
        self.thread: threading.Thread | None = None
        self._error = error
        self.pending = PendingWithCallback(
            Pending(self.first), self._turn, self._begin, "{} {}".format, NOTE
        )

    def _turn(self) -> None:
        self.thread = threading.current_thread()
        self.log.append("turn")
        if self._error is not None:
            raise self._error

    def _begin(self) -> Pending[str]:
        self.log.append("second")
        return Pending(self.second)


def test_the_turn_is_taken_by_the_thread_that_waits_and_only_after_the_first_call() -> None:
    calls = Calls()
    with pytest.raises(TimeoutError):
        calls.pending.result(0.01)
    assert calls.log == []
    calls.first.set_result("a")
    calls.second.set_result("b")
    assert not calls.pending.done()  # nothing waited, so nothing else began
    assert calls.pending.result(1) == "a b"
    assert calls.thread is threading.current_thread()
    assert calls.pending.result(1) == "a b"
    assert calls.log == ["turn", "second"]
    assert calls.pending.done()


async def test_a_task_that_waits_takes_the_turn_in_its_own_thread() -> None:
    calls = Calls()
    waiting = [asyncio.ensure_future(calls.pending._wait()) for _ in range(2)]
    await asyncio.sleep(0)
    assert calls.log == []
    calls.first.set_result("a")
    calls.second.set_result("b")
    assert await asyncio.gather(*waiting) == ["a b", "a b"]
    assert await calls.pending == "a b"
    assert (calls.log, calls.thread) == (["turn", "second"], threading.current_thread())


def test_an_error_in_the_turn_is_that_of_the_whole_and_the_second_call_never_begins() -> None:
    calls = Calls(MemoryError("no host memory"))
    calls.first.set_result("a")
    for _ in range(2):
        with pytest.raises(MemoryError, match="no host memory") as caught:
            calls.pending.result(1)
        assert caught.value.__notes__ == [NOTE]
    assert calls.log == ["turn"]
    assert calls.pending.done()


def test_after_a_failed_first_call_no_turn_is_taken() -> None:
    calls = Calls()
    calls.first.set_exception(ValueError("refused"))
    assert calls.pending.done()
    with pytest.raises(ValueError, match="refused"):
        calls.pending.result(1)
    assert calls.log == []


async def test_the_error_of_the_second_call_is_that_of_the_whole() -> None:
    calls = Calls()
    calls.first.set_result("a")
    calls.second.set_exception(ValueError("no room"))
    with pytest.raises(ValueError, match="no room"):
        await calls.pending


def test_what_follows_runs_when_both_calls_have_ended() -> None:
    calls = Calls()
    pending = calls.pending.then(lambda: calls.log.append("after"))
    calls.first.set_result("a")
    calls.second.set_result("b")
    assert calls.log == []
    calls.pending.result(1)
    assert calls.log == ["turn", "second", "after"]
    assert pending.result(1) == "a b"


# -- one call -----------------------------------------------------------------------------------


async def fail() -> None:
    raise ValueError("no such engine")


def errors_of_dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    gc.collect()
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize("is_done", [True, False], ids=["ended before", "ends later"])
def test_the_error_of_a_call_that_no_caller_waits_for_is_logged(
    caplog: pytest.LogCaptureFixture, is_done: bool
) -> None:
    future: Future[None] = Future()
    pending = Pending(future).then(lambda: None)
    if is_done:
        future.set_exception(ValueError("no such engine"))
    del pending
    gc.collect()
    if not is_done:
        future.set_exception(ValueError("no such engine"))
    expected = "a call failed, and no caller waited for it: ValueError: no such engine"
    assert errors_of_dropped(caplog) == [expected]


def raise_error(loop: LoopThread, way: str) -> None:
    pending = loop.submit(fail())
    if way == "turn":
        pending = PendingWithCallback(
            pending, lambda: None, lambda: loop.submit(fail()), lambda first, _: first, NOTE
        )

    async def wait() -> None:
        await pending

    asyncio.run(wait()) if way == "await" else pending.result(10)


@pytest.mark.parametrize("way", ["result", "await", "turn"])
def test_an_error_that_was_raised_is_not_logged(caplog: pytest.LogCaptureFixture, way: str) -> None:
    loop = LoopThread("test")
    with pytest.raises(ValueError, match="no such engine"):
        raise_error(loop, way)
    loop.close()
    assert errors_of_dropped(caplog) == []


def test_a_result_that_its_own_event_loop_would_wait_for_is_refused() -> None:
    loop = LoopThread("test")
    never = asyncio.Event()

    async def wait_for_itself() -> None:
        with pytest.raises(RolloutError, match=r"this event loop must run.*use await"):
            loop.submit(never.wait()).then(lambda: None).result(10)
        assert await loop.submit(asyncio.sleep(0, "done")) == "done"

    try:
        loop.submit(wait_for_itself()).result(10)
    finally:
        loop.close()


async def test_another_event_loop_may_wait_for_it() -> None:
    loop = LoopThread("test")
    assert loop.submit(asyncio.sleep(0, "done")).result(10) == "done"
    loop.close()


def test_an_error_keeps_the_cause_that_it_was_raised_with() -> None:
    async def fail() -> None:
        raise RolloutError("outer") from ValueError("inner")

    loop = LoopThread("driver")
    with pytest.raises(RolloutError) as caught:
        loop.submit(fail()).result(5)
    loop.close()
    assert repr(caught.value.__cause__) == "ValueError('inner')"


def test_a_pending_shows_its_state() -> None:
    future: Future[int] = Future()
    pending = Pending(future)
    assert repr(pending) == "<Pending: running>"
    future.set_exception(RolloutError("the engines are gone"))
    with suppress(RolloutError):
        pending.result()
    assert repr(pending) == "<Pending: failed: RolloutError: the engines are gone>"


def test_a_forked_child_is_told_that_the_thread_is_not_there() -> None:
    loop = LoopThread("driver")
    child = os.fork()
    if not child:
        try:
            loop.submit(asyncio.sleep(0))
        except RolloutError as error:
            loop.close()
            os._exit(0 if f"made in process {os.getppid()}" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    loop.close()


def test_a_call_without_an_object_ref_says_so() -> None:
    assert Pending(Future(), object_ref="ref").then(lambda: None).object_ref == "ref"
    with pytest.raises(RolloutError, match="no single call of a Ray actor; use result"):
        _ = Pending(Future()).object_ref


def test_a_call_under_way_ends_with_an_error_when_its_loop_is_closed() -> None:
    loop = LoopThread("driver")
    pending = loop.submit(forever())
    loop.close()
    with pytest.raises(RolloutError, match="driver was closed while this call was under way"):
        pending.result(5)
    with pytest.raises(RolloutError, match="driver is closed: no call is possible"):
        loop.submit(asyncio.sleep(0))


def test_every_call_that_meets_a_close_ends() -> None:
    loop, calls, has_begun = LoopThread("driver"), [], threading.Event()

    def submit_until_refused() -> None:
        with suppress(RolloutError):
            while True:
                calls.append(loop.submit(forever()))
                has_begun.set()

    threads = [threading.Thread(target=submit_until_refused) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert has_begun.wait(10)
    loop.close(30)
    for thread in threads:
        thread.join()
    for pending in calls:
        with pytest.raises(RolloutError, match="closed while this call was under way"):
            pending.result(5)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("is_callback", [True, False])
def test_what_exits_in_a_loop_thread_ends_its_own_call_and_no_other(
    kind: type[BaseException], is_callback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop, may_end = LoopThread("work"), threading.Event()

    async def leave() -> None:
        if is_callback:
            asyncio.get_running_loop().call_soon(leave_at_once)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            leave_at_once()

    def leave_at_once() -> None:
        raise kind("of the user")

    async def other() -> str:
        await asyncio.to_thread(may_end.wait, 10)
        return "whole"

    before = loop.submit(other())
    left = loop.submit(leave())
    if is_callback:
        left.result(10)
    else:
        with pytest.raises(kind, match="of the user"):
            left.result(10)
    may_end.set()
    assert before.result(10) == loop.submit(other()).result(10) == "whole"
    loop.close()
    assert "work" not in {thread.name for thread in threading.enumerate()}
    assert f"work: a call raised {kind.__name__}('of the user'); its others go on" in caplog.text


class EndsLate(Future[str]):
    """Ends just behind the wait for it."""

    def result(self, timeout: float | None = None) -> str:
        self._end()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._end()
        return super().exception(timeout)

    def _end(self) -> None:
        if not self.done():
            self.set_result("whole")
            raise TimeoutError


def test_a_call_that_ends_just_behind_the_wait_has_its_result() -> None:
    assert Pending(EndsLate()).result(0.01) == "whole"


def test_a_close_leaves_threads_and_tasks_that_do_not_end_and_names_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, may_end, has_begun = LoopThread("work"), threading.Event(), threading.Event()
    never = asyncio.Event()

    async def swallow() -> None:
        while not may_end.is_set():
            with suppress(asyncio.CancelledError):
                await never.wait()

    def wait() -> None:
        has_begun.set()
        may_end.wait(30)

    async def wait_in_a_thread() -> None:
        await asyncio.to_thread(wait)

    loop.submit(swallow())
    loop.submit(wait_in_a_thread())
    assert has_begun.wait(10)
    loop.close(0.5)
    assert f"work is closed, and its task goes on, at {__file__}:" in caplog.text
    assert f"work is closed, and its thread work-worker_0 still runs, at {__file__}:" in caplog.text
    may_end.set()
