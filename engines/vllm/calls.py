"""How a call to a vLLM server is made, whatever its endpoint, and what the server is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from engines.http.call import EngineCall
from engines.http.connections import HttpReply
from engines.http.http_calls import HttpCalls
from engines.protocol import ServerInfo
from engines.protocol.errors import EngineRejected
from engines.vllm import routes, vllm_json
from engines.vllm.server_report import (
    METHODS_OF_PLUGIN,
    has_plugin,
    info_with_state,
    read_server_info,
)

T = TypeVar("T")
_NOT_FOUND, _FORBIDDEN = 404, 403


class VllmCalls(HttpCalls):
    """Requests whose failures say what is missing, calls of the plugin, and the server's report."""

    # After a 500 the server closes a kept connection without saying so: the next call would break,
    # and it would be unknown whether it was carried out.
    headers: Mapping[str, str] = {"Connection": "close"}
    _info: ServerInfo | None = None  # as it was reported last

    async def ask(self, operation: str, path: str, read: Callable[[Any], T]) -> T:
        try:
            return await super().ask(operation, path, read)
        except EngineRejected as error:
            raise explained(error, path) from None

    async def post(
        self, operation: str, path: str, body: Mapping[str, Any], budget_s: float
    ) -> tuple[EngineCall, HttpReply]:
        try:
            return await super().post(operation, path, body, budget_s)
        except EngineRejected as error:
            raise explained(error, path) from None

    async def rpc(
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
        call, answer = await self.post(operation, routes.RPC, body, budget_s)
        return call.read(answer, read)

    async def act(
        self, operation: str, what: str, arguments: Mapping[str, Any], budget_s: float
    ) -> None:
        """Call a method of the plugin that returns its errors.

        Raises:
            EngineRejected: a worker has returned one.
        """
        method, read = METHODS_OF_PLUGIN[what], vllm_json.read_errors
        if errors := await self.rpc(operation, method, read, arguments, budget_s):
            raise self.call(operation, 0.0).rejected("failed", status=400, body="; ".join(errors))

    async def weight_version(self) -> str:
        return await self.ask(
            "weight_version", routes.WEIGHT_INFO, lambda answer: str(answer["weight_version"])
        )

    async def server_info(self) -> ServerInfo:
        version = await self.ask(
            "server_info", routes.VERSION, lambda answer: str(answer["version"])
        )
        info = await self._front_info("server_info", version)
        if has_plugin(info):
            method = METHODS_OF_PLUGIN["state"]
            info = await self.rpc("server_info", method, info_with_state(info))
        self._info = info
        return info

    async def process_start(self) -> str:
        """From its front end, which answers while a worker computes."""
        return (await self._front_info("process_start", "")).start

    async def _front_info(self, operation: str, version: str) -> ServerInfo:
        path = f"{routes.SERVER_INFO}?config_format=json"
        return await self.ask(operation, path, lambda answer: read_server_info(version, answer))

    async def known_info(self) -> ServerInfo:
        """The report that came last; the first one is fetched."""
        return self._info or await self.server_info()


def explained(error: EngineRejected, path: str) -> EngineRejected:
    """The error, with what would help where an endpoint is missing."""
    path = path.partition("?")[0]
    if error.status == _NOT_FOUND and path in routes.OF_DEV_MODE:
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
