"""Keep-alive connections to one engine.

aiohttp, not httpx: a cycle makes a dozen calls to each engine, and httpx costs about six times the
CPU of aiohttp for each.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from engines.protocol import Endpoint

# Idle connections go before the engine's server closes them (uvicorn: 5 s); a call that meets a
# closing connection fails, and it is unknown whether it was carried out.
_KEEPALIVE_S = 2.0
_FOR_EVER = aiohttp.ClientTimeout(total=None, sock_connect=None)  # every call has its own deadline
_JSON = {"content-type": "application/json"}
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole reply of the engine."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        return HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class _Connector(aiohttp.TCPConnector):
    """Counts as closed when its loop is closed, so a killed loop raises no ResourceWarning."""

    @property
    def closed(self) -> bool:
        return super().closed or self._loop.is_closed()

    def __del__(self, _warnings: Any = warnings) -> None:
        if not self._loop.is_closed():
            super().__del__(_warnings)


class Connections:
    """Keep-alive connections to an engine, opened as they are needed, in any number.

    Belongs to the event loop that first sends.

    Args:
        headers_of: the headers of a call, by its path.

    Raises (all that sends): ``aiohttp.ClientError``, with the reason.
    """

    def __init__(self, endpoint: Endpoint, headers_of: Callable[[str], Mapping[str, str]]) -> None:
        self._url = endpoint.url
        self._headers_of = headers_of
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> HttpReply:
        headers = self._headers_of(path)
        async with self._opened().get(self._url + path, headers=headers) as response:
            return HttpReply(response.status, await response.read())

    async def post(self, path: str, content: bytes) -> HttpReply:
        """POST JSON, and wait for the whole answer."""
        async with self._opened().post(self._url + path, **self._json(path, content)) as response:
            return HttpReply(response.status, await response.read())

    @asynccontextmanager
    async def post_for_stream(
        self, path: str, content: bytes
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """POST JSON; the status, and the pieces of the body as they come.

        Left early, it closes the connection.
        """
        async with self._opened().post(self._url + path, **self._json(path, content)) as response:
            yield response.status, response.content.iter_any()

    def _json(self, path: str, content: bytes) -> dict[str, Any]:
        """How aiohttp is to send JSON."""
        # It writes a body of bytes in one go, and would hold the loop for a large one.
        data = content if len(content) <= _PIECE_BYTES else _pieces(content)
        headers = {**_JSON, "content-length": str(len(content)), **self._headers_of(path)}
        return {"data": data, "headers": headers}

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=_FOR_EVER,
                trust_env=False,
            )
        return self._session


async def _pieces(content: bytes) -> AsyncGenerator[memoryview, None]:
    view = memoryview(content)
    for start in range(0, len(content), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]
