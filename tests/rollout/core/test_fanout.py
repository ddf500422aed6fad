"""All calls start at once, all are waited for, and every failure names its engine."""

import asyncio
import gc
import warnings

import pytest

from engines.protocol.errors import EngineUnreachable, NotEncodable
from engines.protocol.plain_text import describe
from rollout.core.errors import EngineFailure, PhaseTimeout
from rollout.core.fanout import barrier, fan_out, whole_or_none
from tests.support.virtual_time import pass_time, virtual_time


async def answers(value: str) -> str:
    return value


async def fails(error: BaseException) -> str:
    raise error


async def test_all_are_asked_before_any_is_answered() -> None:
    everybody = asyncio.Barrier(3)

    async def meet() -> None:
        await everybody.wait()

    asks = dict.fromkeys("abc", meet)
    done = await fan_out(asks, operation="pause", budget_s=10)
    assert list(done) == ["a", "b", "c"]


@virtual_time
async def test_a_sibling_finishes_when_another_fails_at_once() -> None:
    opened = asyncio.Event()

    async def slow() -> str:
        await opened.wait()
        return "done"

    asks = {"bad": lambda: fails(RuntimeError("boom")), "slow": slow}
    asking = asyncio.create_task(fan_out(asks, operation="release", budget_s=10))
    await pass_time(0.001)
    assert not asking.done()
    opened.set()
    done = await asking
    assert done["slow"].value == "done"
    assert str(done["bad"].failure) == "engine bad: release failed after 0.0 s: boom"


async def test_the_engines_own_error_is_the_cause() -> None:
    error = EngineUnreachable("connection broke", engine="a")
    done = await fan_out({"a": lambda: fails(error)}, operation="flush", budget_s=10)
    failure = done["a"].failure
    assert isinstance(failure, EngineFailure)
    assert failure.__cause__ is error
    assert (failure.engine_id, failure.operation) == ("a", "flush")


@virtual_time
async def test_what_cannot_be_encoded_is_the_callers_error_and_no_engines_failure() -> None:
    opened = asyncio.Event()

    async def slow() -> str:
        await opened.wait()
        return "done"

    asks = {"a": lambda: fails(NotEncodable("set")), "b": lambda: fails(NotEncodable("set"))}
    asking = asyncio.create_task(fan_out(asks | {"c": slow}, operation="load", budget_s=10))
    await pass_time(0.001)
    assert not asking.done()
    opened.set()
    with pytest.raises(NotEncodable, match="set"):
        await asking


@virtual_time
async def test_a_late_engine_is_named_with_its_operation_and_budget() -> None:
    # Chosen so that (start + budget) - start is a little less than the budget in floating point.
    await pass_time(9.0)
    asks = {"late": asyncio.Event().wait, "good": lambda: answers("done")}
    done = await fan_out(asks, operation="release", budget_s=3.1)
    assert str(done["late"].failure) == "engine late: release took longer than 3.1 s"
    assert done["late"].elapsed_s == pytest.approx(3.1)
    assert done["good"].value == "done"


async def test_a_timeout_of_the_engines_own_is_not_called_ours() -> None:
    done = await fan_out({"a": lambda: fails(TimeoutError())}, operation="pause", budget_s=10)
    assert str(done["a"].failure) == "engine a: pause failed after 0.0 s: TimeoutError"


async def test_a_call_that_was_cancelled_from_below_counts_as_failed() -> None:
    asks = {"a": lambda: fails(asyncio.CancelledError())}
    done = await fan_out(asks, operation="pause", budget_s=10)
    assert "CancelledError" in str(done["a"].failure)


@virtual_time
async def test_a_cancelled_command_still_waits_for_its_calls_however_often_it_is_cancelled() -> (
    None
):
    opened, ended = asyncio.Event(), []

    async def slow() -> None:
        await opened.wait()
        ended.append("slow")

    asking = asyncio.create_task(fan_out({"a": slow}, operation="release", budget_s=10))
    for _ in range(3):
        await pass_time(0.001)
        asking.cancel()
    await pass_time(0.001)
    assert not asking.done()
    opened.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert ended == ["slow"]


async def test_no_calls_are_no_error() -> None:
    assert await fan_out({}, operation="pause", budget_s=1) == {}
    assert await barrier({}) == {}


async def test_a_barrier_gives_all_results_by_name() -> None:
    assert await barrier({"a": answers("1"), "b": answers("2")}) == {"a": "1", "b": "2"}


async def test_a_barrier_raises_the_first_error_and_notes_the_others() -> None:
    with pytest.raises(ValueError, match="first") as caught:
        await barrier({"a": answers("1"), "b": fails(ValueError("first")), "c": fails(KeyError(3))})
    assert caught.value.__notes__ == ["also failed: c: 3"]


@virtual_time
async def test_a_barrier_waits_for_the_slow_when_another_fails() -> None:
    opened = asyncio.Event()
    waiting = asyncio.create_task(barrier({"bad": fails(ValueError()), "slow": opened.wait()}))
    await pass_time(0.001)
    assert not waiting.done()
    opened.set()
    with pytest.raises(ValueError):  # noqa: PT011  it has no text
        await waiting


@virtual_time
async def test_a_barrier_names_who_is_late() -> None:
    waits = {"slow": asyncio.Event().wait(), "quick": answers("done")}
    with pytest.raises(PhaseTimeout, match=r"^flush took longer than 60 s on slow$") as caught:
        await barrier(waits, operation="flush", budget_s=60)
    assert caught.value.late == {"slow": "flush"}


@virtual_time
async def test_a_barrier_prefers_a_real_error_over_one_that_was_late() -> None:
    waits = {"slow": asyncio.Event().wait(), "bad": fails(ValueError("reason"))}
    with pytest.raises(ValueError, match="reason") as caught:
        await barrier(waits, operation="flush", budget_s=60)
    assert caught.value.__notes__ == ["also failed: slow: no answer in time"]


def test_calls_of_a_barrier_that_are_cancelled_before_they_begin_warn_of_nothing() -> None:
    """As at the end of a loop."""
    begun = []

    async def call() -> None:
        begun.append(True)

    async def main() -> None:
        waiting = asyncio.create_task(barrier({"a": call(), "b": call()}))
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([waiting])

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert (begun, [str(one.message) for one in warned]) == ([], [])


def test_an_error_without_text_is_described_by_its_type() -> None:
    assert describe(TimeoutError()) == "TimeoutError"
    assert describe(ValueError("text")) == "text"


async def test_errors_behind_a_cancelled_barrier_are_not_logged_as_forgotten() -> None:
    forgotten: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
    opened = asyncio.Event()

    async def fail_later() -> None:
        await opened.wait()
        raise ValueError("late")

    waiting = asyncio.create_task(barrier({"a": fail_later()}))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    opened.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    gc.collect()
    assert forgotten == []


async def test_a_whole_ends_with_the_first_part_that_fails() -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def fail() -> None:
        raise ValueError("rank 1 has ended")

    with pytest.raises(ValueError, match="rank 1 has ended"):
        await asyncio.wait_for(whole_or_none([wait(), fail()]), 10)
    assert ended.is_set()


async def test_a_whole_has_the_results_of_all_parts_in_order() -> None:
    async def part(number: int) -> int:
        await asyncio.sleep(0)
        return number

    assert await whole_or_none(part(number) for number in range(3)) == [0, 1, 2]
