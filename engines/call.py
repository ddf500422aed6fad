"""One HTTP call to an engine: its clock, its deadline, and the errors it can end in.

Every error says which engine, which operation, and after how long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx

from engines.errors import EngineHung, EngineRejected, EngineUnreachable
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

    async def send(self, sending: Awaitable[httpx.Response]) -> httpx.Response:
        """The answer, within the deadline; told to whoever watches.

        Raises:
            EngineRejected: its status is not 2xx.
        """
        with watched(self.engine, self.operation, self.budget_s) as seen:
            async with self.bounded():
                response = await sending
            seen.num_bytes = int(response.request.headers.get("content-length", 0))
            self.accept(response)
        return response

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
        except httpx.ConnectError as error:
            raise self.unreachable(f"cannot connect: {error}", maybe_executed=False) from error
        except httpx.TransportError as error:
            raise self.unreachable(f"connection broke: {_describe(error)}") from error
        except httpx.DecodingError as error:
            raise self.rejected(f"sent an unreadable body: {error}") from error

    def accept(self, response: httpx.Response) -> None:
        """Raises ``EngineRejected`` unless the status is 2xx."""
        if not response.is_success:
            raise self.rejected(
                f"answered {response.status_code}", status=response.status_code, body=response.text
            )

    def read(self, response: httpx.Response, read: Callable[[httpx.Response], T]) -> T:
        """``read(response)``; an answer it does not understand is a rejection."""
        return self.understand(lambda: read(response), response.status_code, response.text)

    def understand(self, read: Callable[[], T], status: int, body: str) -> T:
        try:
            return read()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            what = f"gave an answer that was not understood ({_describe(error)})"
            raise self.rejected(what, status=status, body=body) from error

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
