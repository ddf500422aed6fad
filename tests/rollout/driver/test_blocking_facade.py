"""A facade over coroutines: what its methods return and document, and how it fails and closes."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest

import rollout
from rollout.core.errors import RolloutError
from rollout.core.pending import Pending
from rollout.driver.blocking_facade import BlockingFacade, arguments_of, blocking, started


class AsyncCounter:
    """Counts on the thread that it was made on."""

    def __init__(self, start: int, *, step: int = 1) -> None:
        asyncio.get_running_loop()
        if step < 1:
            raise ValueError("step < 1")
        self.thread = threading.current_thread()
        self.num_closed = 0
        self._number = start
        self._step = step

    async def count(self, times: int, *, again: bool = False) -> int:
        """The number after this.

        Args:
            times: how often.
        """
        await asyncio.sleep(0)
        return self.number(times * (2 if again else 1))

    def number(self, times: int) -> int:
        assert threading.current_thread() is self.thread
        self._number += times * self._step
        return self._number

    async def close(self) -> None:
        self.num_closed += 1


class Counter(BlockingFacade[AsyncCounter]):
    @arguments_of(AsyncCounter)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("counter", lambda: AsyncCounter(*args, **kwargs))

    count = started(AsyncCounter.count)
    count_now = blocking(AsyncCounter.count)
    number = blocking(AsyncCounter.number)


def test_a_started_method_returns_a_pending_and_a_blocking_one_the_result() -> None:
    with Counter(10, step=2) as counter:
        pending = counter.count(1)
        assert isinstance(pending, Pending)
        assert pending.result(10) == 12
        assert counter.count_now(2, again=True) == 20
        assert counter.number(1) == 22


async def test_a_started_method_can_be_awaited() -> None:
    async with Counter(0) as counter:
        assert await counter.count(3) == 3


def test_arguments_and_documentation_are_those_of_the_method() -> None:
    assert str(inspect.signature(Counter)) == "(start: 'int', *, step: 'int' = 1) -> 'None'"
    count = inspect.signature(Counter.count)
    assert list(count.parameters) == ["self", "times", "again"]
    assert count.return_annotation == "Pending[int]"
    assert inspect.signature(Counter.count_now).return_annotation == "int"
    told = inspect.getdoc(Counter.count)
    assert told is not None
    assert told.startswith("The number after this.\n\nIt starts at once and returns a ``Pending``")
    assert "times: how often." in told


def test_an_object_that_cannot_be_made_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="step < 1"):
        Counter(0, step=0)
    assert threading.active_count() == before


def test_a_wrong_argument_is_an_error_of_the_call_itself() -> None:
    with Counter(0) as counter, pytest.raises(TypeError, match="twice"):
        counter.count(1, twice=True)  # type: ignore[call-arg]


def test_a_closed_facade_refuses_every_call_and_closes_its_object_once() -> None:
    counter = Counter(0)
    inner = counter._inner
    counter.close()
    counter.close()
    assert inner.num_closed == 1
    for call in (counter.count, counter.count_now, counter.number):
        with pytest.raises(RolloutError, match="counter is closed: no call is possible"):
            call(1)


def test_the_driver_has_the_arguments_of_the_driver_of_coroutines() -> None:
    driver, coroutines = rollout.Driver, rollout.RolloutDriver
    assert inspect.signature(driver).parameters == inspect.signature(coroutines).parameters
    for name in ("rollout", "evaluate", "check_logprobs", "set_weight_version", "restore"):
        ours = inspect.signature(getattr(driver, name)).parameters
        assert ours == inspect.signature(getattr(coroutines, name)).parameters
