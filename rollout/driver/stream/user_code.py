"""Code of the user: hooks, callbacks and sources, which may raise anything.

Always true: what leaves a block of ``user_code`` is an ``Exception``, or the cancel of the task
that runs it.  So nothing of the user ends the event loop, or looks like a sample that was stopped.
"""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.process.background import start_task
from rollout.core.errors import RolloutError

_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
)


class HookCancelled(RolloutError):
    """Code of the user raised ``CancelledError``, its cause, though its task was not cancelled."""


class CallEnded(RolloutError):
    """Code of the user has ended the call, with what is the cause of this."""


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """A block that calls code of the user.

    Args:
        what: its name, for errors.

    Raises:
        CallEnded: it raised ``SystemExit`` or ``KeyboardInterrupt``.
        HookCancelled: it raised ``CancelledError`` of its own.
        Exception: it raised this.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise HookCancelled(raised_by(what, error)) from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise CallEnded(raised_by(what, error)) from error


@contextmanager
def callback(what: str) -> Iterator[None]:
    """A block that calls a callback of the user, whose errors all end the call.

    Raises:
        CallEnded: it raised something.
    """
    try:
        with user_code(what):
            yield
    except CallEnded:
        raise
    except Exception as error:
        raised = original(error)
        raise CallEnded(raised_by(what, raised)) from raised


async def result_of(what: str, call: Callable[[], Any]) -> Any:
    """What a hook returns, sync or async.

    A coroutine runs in a task of its own, so that it can cancel no other.  Raises as ``user_code``.
    """
    with user_code(what):
        result = call()
        if not inspect.isawaitable(result):
            return result
        return await start_task(_awaited(what, result), what)


async def _awaited(what: str, result: Awaitable[Any]) -> Any:
    with user_code(what):
        return await result


def original(error: Exception) -> BaseException:
    """What code of the user has raised."""
    cause = error.__cause__
    return cause if isinstance(error, HookCancelled) and cause is not None else error


def raised_by(what: str, error: BaseException) -> str:
    """The error in words, with its file and line: the last that is of no library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return f"{what} raised {error!r}{place}"


def _is_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0
