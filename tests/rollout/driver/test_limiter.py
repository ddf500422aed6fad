"""Slots: never more than the limit, in order, and counted in seconds."""

import asyncio

import pytest

from rollout.driver.limiter import Limiter
from tests.support.virtual_time import virtual_time


async def hold(limiter: Limiter, seconds: float, log: list[str], name: str = "") -> None:
    async with limiter.slot():
        log.append(name)
        await asyncio.sleep(seconds)


@virtual_time
async def test_who_waits_is_let_in_in_order() -> None:
    limiter, log = Limiter(1, clock=asyncio.get_running_loop().time), []
    async with asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(hold(limiter, 1.0, log, name))
    assert log == ["a", "b", "c"]
    assert limiter.seconds() == (3.0, 0.0)
    assert limiter.num_used == limiter.num_waiting == 0


@virtual_time
async def test_a_higher_limit_lets_in_at_once_and_a_lower_one_as_others_leave() -> None:
    limiter, log = Limiter(1, clock=asyncio.get_running_loop().time), []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(hold(limiter, 1.0, log))
        await asyncio.sleep(0.5)
        limiter.limit = 3
        await asyncio.sleep(0)
        assert limiter.num_used == 3
        limiter.limit = 1
        await asyncio.sleep(0.75)
        assert limiter.num_used == 2
        await asyncio.sleep(0.5)
        assert limiter.num_used == 1


@virtual_time
async def test_who_is_cancelled_while_waiting_takes_no_slot() -> None:
    limiter, log = Limiter(1, clock=asyncio.get_running_loop().time), []
    first = asyncio.create_task(hold(limiter, 1.0, log))
    second = asyncio.create_task(hold(limiter, 1.0, log))
    await asyncio.sleep(0.1)
    second.cancel()
    await asyncio.wait([first, second])
    await asyncio.sleep(2.0)
    assert limiter.num_used == 0
    assert limiter.seconds() == (1.0, pytest.approx(2.0))


@virtual_time
async def test_who_is_cancelled_at_the_moment_of_being_let_in_passes_the_slot_on() -> None:
    limiter, log = Limiter(1, clock=asyncio.get_running_loop().time), []
    first = asyncio.create_task(hold(limiter, 1.0, log, "first"))
    second = asyncio.create_task(hold(limiter, 1.0, log, "second"))
    third = asyncio.create_task(hold(limiter, 1.0, log, "third"))
    await asyncio.sleep(0.5)
    first.add_done_callback(lambda _: second.cancel())
    await asyncio.wait([first, second, third])
    assert log[0] == "first"
    assert log[-1] == "third"
    assert limiter.num_used == 0
