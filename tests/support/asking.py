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
    answer: Any = "", *, status: int = 200, **options: Any
) -> AsyncIterator[tuple[EngineClient, list[Request]]]:
    """A client of an engine with one reply for everything, and the requests it got."""
    requests: list[Request] = []
    text = answer if isinstance(answer, str) else json.dumps(answer)

    async def handle(request: web.BaseRequest) -> web.Response:
        content = await request.content.read()
        requests.append(Request(request.method, request.path_qs, request.headers, content))
        return web.Response(status=status, text=text)

    async with RawTestServer(handle, host="127.0.0.1") as server:
        assert server.port is not None
        client = EngineClient(Endpoint("127.0.0.1", server.port), **options)
        try:
            yield client, requests
        finally:
            await client.aclose()
