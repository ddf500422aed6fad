"""A router over scripted engines.  Every test ends with the check that nothing is in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from engines.protocol import Endpoint
from rollout.config import RouterConfig
from rollout.router import Backend, ConnectionFailure, RouterHost
from rollout.router.proxy import reader_choice

from .stub_engine import Hold, Script, StubEngine, hold_then_reply, reply


def router_config(**fields) -> RouterConfig:
    """Small bounds and short deadlines, and these fields."""
    small = {
        "max_held_requests": 4,
        "hold_timeout_s": 30.0,
        "max_connections": 1000,
        "max_body_bytes": 64 << 20,
        "request_timeout_s": 60.0,
        "tokenizer_path": "/no/tokenizer",  # without it, an engine gets a request for its path
    }
    return RouterConfig(**(small | fields))


@dataclass(frozen=True)
class ClientReply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Bench:
    """A router, its engines and a client."""

    host: RouterHost
    endpoint: Endpoint
    client: aiohttp.ClientSession
    engines: list[StubEngine]
    failures: list[ConnectionFailure] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.endpoint.url

    def member(self, index: int, **fields) -> Backend:
        engine = self.engines[index]
        return Backend(engine.engine_id, engine.endpoint, **fields)

    async def ask(self, path: str = "/generate", method: str = "POST", **options) -> ClientReply:
        """Send a request and return the complete response; the body is a JSON object by default."""
        if method == "POST" and not options:
            options["json"] = {"input_ids": [1, 2, 3]}
        async with self.client.request(method, path, **options) as response:
            return ClientReply(response.status, response.headers, await response.read())

    def begin(self, path: str = "/generate", **options) -> asyncio.Task[ClientReply]:
        return asyncio.ensure_future(self.ask(path, **options))

    async def wait_until_held(self, num: int) -> None:
        while (await self.host.stats())["gate"]["num_held"] != num:
            pass


MakeBench = Callable[..., Awaitable[Bench]]


async def hold_one(
    make_bench: MakeBench, *others: Script
) -> tuple[Bench, Hold, asyncio.Task[ClientReply]]:
    """A bench whose first engine has a request, and replies when ``opened`` is set."""
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), *others)
    pending = bench.begin()
    await hold.entered.wait()
    return bench, hold, pending


@pytest.fixture(autouse=True)
def _saved_every_4_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_choice, "FAILOVER_INTERVAL", 4)


@pytest.fixture
async def make_bench() -> AsyncIterator[MakeBench]:
    benches: list[Bench] = []

    async def make(*scripts: Script | None, config: RouterConfig | None = None) -> Bench:
        """Engines ``e-0``, ``e-1`` ...; None resets connections while heads are read."""
        failures: list[ConnectionFailure] = []
        host = RouterHost(
            config or router_config(),
            on_engine_failure=failures.append,
            run="run",
        )
        engines = [
            StubEngine(f"e-{index}", script or reply(), resets_heads=script is None)
            for index, script in enumerate(scripts)
        ]
        for engine in engines:
            await engine.start()
        endpoint = await host.start()
        client = aiohttp.ClientSession(endpoint.url, auto_decompress=False)
        bench = Bench(host, endpoint, client, engines, failures)
        benches.append(bench)
        await host.set_members(1, [bench.member(index) for index in range(len(engines))])
        await host.set_gate("open", weight_version=7)
        return bench

    yield make
    for bench in benches:
        await bench.client.close()
        try:
            await bench.host.drained(5.0)
            stats = await bench.host.stats()
            assert stats["num_in_flight"] == 0
            assert all(engine["num_in_flight"] == 0 for engine in stats["engines"])
            assert stats["gate"]["num_held"] == 0
        finally:
            await bench.host.stop(0.0)
            for engine in bench.engines:
                await engine.stop()
