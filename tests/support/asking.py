"""The client of an engine that answers every call alike."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.test_utils import RawTestServer

from engines.http.client import EngineClient
from engines.protocol import Endpoint


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes


@asynccontextmanager
async def asking(
    answer: Any = "", *, status: int = 200, info: Any = None, **options: Any
) -> AsyncIterator[tuple[EngineClient, list[Request]]]:
    """A client of an engine with one reply for everything, and the requests it got.

    Args:
        info: its reply to ``/server_info``, if that is another one.
    """
    requests: list[Request] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        content = await request.content.read()
        requests.append(Request(request.method, request.path_qs, request.headers, content))
        is_info = info is not None and request.path == "/server_info"
        reply = info if is_info else answer
        text = reply if isinstance(reply, str) else json.dumps(reply)
        return web.Response(status=200 if is_info else status, text=text)

    async with RawTestServer(handle, host="127.0.0.1") as server:
        assert server.port is not None
        client = EngineClient(Endpoint("127.0.0.1", server.port), **options)
        try:
            yield client, requests
        finally:
            await client.aclose()
