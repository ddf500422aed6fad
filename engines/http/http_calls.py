"""How a client of any kind makes its calls: one is sent, its reply read, a stream followed.

A client has a ``HttpCalls`` and hands it to its parts.  Always true: a call ends within its
deadline, with a reply or with an ``EngineError`` that names engine and operation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from engines.http.call import Deadlines, EngineCall
from engines.http.connections import Connections, HttpReply
from engines.http.key_check import is_control
from engines.http.sglang_json import DONE, sse_payloads
from engines.protocol import NO_ACCESS, Endpoint, EngineAccess

T = TypeVar("T")

DEFAULT_DEADLINES = Deadlines()


class Wire(Protocol):
    """What carries requests to one server: ``Connections``, or a test's own."""

    async def get(self, path: str) -> HttpReply: ...
    async def post(self, path: str, content: bytes) -> HttpReply: ...
    def post_for_stream(
        self, path: str, content: bytes
    ) -> AbstractAsyncContextManager[tuple[int, AsyncIterator[bytes]]]: ...
    async def aclose(self) -> None: ...


class HttpCalls:
    """The calls of one client, over the connections that it has.

    Belongs to the event loop that first uses it.

    Args:
        engine_id: names the engine in errors; its URL does where there is none.
        wire: carries the requests; HTTP without one.
    """

    headers: Mapping[str, str] = {}

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        engine_id: str = "",
        deadlines: Deadlines = DEFAULT_DEADLINES,
        wire: Wire | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.engine_id = engine_id
        self.deadlines = deadlines
        self._access = NO_ACCESS
        self.control: Wire = wire or Connections(endpoint, self._headers_of)
        # A probe must not wait behind the calls whose engine it checks: it has its own connections.
        self.probes: Wire = wire or Connections(endpoint, self._headers_of)

    def authorize(self, access: EngineAccess) -> None:
        """From now on calls carry this."""
        self._access = access

    def _headers_of(self, path: str) -> Mapping[str, str]:
        is_change = is_control(path.partition("?")[0])
        return {**self.headers, **self._access.headers(is_control=is_change)}

    async def aclose(self) -> None:
        await self.control.aclose()
        if self.probes is not self.control:
            await self.probes.aclose()

    def call(self, operation: str, budget_s: float) -> EngineCall:
        return EngineCall(self.engine_id or self.endpoint.url, operation, budget_s)

    async def post(
        self, operation: str, path: str, body: Mapping[str, Any], budget_s: float
    ) -> tuple[EngineCall, HttpReply]:
        """POST, and wait for a 2xx."""
        call = self.call(operation, budget_s)
        content = call.encoded(body)
        sending = self.control.post(path, content)
        return call, await call.send(sending, num_bytes=len(content))

    async def ask(self, operation: str, path: str, read: Callable[[Any], T]) -> T:
        """GET, and read the JSON of the reply."""
        call = self.call(operation, self.deadlines.control_s)
        return call.read(await call.send(self.control.get(path)), read)

    async def probe(self, operation: str, path: str, budget_s: float) -> bool:
        """Whether the reply is a 2xx, not a 503."""
        call = self.call(operation, budget_s)
        async with call.bounded():
            answer = await self.probes.get(path)
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return False
        call.accept(answer)
        return True

    async def stream(
        self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]
    ) -> AsyncGenerator[T, None]:
        """POST a generation, and read each event.  Closed early, it closes the connection."""
        call = self.call("generate", self.deadlines.generate_s)
        content = call.encoded({**body, "stream": True})
        async with AsyncExitStack() as stack:
            async with call.bounded():
                status, pieces = await stack.enter_async_context(
                    self.control.post_for_stream(path, content)
                )
                if status != HTTPStatus.OK:
                    call.accept(HttpReply(status, b"".join([piece async for piece in pieces])))
            payloads = await stack.enter_async_context(aclosing(sse_payloads(pieces)))
            # Bounded piece by piece: the deadline must not expire in the consumer's code.
            while (payload := await _next(call, payloads)) != DONE:
                yield _read_event(call, payload, read)


async def _next(call: EngineCall, payloads: AsyncGenerator[bytes, None]) -> bytes:
    async with call.bounded():
        payload = await anext(payloads, None)
    if payload is None:
        raise call.unreachable("its stream ended before [DONE]")
    return payload


def _read_event(call: EngineCall, payload: bytes, read: Callable[[Any], T]) -> T:
    answer = HttpReply(HTTPStatus.OK, payload)

    def read_event(event: Any) -> T:
        if isinstance(event, dict) and "error" in event:
            error = event["error"]
            status = error.get("code") if isinstance(error, dict) else None
            raise call.rejected(
                "failed while streaming",
                status=status if isinstance(status, int) else HTTPStatus.OK,
                body=answer.text,
            )
        return read(event)

    return call.read(answer, read_event)
