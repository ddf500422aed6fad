"""What a worker refuses before it reads a chat: other workers' sessions, long and slow bodies."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import pytest

from rollout.agents.worker import app as app_module
from rollout.config import AgentsConfig
from rollout.rules.routing import worker_of
from tests.support.agent_workers import worker_of_router

CHAT = "/sessions/s/v1/chat/completions"


async def test_a_session_of_another_worker_is_refused_with_its_number(tmp_path: Path) -> None:
    number = worker_of("s", 3)
    other = (number + 1) % 3
    settings = {"number": other, "num_workers": 3}
    async with (
        worker_of_router("http://127.0.0.1:9", tmp_path, **settings) as url,
        aiohttp.ClientSession(url) as client,
    ):
        for method, path in (("POST", CHAT), ("GET", "/sessions/s"), ("DELETE", "/sessions/s")):
            async with client.request(method, path, json={}) as reply:
                assert reply.status == 421
                assert f"belongs to worker {number}" in (await reply.json())["error"]["message"]
        own = next(f"s{one}" for one in range(99) if worker_of(f"s{one}", 3) == other)
        async with client.get(f"/sessions/{own}") as reply:
            assert reply.status == 404


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_long_is_refused(tmp_path: Path, is_announced: bool) -> None:
    async def parts():
        for _ in range(64):
            yield b"x" * (1 << 10)

    data = b"x" * (64 << 10) if is_announced else parts()
    async with (
        worker_of_router("http://127.0.0.1:9", tmp_path, max_read_bytes=32 << 10) as url,
        aiohttp.ClientSession(url) as client,
        client.post(CHAT, data=data) as reply,
    ):
        assert reply.status == 413
        assert "router.max_read_bytes" in await reply.text()


async def test_a_body_that_stops_ends_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STALLED_S", 0.2)

    async def parts():
        yield b"{"
        await asyncio.Event().wait()

    async with (
        worker_of_router("http://127.0.0.1:9", tmp_path) as url,
        aiohttp.ClientSession(url) as client,
        client.post(CHAT, data=parts()) as reply,
    ):
        assert reply.status == 408


async def test_a_client_that_leaves_within_its_body_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with (
        worker_of_router("http://127.0.0.1:9", tmp_path, AgentsConfig()) as url,
        aiohttp.ClientSession(url) as client,
    ):
        host, port = url.removeprefix("http://").split(":")
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
            writer.write(head.encode() + b"{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        async with client.get("/health") as reply:
            assert reply.status == 200
    assert caplog.records == []
