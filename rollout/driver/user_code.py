"""Code of the user: hooks, callbacks, sources and clients, which may raise anything, or hang.

Always true: what leaves a block of ``user_code`` is an ``Exception``, or the cancel of the task
that runs it.  So nothing of the user ends the event loop, or looks like a sample that was stopped.
A wait for an async hook ends within its limit, also if the hook swallows its cancel.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from engines.process.background import start_task
from rollout.core.errors import RolloutError
from rollout.core.pending import place_of_error, place_of_task

logger = logging.getLogger(__name__)

_CLEAN_UP_S = 0.5
"""Seconds for which an async hook may go on behind its cancel."""
_CALLED: dict[int, tuple[str, float]] = {}
"""The code of the user that each thread is in, and since when."""


class HookError(RolloutError):
    """What code of the user did wrong, in words; its cause is what was raised, if anything was."""


class HookLate(HookError):
    """Code of the user did not return within its limit."""


class CallEnded(RolloutError):
    """Code of the user has ended the call, with what is the cause of this."""


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """A block that awaits code of the user.

    Args:
        what: its name, for errors.

    Raises:
        CallEnded: it raised ``SystemExit`` or ``KeyboardInterrupt``.
        HookError: it raised ``CancelledError`` of its own, or what else is no ``Exception`` or
            cannot leave a coroutine.
        Exception: it raised this.
    """
    task = _task()
    try:
        yield
    except asyncio.CancelledError as error:
        if task is not None and task.cancelling() > 0:
            raise
        raise HookError(raised_by(what, error)) from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise CallEnded(raised_by(what, error)) from error
    except (StopIteration, StopAsyncIteration) as error:
        raise HookError(raised_by(what, error)) from error
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, GeneratorExit) and _task() is not task:
            raise  # the block itself is closed, not by its task
        raise HookError(raised_by(what, error)) from error


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """A block that calls code of the user and awaits nothing.  Raises as ``errors_of``."""
    thread = threading.get_ident()
    outer = _CALLED.get(thread)
    _CALLED[thread] = (what, time.monotonic())
    try:
        with errors_of(what):
            yield
    finally:
        if outer is None:
            del _CALLED[thread]
        else:
            _CALLED[thread] = outer


@contextmanager
def callback(what: str) -> Iterator[None]:
    """A block that calls code of the user whose errors all end the call, but for ours.

    Raises:
        CallEnded: it raised something.
        RolloutError: it raised this.
    """
    try:
        with user_code(what):
            yield
    except HookError as error:
        raise CallEnded(str(error)) from original(error)
    except RolloutError:
        raise
    except Exception as error:
        raise CallEnded(raised_by(what, error)) from error


def result_now(what: str, hook: Callable[..., Any], *of: Any) -> Any:
    """What a hook returns that cannot be async.

    Raises:
        HookError: it is async.
    """
    with user_code(what):
        result = hook(*of)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise HookError(f"{what} is async, and must be a plain function{_where(hook)}")
    return result


async def result_of(
    what: str, hook: Callable[..., Any], *of: Any, limit_s: float | None = None, **more: Any
) -> Any:
    """What a hook returns, sync or async.

    A coroutine runs in a task of its own, so that it can cancel no other.  Raises as ``errors_of``.

    Args:
        limit_s: seconds for an async hook, or None for no limit.

    Raises:
        HookLate: it did not return within its limit.
    """
    with user_code(what):
        result = hook(*of, **more)
    if not inspect.isawaitable(result):
        return result
    task = start_task(_awaited(what, result), what)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        await _end(what, task)
        if inspect.iscoroutine(result) and task.done():
            result.close()  # a task that is cancelled before its first step leaves it
        raise
    if not done:
        await _end(what, task)
        raise HookLate(f"{what} did not return within its limit of {limit_s:g} s{_where(hook)}")
    with errors_of(what):
        return task.result()


async def _awaited(what: str, result: Awaitable[Any]) -> Any:
    with errors_of(what):
        return await result


async def _end(what: str, task: asyncio.Task[Any]) -> None:
    """Cancel a hook, and let it clean up for a moment."""
    task.cancel()
    await asyncio.wait({task}, timeout=_CLEAN_UP_S)
    task.add_done_callback(_read)
    if not task.done():
        logger.error("%s goes on though it was cancelled, %s", what, place_of_task(task))


def _read(task: asyncio.Task[Any]) -> None:
    """Take the error of a hook that ended behind its limit; asyncio would log it."""
    if not task.cancelled():
        task.exception()


def wrong_result(what: str, hook: Callable[..., Any], value: Any, wanted: str) -> HookError:
    """An error for what a hook returned."""
    return HookError(f"{what} returned {value!r:.80}, and must return {wanted}{_where(hook)}")


def original(error: BaseException) -> BaseException:
    """What code of the user has raised; the error itself if it raised nothing."""
    cause = error.__cause__
    return cause if isinstance(error, HookError) and cause is not None else error


def raised_by(what: str, error: BaseException) -> str:
    """The error in words, with its file and line: the last that is of no library."""
    if isinstance(error, HookError):
        return str(error)
    place = place_of_error(error)
    return f"{what} raised {error!r}{f' at {place}' if place else ''}"


def called_in(thread: int) -> tuple[str, float] | None:
    """Which code of the user a thread is in, and since when, by ``time.monotonic``."""
    return _CALLED.get(thread)


def _where(hook: Callable[..., Any]) -> str:
    """Where a hook is defined."""
    while isinstance(hook, partial):
        hook = hook.func
    hook = inspect.unwrap(hook)
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
