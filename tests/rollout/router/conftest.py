"""A router over scripted engines.  Every test ends with the proof that nothing is in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from engines.protocol import Endpoint
from rollout.router import ConnectionFailure, Member, RouterHost

from .stub_engine import Script, StubEngine, reply


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 0
    max_held_requests: int = 4
    hold_timeout_s: float = 30.0
    connect_timeout_s: float = 5.0
    max_connections: int = 1000
    max_body_bytes: int = 64 << 20
    request_timeout_s: float = 60.0
    policy: str = "least_in_flight"
    session_ttl_s: float = 3600.0
    max_sessions: int = 1000
    token_failover: str = "asked"
    failover_interval: int = 4
    max_failovers: int = 8
    client_key: str = ""
    control_key: str = ""
    max_recorded_bytes: int = 1 << 20


@dataclass(frozen=True)
class Answer:
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

    def member(self, index: int, **fields) -> Member:
        engine = self.engines[index]
        return Member(engine.engine_id, engine.endpoint, **fields)

    async def ask(self, path: str = "/generate", method: str = "POST", **options) -> Answer:
        """One request and its whole answer; a JSON object as body unless told otherwise."""
        if method == "POST" and not options:
            options["json"] = {"input_ids": [1, 2, 3]}
        async with self.client.request(method, path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    def begin(self, path: str = "/generate", **options) -> asyncio.Task[Answer]:
        return asyncio.ensure_future(self.ask(path, **options))

    async def wait_until_held(self, num: int) -> None:
        while (await self.host.stats())["gate"]["num_held"] != num:
            pass


MakeBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def make_bench() -> AsyncIterator[MakeBench]:
    benches: list[Bench] = []

    async def make(*scripts: Script | None, settings: Settings | None = None) -> Bench:
        """Engines ``e-0``, ``e-1`` ...; None resets connections while heads are read."""
        failures: list[ConnectionFailure] = []
        host = RouterHost(settings or Settings(), on_engine_failure=failures.append)
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
