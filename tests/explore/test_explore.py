"""The explorer itself, on a toy: two tasks that each add one to a number, in two steps."""

import asyncio
from typing import Any

import pytest

from tests.explore.explorer import ExploredLoop, Search, Violation, following, replay, run


class LostUpdate:
    """Each task reads, waits for its turn, and writes what it read plus one."""

    def __init__(self) -> None:
        self.number = 0
        self.waiting: list[Any] = []
        self.order: list[str] = []

    def start(self, loop: ExploredLoop) -> None:
        for name in ("a", "b"):
            loop.create_task(self.add(loop, name))

    async def turn(self, loop: ExploredLoop, name: str) -> None:
        future = loop.create_future()
        self.waiting.append((name, future))
        await future

    async def add(self, loop: ExploredLoop, name: str) -> None:
        await self.turn(loop, name)
        seen = self.number
        await self.turn(loop, name)
        self.number = seen + 1

    def num_options(self) -> int:
        return len(self.waiting)

    def take(self, option: int) -> str:
        name, future = self.waiting.pop(option)
        self.order.append(name)
        future.set_result(None)
        return name

    def check(self) -> None: ...

    def finish(self) -> None:
        if self.number != 2:
            raise Violation(f"the number is {self.number}")


class Orders(LostUpdate):
    """The same, with nothing to find fault with: a schedule that fails is not gone on from."""

    def finish(self) -> None: ...


def test_every_order_is_run_once() -> None:
    search = Search(Orders)
    orders = ["".join(done.scenario.order) for done in search.enumerate(4)]
    assert sorted(orders) == ["aabb", "abab", "abba", "baab", "baba", "bbaa"]
    assert search.num_runs == 6


def test_a_failure_is_found_shrunk_and_replayed() -> None:
    search = Search(LostUpdate)
    failed = replay(LostUpdate, {0: 1, 2: 1})
    assert failed.violation
    smallest = search.shrink(failed)
    assert len(smallest.schedule) < len(failed.schedule)
    assert replay(LostUpdate, smallest.schedule).violation == "the number is 1"
    assert "schedule:" in str(smallest)


def test_a_walk_is_the_same_for_the_same_seed() -> None:
    schedules = [
        [done.schedule for done in Search(LostUpdate).walk(20, seed=3, rate=0.5)] for _ in range(2)
    ]
    assert schedules[0] == schedules[1]
    assert len({tuple(one.items()) for one in schedules[0]}) == len(schedules[0])


class Timed:
    """A task that waits with a deadline for something that never comes."""

    def start(self, loop: ExploredLoop) -> None:
        self.loop = loop
        self.task = loop.create_task(self.wait())

    async def wait(self) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await self.loop.create_future()
        return self.loop.time()

    def num_options(self) -> int:
        return int(self.loop.next_timer_s() is not None)

    def take(self, option: int) -> str:
        return f"{self.loop.pass_time()} s"

    def check(self) -> None: ...

    def finish(self) -> None:
        if not self.task.done():
            raise Violation("it waits for ever")


def test_time_passes_only_as_an_event() -> None:
    done = run(Timed(), following({}))
    assert done.violation == ""
    assert done.scenario.task.result() == 60


def test_what_is_ready_can_run_out_of_turn() -> None:
    runs = list(Search(Orders, by_turns=True).enumerate(1))
    assert any("ran first" in line for done in runs for line in done.story)


class Forgetful(Timed):
    async def wait(self) -> float:
        async def fail() -> None:
            raise ValueError("unseen")

        self.loop.create_task(fail())
        return 0.0


def test_an_error_that_nobody_looks_at_is_a_violation() -> None:
    assert "unseen" in run(Forgetful(), following({})).violation
