"""What a test waits for on an event loop: that something is so, or for ever."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

_POLL_S = 0.005

Found = TypeVar("Found")


async def until(is_so: Callable[[], Found | Awaitable[Found]], timeout_s: float = 60.0) -> Found:
    """Poll ``is_so``, which may be a coroutine function; its first value that is true."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        found = is_so()
        value = await found if inspect.isawaitable(found) else found
        if value:
            return value
        assert loop.time() < deadline, f"it is not so within {timeout_s} s"
        await asyncio.sleep(_POLL_S)


async def until_begun(
    tasks: Iterable[asyncio.Task[Any]], is_so: Callable[[], bool], timeout_s: float = 300.0
) -> None:
    """Poll ``is_so`` while tasks run; raises what one of them raised."""

    def have_begun() -> bool:
        for task in tasks:
            if task.done():
                task.result()
        return is_so()

    await until(have_begun, timeout_s)


async def forever() -> None:
    """Hang until this is cancelled."""
    await asyncio.Event().wait()
