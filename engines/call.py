"""One HTTP call to an engine: its clock, its deadline, and the errors it can end in.

Every error says which engine, which operation, and after how long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError

from engines.errors import EngineHung, EngineRejected, EngineUnreachable
from engines.http import Answer
from engines.observe import watched

T = TypeVar("T")

_BODY_CHARACTERS = 500


class Call:
    """One call, from its making to its answer.  Its clock starts at once."""

    def __init__(self, engine: str, operation: str, budget_s: float) -> None:
        self.engine = engine
        self.operation = operation
        self.budget_s = budget_s
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    async def send(self, sending: Awaitable[Answer], *, num_bytes: int = 0) -> Answer:
        """The answer, within the deadline; told to whoever watches.

        Args:
            num_bytes: what is sent, for whoever watches.

        Raises:
            EngineRejected: its status is not 2xx.
        """
        with watched(self.engine, self.operation, self.budget_s) as seen:
            seen.num_bytes = num_bytes
            async with self.bounded():
                answer = await sending
            self.accept(answer)
        return answer

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Keeps what is awaited inside to what is left of the deadline, and names its failures."""
        try:
            async with asyncio.timeout(self.budget_s - self.elapsed_s) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise EngineHung(
                f"engine {self.engine}: {self.operation} took longer than {self.budget_s:g} s",
                engine=self.engine,
                operation=self.operation,
                budget_s=self.budget_s,
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise self.unreachable(f"cannot connect: {error}", maybe_executed=False) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, ContentEncodingError):
                raise self.rejected(f"sent an unreadable body: {error.__cause__}") from error
            raise self.unreachable(f"connection broke: {_describe(error)}") from error

    def accept(self, answer: Answer) -> None:
        """Raises ``EngineRejected`` unless the status is 2xx."""
        if not answer.is_success:
            raise self.rejected(f"answered {answer.status}", status=answer.status, body=answer.text)

    def read(self, answer: Answer, read: Callable[[Any], T]) -> T:
        """What ``read`` makes of its JSON; an answer it does not understand is a rejection."""
        try:
            return read(answer.json())
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            what = f"gave an answer that was not understood ({_describe(error)})"
            raise self.rejected(what, status=answer.status, body=answer.text) from error

    def rejected(self, what: str, *, status: int = 0, body: str = "") -> EngineRejected:
        if len(body) > _BODY_CHARACTERS:
            body = body[:_BODY_CHARACTERS] + "..."
        ending = f": {body.strip()}" if body.strip() else ""
        return EngineRejected(
            f"{self._prefix} {what} after {self.elapsed_s:.1f} s{ending}",
            engine=self.engine,
            operation=self.operation,
            status=status,
            body=body,
        )

    def unreachable(self, what: str, *, maybe_executed: bool = True) -> EngineUnreachable:
        return EngineUnreachable(
            f"{self._prefix} {what} (after {self.elapsed_s:.1f} s)",
            engine=self.engine,
            operation=self.operation,
            maybe_executed=maybe_executed,
        )

    @property
    def _prefix(self) -> str:
        return f"engine {self.engine}: {self.operation}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
