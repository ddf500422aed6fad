"""Run one operation on every engine at once, wait for all, and report each failure.

Always true: when ``fan_out`` returns or raises, none of its calls is still running.  A failure of
one engine never cancels the call of another: a release of memory that is cancelled half-way leaves
an unknown amount of it in use.  A TaskGroup would cancel it, so only starts use one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from engines.http.call_watcher import watch_engine
from engines.process.background import start_task
from engines.protocol.errors import NotEncodable
from engines.protocol.plain_text import describe
from rollout.core.errors import EngineFailure, PhaseTimeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineReply(Generic[T]):
    """The reply of one engine: a value or a failure, and the seconds it took."""

    elapsed_s: float
    value: T | None = None
    failure: EngineFailure | None = None

    def as_failure(self, operation: str, engine_id: str, reason: str) -> EngineReply[T]:
        """A failure in place of this reply, because its value is not acceptable."""
        return EngineReply(
            self.elapsed_s,
            failure=EngineFailure(
                f"engine {engine_id}: {operation} failed: {reason}",
                engine_id=engine_id,
                operation=operation,
                elapsed_s=self.elapsed_s,
            ),
        )


async def fan_out(
    calls: Mapping[str, Callable[[], Awaitable[T]]], *, operation: str, budget_s: float
) -> dict[str, EngineReply[T]]:
    """Start every call at once and return all replies, by engine id.

    If the caller is cancelled, the calls still run to their end before the cancellation is raised,
    so that their effects are known.

    Args:
        budget_s: deadline of each call.

    Raises:
        NotEncodable: what should be sent cannot be; no engine is to blame for that.
    """
    if not calls:
        return {}
    tasks = {
        engine_id: start_task(
            _call_one(engine_id, call, operation, budget_s), f"{operation}:{engine_id}"
        )
        for engine_id, call in calls.items()
    }
    await wait_all(tasks.values())
    for error in [task.exception() for task in tasks.values()]:
        if error is not None:
            raise error
    return {engine_id: task.result() for engine_id, task in tasks.items()}


async def wait_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until every task has ended; a cancellation in the meantime is raised afterwards."""
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
                task.exception()  # marks it as retrieved, or asyncio would log it
        raise cancelled


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end; a cancellation in the meantime is raised afterwards."""
    task = start_task(work, "to-completion")
    await wait_all([task])
    return task.result()


async def _call_one(
    engine_id: str, call: Callable[[], Awaitable[T]], operation: str, budget_s: float
) -> EngineReply[T]:
    clock = asyncio.get_running_loop().time
    started = clock()
    limit = asyncio.timeout(budget_s)
    try:
        with watch_engine(engine_id, operation, budget_s):
            async with limit:
                value = await call()
    except NotEncodable:
        raise
    # BaseException: a call that was cancelled from within must count as failed.
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
        return EngineReply(elapsed, failure=failure)
    return EngineReply(clock() - started, value=value)


async def barrier(
    awaitables: Mapping[str, Awaitable[T]], *, operation: str = "", budget_s: float | None = None
) -> dict[str, T]:
    """Wait for all awaitables and return their results, by name.

    Takes coroutines, tasks and Ray ObjectRefs alike.  All are started before any is awaited, and
    all have ended when this returns or raises.

    Args:
        budget_s: deadline for all, or None if the awaitables have deadlines themselves.

    Raises:
        PhaseTimeout: all failures are missed deadlines; names the late ones.
        Exception: the first other error; the remaining failures are notes on it.
    """
    tasks = {
        name: start_task(_limited(awaitable, budget_s), f"{operation}:{name}")
        for name, awaitable in awaitables.items()
    }
    await wait_all(tasks.values())
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


async def whole_or_none(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all; the first error cancels the others, and is raised when they have ended.

    For parts that are of no use alone, such as the ranks of one engine.
    """

    async def wait(awaitable: Awaitable[T]) -> T:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait(awaitable)) for awaitable in awaitables]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class _Late(Exception):
    """Our deadline has passed; a ``TimeoutError`` may come from the awaitable itself."""


def _limited(awaitable: Awaitable[T], budget_s: float | None) -> Coroutine[Any, Any, T]:
    # A task that is cancelled before it begins closes its own coroutine, and none within that.
    if budget_s is None and asyncio.iscoroutine(awaitable):
        return awaitable
    return _within(awaitable, budget_s)


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
