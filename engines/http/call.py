"""One HTTP call to an engine: its clock, its deadline, and the errors it can end in.

Every error names the engine, the operation and the elapsed time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp.http_exceptions import ContentEncodingError

from engines.http.call_watcher import watch_call
from engines.http.connections import HttpReply
from engines.plain_json import WRONG_FORM, read_json
from engines.protocol.errors import (
    EngineHung,
    EngineRejected,
    EngineUnreachable,
    NotEncodable,
)
from engines.protocol.plain_text import describe, one_line, shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that a call may take, by class of call.

    Attributes:
        control_s: continue, abort, versions, and all queries about the engine.
        pause_s: pause; in mode ``abort`` it returns when every request has left.
        flush_margin_s: flush, on top of the time it may wait inside the engine.
        memory_s: release and resume.
        update_s: weight and LoRA updates; not paused, they wait for all requests in flight.
        group_s: making and leaving a weight update group; making one waits for its peers.
        check_s: ``weights_checker``, which reads all weights.
        generate_s: one generation from first byte sent to last byte received.
        ready_s: ``is_ready``, a flag in the engine's front end.
        health_s: ``is_healthy``, which may send a real request.
    """

    control_s: float = 30.0
    pause_s: float = 120.0
    flush_margin_s: float = 15.0
    memory_s: float = 120.0
    update_s: float = 600.0
    group_s: float = 120.0
    check_s: float = 300.0
    generate_s: float = 3600.0
    ready_s: float = 5.0
    health_s: float = 25.0


T = TypeVar("T")

_BODY_CHARACTERS = 500
_WRONG_KEY = (
    " (set engine.key to the key that the engine was started with, and engine.control_key if its "
    "control calls have another)"
)
# Of an error that may quote what the engine sent.
_CAUSE_CHARACTERS = 300


class EngineCall:
    """One call, from its making to its answer.  Its clock starts at once."""

    def __init__(self, engine: str, operation: str, budget_s: float) -> None:
        self.engine = engine
        self.operation = operation
        self.budget_s = budget_s
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def then(self, operation: str) -> EngineCall:
        """What follows the call, with the same clock and deadline."""
        following = EngineCall(self.engine, operation, self.budget_s)
        following._started = self._started
        return following

    def encoded(self, body: Mapping[str, Any]) -> bytes:
        """The body as JSON.

        Raises:
            NotEncodable: JSON cannot express it.
        """
        try:
            # orjson: weights by value are hundreds of megabytes of text, which json escapes slowly.
            return orjson.dumps(body)
        except TypeError as error:
            raise NotEncodable(f"{self.operation} was not sent: {error}") from error

    async def send(self, sending: Awaitable[HttpReply], *, num_bytes: int = 0) -> HttpReply:
        """The reply, within the deadline; reported to the watcher.

        Args:
            num_bytes: size of the body, for the watcher.

        Raises:
            EngineRejected: its status is not 2xx.
        """
        with watch_call(self.engine, self.operation, self.budget_s, num_bytes):
            async with self.bounded():
                answer = await sending
            self.accept(answer)
        return answer

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Limits the block to the rest of the deadline; its failures become engine errors."""
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
            raise self.unreachable(f"connection broke: {_cause(error)}") from error

    def accept(self, answer: HttpReply) -> None:
        """Raises ``EngineRejected`` unless the status is 2xx."""
        if not answer.is_success:
            advice = _WRONG_KEY if answer.status == HTTPStatus.UNAUTHORIZED else ""
            what = f"answered {answer.status}{advice}"
            raise self.rejected(what, status=answer.status, body=answer.text)

    def read(self, answer: HttpReply, read: Callable[[Any], T]) -> T:
        """The result of ``read`` for its JSON; a reply it cannot read is a rejection."""
        return self.read_text(answer, lambda text: read(read_json(text)))

    def read_text(self, answer: HttpReply, read: Callable[[str], T]) -> T:
        """The same for a reply that is not JSON."""
        try:
            return read(answer.text)
        except WRONG_FORM as error:
            what = f"gave an answer that was not understood ({_cause(error)})"
            raise self.rejected(what, status=answer.status, body=answer.text) from error

    def rejected(self, what: str, *, status: int = 0, body: str = "") -> EngineRejected:
        body = shortened(body, _BODY_CHARACTERS)
        text = one_line(body.strip(), _BODY_CHARACTERS)
        ending = f": {text}" if text else ""
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


def _cause(error: Exception) -> str:
    return one_line(describe(error, with_type=True), _CAUSE_CHARACTERS)
