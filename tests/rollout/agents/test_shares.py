"""Threads of works: who is in, who comes next, and that each work ends."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.agents import shares as module
from rollout.agents.shares import Share, Shares, WorkEnded
from tests.support.waits import until

LONG_TEXT, LONG_INPUT = 1 << 18, 1 << 20
NUM_AT_ONCE = 2


class Refused(Exception):
    """What a work may raise."""


@dataclass
class Inside:
    """How many works are in, and the most that were."""

    most: int = 0
    _num: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def one(self) -> Iterator[None]:
        with self._lock:
            self._num += 1
            self.most = max(self.most, self._num)
        try:
            os.sched_yield()
            yield
        finally:
            with self._lock:
                self._num -= 1


@dataclass(frozen=True)
class Work:
    """A work that checks, encodes, and ends in one of several ways.

    Attributes:
        steps: characters that it encodes after a check; 0 for none.
        leaves_at: the step at which its client leaves.
        fails: it raises at its end, within ``aside`` if its last step is one.
    """

    client: str
    steps: tuple[int, ...]
    num_bytes: int
    leaves_at: int | None
    fails: bool


WORKS = st.builds(
    Work,
    st.sampled_from("abc"),
    st.lists(st.sampled_from([0, 1, LONG_TEXT]), max_size=5).map(tuple),
    st.sampled_from([0, LONG_INPUT]),
    st.none() | st.integers(0, 4),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORKS, min_size=1, max_size=40))
def test_any_works_end_and_never_more_than_that_are_in(works: list[Work]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE_S", -1.0)  # each check gives way
        asyncio.run(check_works(works))


async def check_works(works: list[Work]) -> None:
    shares = Shares(NUM_AT_ONCE)
    running, encoding = Inside(), Inside()
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[object]] = []

    def carry_out(number: int, work: Work, share: Share) -> int:
        for step, num_characters in enumerate(work.steps):
            if step == work.leaves_at:
                loop.call_soon_threadsafe(tasks[number].cancel)
                while True:
                    share()
            with running.one():
                pass
            if num_characters:
                with share.aside(num_characters):
                    inside = encoding if num_characters >= LONG_TEXT else running
                    with inside.one():
                        if work.fails and step == len(work.steps) - 1:
                            raise Refused
            share()
        if work.fails:
            raise Refused
        return number

    async def outcome(number: int, work: Work) -> object:
        try:
            return await shares.run(work.client, work.num_bytes, carry_out, number, work)
        except Refused as error:
            return type(error)

    tasks += [asyncio.create_task(outcome(*one)) for one in enumerate(works)]
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    for number, (work, result) in enumerate(zip(works, outcomes, strict=True)):
        if work.leaves_at is not None and work.leaves_at < len(work.steps):
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert result is Refused if work.fails else result == number
    assert running.most <= NUM_AT_ONCE
    assert encoding.most <= 1
    await until(lambda: is_empty(shares))


def is_empty(shares: Shares) -> bool:
    """Nothing waits, and each place is free again."""
    assert shares._clients == {}
    assert shares._shares == set()
    lines = (shares.running, shares.long_texts)
    return [(line.num_free, line.waiting) for line in lines] == [(NUM_AT_ONCE, []), (1, [])]


def use_cpu(seconds: float) -> None:
    """Of this thread."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def wait_for(is_so: Callable[[], bool]) -> None:
    """In a thread."""
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        os.sched_yield()


async def test_the_client_that_had_least_comes_next() -> None:
    shares, may_end, order = Shares(1), threading.Event(), []

    def first(share: Share) -> None:
        use_cpu(0.01)
        assert may_end.wait(60)

    def note(name: str, share: Share) -> None:
        order.append(name)

    tasks = [asyncio.create_task(shares.run("a", 0, first))]
    await until(lambda: not shares.running.num_free)
    for num, name in enumerate(("a", "b"), 1):
        tasks.append(asyncio.create_task(shares.run(name, 0, note, name)))
        await until(lambda num=num: len(shares.running.waiting) == num)  # type: ignore[misc]
    may_end.set()
    await asyncio.gather(*tasks)
    assert order == ["b", "a"]


async def test_a_long_work_gives_way_to_a_short_one() -> None:
    shares, short_is_done = Shares(1), threading.Event()

    def long(share: Share) -> None:
        while not short_is_done.is_set():
            share()

    running = asyncio.create_task(shares.run("long", LONG_INPUT, long))
    await until(lambda: not shares.running.num_free)
    await shares.run("short", 0, lambda share: short_is_done.set())
    await running


async def test_clients_that_had_less_keep_none_out_for_ever() -> None:
    shares, num_short, tasks = Shares(1), 0, []
    loop, is_over = asyncio.get_running_loop(), threading.Event()

    def long(share: Share) -> None:
        for _ in range(5):
            use_cpu(0.006)
            share()

    def short(share: Share) -> None:
        if not is_over.is_set():  # as it ends, there is another one
            num = len(shares.running.waiting)
            loop.call_soon_threadsafe(begin)
            wait_for(lambda: len(shares.running.waiting) > num or is_over.is_set())

    def begin() -> None:
        nonlocal num_short
        num_short += 1
        tasks.append(asyncio.create_task(shares.run(f"short-{num_short}", 0, short)))

    long_one = asyncio.create_task(shares.run("long", 0, long))
    await until(lambda: not shares.running.num_free)
    begin()
    await long_one
    is_over.set()
    assert num_short < 50
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("num_bytes", [0, LONG_INPUT])
async def test_many_works_of_a_client_keep_no_other_out(num_bytes: int) -> None:
    shares, is_over = Shares(), threading.Event()

    def greedy(share: Share) -> None:
        while not is_over.is_set():
            share()

    tasks = [asyncio.create_task(shares.run("greedy", num_bytes, greedy)) for _ in range(200)]
    await until(lambda: not shares.running.num_free)
    assert await shares.run("other", num_bytes, lambda share: "done") == "done"
    is_over.set()
    await asyncio.gather(*tasks)


async def test_a_long_text_lets_others_run_meanwhile() -> None:
    shares, is_over = Shares(1), threading.Event()

    def encode(share: Share) -> None:
        with share.aside(LONG_TEXT):
            assert is_over.wait(60)

    encoding = asyncio.create_task(shares.run("a", 0, encode))
    await until(lambda: not shares.long_texts.num_free)
    assert await shares.run("b", 0, lambda share: "done") == "done"
    is_over.set()
    await encoding


async def test_a_client_that_leaves_ends_its_work_at_the_next_check() -> None:
    shares, ends = Shares(), []

    def work(share: Share) -> None:
        try:
            while True:
                share()
        except WorkEnded as error:
            ends.append(str(error))
            raise

    running = asyncio.create_task(shares.run("a", 0, work))
    await until(lambda: shares.running.num_free < NUM_AT_ONCE)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: is_empty(shares))
    assert ends == ["the client has left"]


async def test_work_whose_client_left_before_its_turn_is_not_begun() -> None:
    shares, may_end = Shares(1), threading.Event()
    begun: list[Share] = []
    first = asyncio.create_task(shares.run("a", 0, lambda share: may_end.wait(60)))
    await until(lambda: not shares.running.num_free)
    second = asyncio.create_task(shares.run("b", 0, begun.append))
    await until(lambda: bool(shares.running.waiting))
    second.cancel()
    await until(lambda: not shares.running.waiting)
    may_end.set()
    assert await first
    assert begun == []


async def test_work_that_takes_too_long_ends() -> None:
    shares, has_ended = Shares(within_s=0.01), threading.Event()

    def work(share: Share) -> None:
        try:
            while True:
                share()
        finally:
            has_ended.set()

    with pytest.raises(WorkEnded, match="took too long to read"):
        await shares.run("a", 0, work)
    assert await asyncio.to_thread(has_ended.wait, 60)
    await until(lambda: is_empty(shares))


async def test_a_timeout_of_the_work_itself_is_its_own() -> None:
    def work(share: Share) -> None:
        raise TimeoutError("of a file")

    with pytest.raises(TimeoutError, match="of a file"):
        await Shares().run("a", 0, work)


async def test_close_ends_all_work() -> None:
    shares = Shares()

    def work(share: Share) -> None:
        while True:
            share()

    tasks = [asyncio.create_task(shares.run(name, 0, work)) for name in "abcd"]
    await until(lambda: len(shares._shares) == len(tasks))
    shares.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [WorkEnded] * len(tasks)
    await until(lambda: is_empty(shares))
