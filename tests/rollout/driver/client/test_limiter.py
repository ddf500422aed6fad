"""Slots: never more than the limit, in order, with their seconds of use."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.driver.client.generation_client import EngineLoad
from rollout.driver.client.limiter import Limiter, next_limit
from tests.support.virtual_time import pass_time, virtual_time


async def hold(limiter: Limiter, seconds: float, log: list[str], name: str = "") -> None:
    async with limiter.slot():
        log.append(name)
        await pass_time(seconds)


@virtual_time
async def test_waiters_are_admitted_in_order() -> None:
    limiter, log = Limiter(1, clock=asyncio.get_running_loop().time), []
    async with asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(hold(limiter, 1.0, log, name))
    assert log == ["a", "b", "c"]
    assert limiter.seconds() == (3.0, 0.0)
    assert limiter.num_used == limiter.num_waiting == 0


@virtual_time
async def test_a_higher_limit_admits_at_once_and_a_lower_one_as_slots_return() -> None:
    limiter, log = Limiter(1, clock=asyncio.get_running_loop().time), []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(hold(limiter, 1.0, log))
        await pass_time(0.5)
        limiter.limit = 3
        await asyncio.sleep(0)
        assert limiter.num_used == 3
        limiter.limit = 1
        await pass_time(0.75)
        assert limiter.num_used == 2
        await pass_time(0.5)
        assert limiter.num_used == 1


@virtual_time
async def test_a_waiter_that_is_cancelled_takes_no_slot() -> None:
    limiter, log = Limiter(1, clock=asyncio.get_running_loop().time), []
    first = asyncio.create_task(hold(limiter, 1.0, log))
    second = asyncio.create_task(hold(limiter, 1.0, log))
    await pass_time(0.1)
    second.cancel()
    await asyncio.wait([first, second])
    await pass_time(2.0)
    assert limiter.num_used == 0
    assert limiter.seconds() == (1.0, pytest.approx(2.0))


@virtual_time
async def test_a_waiter_that_is_cancelled_while_admitted_passes_the_slot_on() -> None:
    limiter, log = Limiter(1, clock=asyncio.get_running_loop().time), []
    first = asyncio.create_task(hold(limiter, 1.0, log, "first"))
    second = asyncio.create_task(hold(limiter, 1.0, log, "second"))
    third = asyncio.create_task(hold(limiter, 1.0, log, "third"))
    await pass_time(0.5)
    first.add_done_callback(lambda _: second.cancel())
    await asyncio.wait([first, second, third])
    assert log[0] == "first"
    assert log[-1] == "third"
    assert limiter.num_used == 0


@pytest.mark.parametrize(
    ("limit", "num_used", "load", "expected"),
    [
        (40, 40, EngineLoad(2, num_running=40), 50),
        (40, 39, EngineLoad(2, num_running=39), 40),
        (40, 40, EngineLoad(2, num_running=40, kv_use=0.9), 40),
        (40, 40, EngineLoad(2, num_running=40, kv_use=0.97), 30),
        (40, 40, EngineLoad(2, num_running=20, num_waiting=20), 36),
        (40, 40, EngineLoad(2, num_running=36, num_waiting=4), 50),
        (99, 99, EngineLoad(2, num_running=99), 100),
        (9, 9, EngineLoad(2, kv_use=1.0), 8),
        (40, 40, EngineLoad(0), 40),
    ],
)
def test_the_limit_follows_the_load(limit, num_used, load, expected: int) -> None:
    assert next_limit(limit, num_used, load, highest=100) == expected


@given(
    st.integers(1, 10_000),
    st.integers(0, 10_000),
    st.builds(
        EngineLoad,
        num_engines=st.integers(0, 64),
        num_running=st.integers(0, 5000),
        num_waiting=st.integers(0, 5000),
        kv_use=st.none() | st.floats(0, 1),
    ),
    st.integers(1, 5000),
)
def test_the_limit_stays_within_its_bounds(limit, num_used, load, highest) -> None:
    assert 1 <= next_limit(limit, num_used, load, highest) <= highest
