"""The way to engines over aiohttp's client.

It decodes nothing, follows nothing and remembers no cookies.  Connections are kept for less time
than SGLang keeps its side (5 s), so that an idle connection is not closed under a new request.
"""

from __future__ import annotations

import io
import re

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from engines.errors import EngineUnreachable
from engines.protocol import Endpoint
from rollout.router.headers import Headers
from rollout.router.transport import Request

KEEPALIVE_S = 4.0
_MAX_HEAD_BYTES = 1 << 16
_CHUNKED_FROM_BYTES = 1 << 20
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NEVER_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_LOST = (aiohttp.ClientError, OSError, TimeoutError)


class UpstreamReply:
    """An answer whose body is read as it comes."""

    __slots__ = ("_content", "_engine_id", "_response", "headers", "status")

    def __init__(self, engine_id: str, response: aiohttp.ClientResponse) -> None:
        self._engine_id = engine_id
        self._response = response
        self._content = response.content
        self.status = response.status
        self.headers = response.raw_headers

    @property
    def is_at_end(self) -> bool:
        return self._content.at_eof()

    async def read(self) -> bytes:
        try:
            return await self._content.readany()
        except _LOST as error:
            raise EngineUnreachable(
                f"broke off its reply: {describe(error)}", engine=self._engine_id
            ) from error

    def close(self) -> None:
        self._response.close()


class Upstream:
    """A pool of connections to engines.

    Args:
        connect_timeout_s: until the connection stands.
        total_timeout_s: until the last byte; None for generation, which may take hours.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        max_connections: int,
        total_timeout_s: float | None = None,
    ) -> None:
        self._max_connections = max_connections
        self._timeout = aiohttp.ClientTimeout(total=total_timeout_s, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._max_connections,
                keepalive_timeout=KEEPALIVE_S,
                use_dns_cache=True,
            ),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=_MAX_HEAD_BYTES,
            max_field_size=_MAX_HEAD_BYTES,
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, engine_id: str, endpoint: Endpoint, request: Request, body: bytes
    ) -> UpstreamReply:
        assert self._session is not None, "send before open"
        try:
            response = await self._session.request(
                request.method,
                URL(endpoint.url + request.target, encoded=True),
                headers=_as_text(request.headers),
                data=io.BytesIO(body) if len(body) > _CHUNKED_FROM_BYTES else body or None,
                allow_redirects=False,
            )
        except _LOST as error:
            raise EngineUnreachable(
                describe(error),
                engine=engine_id,
                operation=request.target,
                maybe_executed=not isinstance(error, _NEVER_CONNECTED),
            ) from error
        if problem := _problem(response):
            response.close()
            raise EngineUnreachable(problem, engine=engine_id, operation=request.target)
        return UpstreamReply(engine_id, response)


def _problem(response: aiohttp.ClientResponse) -> str:
    """Why a head that aiohttp's lenient parser took cannot be passed on; empty if it can."""
    if not 200 <= response.status <= 599:
        return f"answered with status {response.status}"
    if _CONTROL.search(b"".join([value for _, value in response.raw_headers])):
        return "answered with control characters in a header"
    return ""


def _as_text(headers: Headers) -> CIMultiDict[str]:
    text: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        try:
            text.add(name.decode("ascii"), value.decode())
        except UnicodeDecodeError:
            text.add(name.decode("latin-1"), value.decode("latin-1"))
    return text


def describe(error: BaseException) -> str:
    """The error in words; several of them print as nothing."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
