"""Requests of the page to other servers: whole replies, bounded, without redirects."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from rollout.observability.page.outgoing_http import get, outgoing_session

_PART = b"x" * 100_000


@asynccontextmanager
async def other_server() -> AsyncIterator[str]:
    """Its ``/parts`` is a long reply in three parts, ``/elsewhere`` sends the client there."""

    async def parts(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            await response.write(_PART)
        return response

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound("/parts")

    async def key(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("authorization", "none"))

    app = web.Application()
    app.add_routes([web.get("/parts", parts), web.get("/elsewhere", elsewhere)])
    app.add_routes([web.get("/key", key)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_reply_in_parts_is_read_to_its_end() -> None:
    async with other_server() as url, outgoing_session(10) as session:
        assert await get(session, f"{url}/parts", max_bytes=300_000) == 3 * _PART


async def test_a_reply_that_is_too_long_is_refused() -> None:
    async with other_server() as url, outgoing_session(10) as session:
        with pytest.raises(ValueError, match="longer than 299999 bytes"):
            await get(session, f"{url}/parts", max_bytes=299_999)


async def test_a_redirect_is_not_followed() -> None:
    async with other_server() as url, outgoing_session(10) as session:
        with pytest.raises(aiohttp.ClientResponseError, match="302"):
            await get(session, f"{url}/elsewhere", max_bytes=300_000)


async def test_a_key_is_sent_only_if_there_is_one() -> None:
    async with other_server() as url, outgoing_session(10) as session:
        assert await get(session, f"{url}/key", max_bytes=99) == b"none"
        assert await get(session, f"{url}/key", max_bytes=99, key="look") == b"Bearer look"
