"""A lock that runs one command at a time and names the command that holds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.core.errors import LifecycleError


class CommandLock:
    """A lock that knows which command holds it and since when.

    Args:
        timeout_s: how long a command waits for the command before it.

    Attributes:
        owner: the command that holds it, or empty if none does.
        why_ended: why no other command begins any more.
        opened: commands begin; until then they wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._since = 0.0
        self.owner = ""
        self.why_ended = ""
        self.opened = asyncio.Event()
        self.opened.set()

    @asynccontextmanager
    async def held(self, command: str) -> AsyncIterator[None]:
        """Hold the lock for ``command``.

        Raises:
            LifecycleError: the command before it did not end in time; the message names it.  Or no
                command begins any more.
        """
        clock = asyncio.get_running_loop().time
        self._check_begins(command)  # also while the command before it hangs
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.opened.wait()
                await self._lock.acquire()
        except TimeoutError:
            raise LifecycleError(
                f"cannot {command}: {self.owner} has been running for "
                f"{clock() - self._since:.0f} s",
                command=command,
                phase=self.owner,
            ) from None
        self.owner, self._since = command, clock()
        try:
            self._check_begins(command)
            yield
        finally:
            self.owner = ""
            self._lock.release()

    def _check_begins(self, command: str) -> None:
        if self.why_ended:
            raise LifecycleError(f"cannot {command}: {self.why_ended}", command=command)
