"""Calls that are cancelled at one of their awaits, for each await in turn.

A cancel comes as an await begins, or in the turn of the loop in which what it waits for has come:
then the effect is done, and what follows it is not.
"""

from __future__ import annotations

import asyncio
import inspect
import types
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support.virtual_time import pass_time

T = TypeVar("T")
_SHARE = 10
_MOST_AWAITS = 2000


@dataclass
class Cut:
    """Where a call is cut off.

    Attributes:
        number: of its await, from 1; 0 for a call that is not cut off.
        is_late: as the await ends.
        num_awaits: that the call had.
        place: of the await: the innermost line of the code.
    """

    number: int
    is_late: bool = False
    num_awaits: int = 0
    place: str = ""

    @property
    def was_reached(self) -> bool:
        return self.num_awaits >= self.number > 0

    def __str__(self) -> str:
        return f"await {self.number} {'as it ends' if self.is_late else 'as it begins'}"


@dataclass(frozen=True)
class Result:
    """What a call came to: its value, or that it was cancelled."""

    value: Any = None
    is_cancelled: bool = False


@types.coroutine
def cut_off(call: Coroutine[Any, Any, T], cut: Cut) -> Generator[Any, Any, T]:
    """``call``, which cancels the task that runs it at one of its awaits."""
    task = asyncio.current_task()
    assert task is not None
    error: BaseException | None = None
    while True:
        try:
            waits_for = call.send(None) if error is None else call.throw(error)
        except StopIteration as end:
            return end.value
        error = None
        cut.num_awaits += 1
        assert cut.num_awaits < _MOST_AWAITS, f"the call does not end: {_place_of(call)}"
        if cut.num_awaits == cut.number:
            cut.place = _place_of(call)
            if cut.is_late and waits_for is not None:
                # In front of the task's own, which wakes it.
                waits_for.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        try:
            yield waits_for
        except BaseException as raised:
            error = raised


async def called(call: Coroutine[Any, Any, Any], cut: Cut) -> Result:
    """What the call came to, cut off there."""
    task = asyncio.create_task(_in_task(call, cut))
    try:
        return Result(await task)
    except asyncio.CancelledError:
        return Result(is_cancelled=True)


async def _in_task(call: Coroutine[Any, Any, T], cut: Cut) -> T:
    return await cut_off(call, cut)


def each_cut(name: str, run: Callable[[Cut], None], *, is_whole: bool) -> int:
    """Runs a case without a cut, and then with a cut at each await.

    Args:
        name: of the case; it decides which tenth of its cuts is the fixed one.
        run: makes a new world, makes the call with the cut and raises what is wrong.
        is_whole: all cuts, not a tenth of them.

    Returns:
        The number of cuts.
    """
    whole = Cut(0)
    run(whole)
    num_run = 0
    for cut in _cuts(name, whole.num_awaits, is_whole=is_whole):
        num_run += 1
        try:
            run(cut)
        except Exception as error:
            raise AssertionError(f"{name}, {cut}, at {cut.place}: {error}") from error
        assert cut.was_reached, f"{name}, {cut}: the call had {cut.num_awaits} awaits"
    return num_run


def _cuts(name: str, num_awaits: int, *, is_whole: bool) -> Iterator[Cut]:
    for number in range(1, num_awaits + 1):
        for is_late in (False, True):
            cut = Cut(number, is_late)
            if is_whole or zlib.crc32(f"{name}, {cut}".encode()) % _SHARE == 0:
                yield cut


def others() -> set[asyncio.Task[Any]]:
    """The tasks of the loop, but for this one."""
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


def public_methods(kind: type) -> set[str]:
    """The names of the methods of a class, but for those of its bases."""
    return {
        name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")
    }


def async_methods(kind: type) -> set[str]:
    """Those that give other tasks their turn."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in public_methods(kind)}
    return {
        name
        for name, method in methods.items()
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    }


async def inline(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``asyncio.to_thread`` for virtual time: the work is done between two awaits."""
    await pass_time(0.001)
    result = work(*args, **kwargs)
    await pass_time(0.001)
    return result


def suspending(method: Callable[..., Awaitable[T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """The method of a client, which gives other tasks their turn before and after."""

    async def call(*args: Any, **kwargs: Any) -> T:
        await pass_time(0.001)
        result = await method(*args, **kwargs)
        await pass_time(0.001)
        return result

    return call


def _place_of(call: Any) -> str:
    place = ""
    while call is not None:
        frame = next(
            (
                frame
                for name in ("cr_frame", "gi_frame", "ag_frame")
                if (frame := getattr(call, name, None)) is not None
            ),
            None,
        )
        if frame is not None and "rollout" in frame.f_code.co_filename:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        awaits = (getattr(call, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        call = next((inner for inner in awaits if inner is not None), None)
    return place
