"""Questions the router itself asks engines, over a client that shares nothing with generation.

A busy data path never delays a probe or an abort, and a stuck engine never fills its pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict

from engines.errors import EngineUnreachable
from rollout.router.headers import Headers, to_client
from rollout.router.upstream import describe
from rollout.routing import Member

_LOST = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class ControlReply:
    """An engine's whole answer, and its headers as they go to a client."""

    status: int
    headers: Headers
    body: bytes


class ControlClient:
    """Asks one engine one thing.

    Args:
        connect_timeout_s: until the connection stands.
        total_timeout_s: until the last byte.
    """

    def __init__(self, *, connect_timeout_s: float, total_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=total_timeout_s, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, member: Member, method: str, path: str, body: bytes = b"") -> ControlReply:
        """Ask and wait for the whole answer, whatever its status.

        Raises:
            EngineUnreachable: no whole answer within the deadline.
        """
        assert self._session is not None, "ask before open"
        headers = CIMultiDict({"content-type": "application/json"} if body else {})
        try:
            async with self._session.request(
                method,
                member.endpoint.url + path,
                headers=headers,
                data=body or None,
                allow_redirects=False,
            ) as response:
                whole = await response.read()
        except _LOST as error:
            raise EngineUnreachable(
                describe(error), engine=member.engine_id, operation=path
            ) from error
        lowered = [
            (name.lower(), value)
            for name, value in response.raw_headers
            if name.lower() != b"content-length"
        ]
        kept = to_client(lowered, member.engine_id, None)
        return ControlReply(response.status, kept, whole)
