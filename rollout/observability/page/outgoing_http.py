"""Requests of the page to engines, to its router and to the pages of other servers.

Always true: each has a deadline, follows no redirect, sends no cookie, and reads a bounded reply.
"""

from __future__ import annotations

import aiohttp

_PART_BYTES = 64 << 10


def outgoing_session(timeout_s: float) -> aiohttp.ClientSession:
    """A session whose requests end within ``timeout_s``, the reply included."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def get(session: aiohttp.ClientSession, url: str, *, max_bytes: int, key: str = "") -> bytes:
    """The body of a reply with status 200; ``key`` is sent as a bearer token.

    Raises:
        aiohttp.ClientError, TimeoutError: there is no such reply.
        ValueError: it is longer than ``max_bytes``.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        if response.status != 200:
            raise aiohttp.ClientResponseError(
                response.request_info, (), status=response.status, message=response.reason or ""
            )
        body = b""
        async for part in response.content.iter_chunked(_PART_BYTES):
            body += part
            if len(body) > max_bytes:
                raise ValueError(f"{url}: the reply is longer than {max_bytes} bytes")
        return body
