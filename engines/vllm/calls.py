"""How a call to a vLLM server is made, whatever its endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from engines.http.call import Deadlines, EngineCall
from engines.http.connections import Connections, HttpReply
from engines.protocol import Endpoint
from engines.protocol.errors import EngineRejected
from engines.vllm.routes import OF_DEV_MODE, RPC

T = TypeVar("T")
# After a 500 the server closes a kept connection without saying so: the next call would break, and
# it would be unknown whether it was carried out.
_NOT_KEPT = {"Connection": "close"}
_NOT_FOUND, _FORBIDDEN, NOT_SUPPORTED = 404, 403, 501


class Wire(Protocol):
    """What carries requests to one server: ``Connections``, or a test's own."""

    async def get(self, path: str) -> HttpReply: ...
    async def post(self, path: str, content: bytes) -> HttpReply: ...
    def post_for_stream(
        self, path: str, content: bytes
    ) -> AbstractAsyncContextManager[tuple[int, AsyncIterator[bytes]]]: ...
    async def aclose(self) -> None: ...


class VllmCalls:
    """Base of the client: requests with a deadline, whose failures name engine and operation.

    Args:
        engine_id: names the engine in errors; its URL does where there is none.
        wire: carries the requests; HTTP without one.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        engine_id: str = "",
        deadlines: Deadlines,
        wire: Wire | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.engine_id = engine_id
        self.deadlines = deadlines
        self._engine = engine_id or endpoint.url
        self._control: Wire = wire or Connections(endpoint, _NOT_KEPT)
        # A probe must not wait behind the calls whose engine it checks: it has its own connections.
        self._probes: Wire = wire or Connections(endpoint, _NOT_KEPT)

    async def aclose(self) -> None:
        await self._control.aclose()
        if self._probes is not self._control:
            await self._probes.aclose()

    def _call(self, operation: str, budget_s: float) -> EngineCall:
        return EngineCall(self._engine, operation, budget_s)

    async def _ask(
        self, operation: str, path: str, read: Callable[[Any], T], budget_s: float | None = None
    ) -> T:
        call = self._call(operation, budget_s or self.deadlines.control_s)
        try:
            answer = await call.send(self._control.get(path))
        except EngineRejected as error:
            raise explained(error, path) from None
        return call.read(answer, read)

    async def _post(
        self, operation: str, path: str, body: Mapping[str, Any] | None, budget_s: float
    ) -> tuple[EngineCall, HttpReply]:
        """POST, and wait for a 2xx."""
        call = self._call(operation, budget_s)
        content = call.encoded(body or {})
        try:
            sending = self._control.post(path, content)
            return call, await call.send(sending, num_bytes=len(content))
        except EngineRejected as error:
            raise explained(error, path) from None

    async def _rpc(
        self,
        operation: str,
        method: str,
        read: Callable[[Any], T],
        arguments: Mapping[str, Any] = MappingProxyType({}),
        budget_s: float | None = None,
    ) -> T:
        """Call a method of the plugin in every worker."""
        body = {"method": method, "args": [], "kwargs": dict(arguments)}
        budget_s = budget_s or self.deadlines.check_s
        call, answer = await self._post(operation, RPC, body, budget_s)
        return call.read(answer, read)

    def _unsupported(self, operation: str, why: str) -> EngineRejected:
        return self._call(operation, 0.0).rejected(
            "is not supported", status=NOT_SUPPORTED, body=why
        )


def explained(error: EngineRejected, path: str) -> EngineRejected:
    """The error, with what would help where an endpoint is missing."""
    path = path.partition("?")[0]
    if error.status == _NOT_FOUND and path in OF_DEV_MODE:
        advice = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
    elif error.status == _FORBIDDEN and path.startswith("/inference/"):
        advice = "start vLLM with --enable-scale-out"
    else:
        return error
    return EngineRejected(
        f"{error}; {advice}",
        engine=error.engine,
        operation=error.operation,
        status=error.status,
        body=error.body,
    )
