"""Ask every engine the same thing at once, wait for all, say who failed.

Always true: when ``fan_out`` returns or raises, no call it made is still running.  One engine's
failure never cancels a sibling: a ``release`` that is cut half-way leaves memory nobody can
account for.  Not a TaskGroup for that reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollout.errors import EngineFailure, PhaseTimeout
from rollout.timeline.recorder import engine_span

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """One engine's answer: a value or a failure, and the seconds it took."""

    elapsed_s: float
    value: T | None = None
    failure: EngineFailure | None = None

    def refused(self, operation: str, engine_id: str, reason: str) -> Answer[T]:
        """The same answer, found wanting."""
        return Answer(
            self.elapsed_s,
            failure=EngineFailure(
                f"engine {engine_id}: {operation} failed: {reason}",
                engine_id=engine_id,
                operation=operation,
                elapsed_s=self.elapsed_s,
            ),
        )


async def fan_out(
    asks: Mapping[str, Callable[[], Awaitable[T]]], *, operation: str, budget_s: float
) -> dict[str, Answer[T]]:
    """Run every ask at once and return all answers, by engine id.

    If the caller is cancelled, the calls still run to their end (each is bounded by
    ``budget_s``) before the cancellation goes on, so that what they did is known.
    """
    if not asks:
        return {}
    tasks = {
        engine_id: asyncio.create_task(
            _ask_one(engine_id, ask, operation, budget_s), name=f"{operation}:{engine_id}"
        )
        for engine_id, ask in asks.items()
    }
    await settle(tasks.values())
    return {engine_id: task.result() for engine_id, task in tasks.items()}


async def settle(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until every task has ended, even when cancelled meanwhile; then pass that on."""
    waiting = all_tasks = set(tasks)
    cancelled: asyncio.CancelledError | None = None
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            waiting = {task for task in waiting if not task.done()}
    if cancelled is not None:
        for task in all_tasks:
            if not task.cancelled():
                task.exception()  # looked at, or asyncio would log it as forgotten
        raise cancelled


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Carry ``work`` to its end, even when cancelled meanwhile; then pass that on."""
    task = asyncio.create_task(work)
    await settle([task])
    return task.result()


async def _ask_one(
    engine_id: str, ask: Callable[[], Awaitable[T]], operation: str, budget_s: float
) -> Answer[T]:
    clock = asyncio.get_running_loop().time
    started = clock()
    limit = asyncio.timeout(budget_s)
    try:
        with engine_span(engine_id, operation, budget_s):
            async with limit:
                value = await ask()
    # BaseException: a call that was cancelled from below must count as failed, not as answered.
    except BaseException as error:
        elapsed = clock() - started
        if isinstance(error, TimeoutError) and limit.expired():
            reason = f"{operation} took longer than {budget_s:g} s"
        else:
            reason = f"{operation} failed after {elapsed:.1f} s: {describe(error)}"
        failure = EngineFailure(
            f"engine {engine_id}: {reason}",
            engine_id=engine_id,
            operation=operation,
            elapsed_s=elapsed,
        )
        failure.__cause__ = error
        return Answer(elapsed, failure=failure)
    return Answer(clock() - started, value=value)


def describe(error: BaseException) -> str:
    """An error in words; a bare ``TimeoutError`` prints as nothing, so its type is said."""
    return str(error) or type(error).__name__


async def barrier(
    awaitables: Mapping[str, Awaitable[T]], *, operation: str = "", budget_s: float | None = None
) -> dict[str, T]:
    """Wait for all; results by name, or the first error with the others noted on it.

    Takes coroutines, tasks and Ray ObjectRefs alike.  All are started before any is awaited, and
    all have ended when this returns or raises.

    Args:
        budget_s: the deadline for all; None where what is awaited has deadlines of its own.

    Raises:
        PhaseTimeout: naming those who were late.
    """
    tasks = {name: asyncio.create_task(_within(one, budget_s)) for name, one in awaitables.items()}
    await settle(tasks.values())
    failed = {name: error for name, task in tasks.items() if (error := _error_of(task)) is not None}
    if not failed:
        return {name: task.result() for name, task in tasks.items()}
    late = {name: operation for name, error in failed.items() if isinstance(error, _Late)}
    if len(late) == len(failed) and budget_s is not None:
        raise PhaseTimeout(
            f"{operation} took longer than {budget_s:g} s on {', '.join(late)}",
            phase=operation,
            budget_s=budget_s,
            late=late,
        )
    errors = {name: error for name, error in failed.items() if name not in late}
    name, first = next(iter(errors.items()))
    for other, error in failed.items():
        if other != name:
            first.add_note(f"also failed: {other}: {describe(error)}")
    raise first


class _Late(Exception):
    """Ours, not something's own ``TimeoutError``."""


async def _within(awaitable: Awaitable[T], budget_s: float | None) -> T:
    try:
        async with asyncio.timeout(budget_s) as limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise _Late("no answer in time") from None
        raise


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()
