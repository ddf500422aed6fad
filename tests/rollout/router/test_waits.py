"""No client waits for another: every route gets its largest inputs while a heartbeat beats.

The router is a process of its own, whose event loop beats every 2 ms (``measured_waits``).

Scaled for CI: 64 MiB for the longest body that is not read (256 MiB by default).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from benchmarks.router.agents import corpus
from rollout.router.control_api import control_app
from rollout.router.http.routes import GENERATION_PATHS, PINS_PATH
from tests.rollout.router.exchange_rig import rig_of
from tests.rollout.router.router_process import RouterProcess
from tests.rollout.router.stub_engine import STREAM, Connection, Seen, StubEngine, chunk
from tests.support.measured_waits import Waits, events_of, measuring

pytestmark = [pytest.mark.clock, pytest.mark.slow]

NUM_TOKENS = 65_536
LONG, READ = 64 << 20, 7 << 20
WHOLE = json.dumps({"text": "ok", "choices": []}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@asynccontextmanager
async def waits() -> AsyncIterator[Waits]:
    """A router with two engines."""

    async def serve(connection: Connection, seen: Seen) -> None:
        if b'"stream":true' not in seen.body[:2000] + seen.body[-2000:]:
            await connection.send(HEAD % len(WHOLE), WHOLE)
            return
        await connection.send(STREAM, *it.events)
        await connection.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    engines = [StubEngine(f"e-{number}", serve) for number in range(2)]
    for engine in engines:
        await engine.start()
    config = {
        "max_held_requests": 4096,
        "max_body_bytes": LONG + 1024,
        "request_timeout_s": 300.0,
        "hold_timeout_s": 300.0,
    }
    try:
        async with RouterProcess(**config) as router:
            ports = [[number, engine.endpoint.port] for number, engine in enumerate(engines)]
            await router.call("members", 1, ports)
            await router.call("gate", "open")
            async with measuring(router) as it:
                it.events = events_of("an answer of some words. " * 8, 4)
                yield it
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.timeout(400)
async def test_no_client_waits_for_another() -> None:
    text = corpus()
    async with waits() as it:
        await it.step("nothing", asyncio.sleep(0.5))
        await check_routes(it, text)
        await check_long_answers(it)
        await check_held_requests(it)
        assert it.unmeasured(app_of_router(), GENERATION_PATHS) == []


def app_of_router() -> FastAPI:
    return control_app(rig_of("a").proxy, connect_timeout_s=1.0)


async def test_a_route_without_a_step_is_found() -> None:
    async with waits() as it:
        await it.get("/engines")
        unmeasured = it.unmeasured(app_of_router(), ["/generate"])
    assert "/figures" in unmeasured
    assert "/generate" in unmeasured
    assert "/engines" not in unmeasured


async def check_routes(it: Waits, text: str) -> None:
    """Every route with its longest body, of each form that the router reads."""
    body = b'{"x": "%s"}' % (b"x" * READ)

    async def every_path() -> set[int]:
        return {await it.post(path, body) for path in sorted(GENERATION_PATHS)}

    assert await it.step("every path", every_path()) == {200, 404}
    await it.step("/v1/score, not read", it.post("/v1/score", b"x" * LONG))
    names = b'"rid":1,' * (LONG >> 3)
    await it.step("/v1/score, names", it.post("/v1/score", names))
    await it.step("/generate, not read", it.post("/generate", b'{"x": "%s"}' % (b"x" * LONG)))
    long = (text * (READ // len(text) + 1))[: READ - (READ >> 4)]
    ids = b"[%s1]" % (b"1234, " * (READ // 6))
    messages = [{"role": "user", "content": long[at : at + 7000]} for at in range(0, READ, 7000)]
    many = [{"role": "user", "content": ""}] * (READ // 36)
    image = {"type": "image_url", "image_url": {"url": "data:" + "a" * READ}}
    bodies: dict[str, tuple[str, bytes | dict[str, Any]]] = {
        "/generate, ids": ("/generate", b'{"input_ids": %s, "stream": true}' % ids),
        "/generate, text": ("/generate", {"text": long}),
        "/v1/completions, ids": ("/v1/completions", b'{"prompt": %s}' % ids),
        "/v1/completions, text": ("/v1/completions", {"prompt": long}),
        "chat of long messages": ("/v1/chat/completions", {"messages": messages}),
        "chat of many messages": ("/v1/chat/completions", {"messages": many}),
        "chat with an image": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [image]}]},
        ),
    }
    for name, (path, body) in bodies.items():
        await it.step(name, it.post(path, body))
    for path in ("/health", "/ready", "/engines", "/metrics"):
        assert await it.step(f"GET {path}", it.get(path)) == 200
    for path in ("/v1/models", "/model_info", "/get_model_info", "/engines/e-0/loads"):
        await it.step(f"GET {path}", it.get(path))
    for path in ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"):
        await it.step(f"GET {path}", it.get(path))
    chat = "/sessions/a/v1/chat/completions"
    assert await it.step("a session", it.post(chat, {"messages": messages})) in (404, 413)
    name = b'{"lora_path": "%s"}' % (b"x" * READ)
    await it.step(f"POST {PINS_PATH}", it.post(PINS_PATH, name))
    pin = f"{PINS_PATH}/{'x' * 4096}"
    assert await it.step(f"DELETE {PINS_PATH}", it.get(pin, "DELETE")) == 404
    assert await it.step("GET /workers", it.get("/workers")) == 200
    await it.step("POST /workers", it.post("/workers", b'{"url": "%s"}' % (b"x" * READ)))
    worker = f"/workers/{'x' * 4096}"
    assert await it.step("GET /workers/ID", it.get(worker)) == 404
    assert await it.step("DELETE /workers/ID", it.get(worker, "DELETE")) == 409
    figures = {"step": 1, "metrics": {f"{number:0200}": 1.0 for number in range(512)}}
    assert await it.step("/figures", it.post("/figures", figures)) == 200
    await it.step(
        "/abort_request", it.post("/abort_request", b'{"rid": "%s"}' % (b"x" * 1_000_000))
    )


async def check_long_answers(it: Waits) -> None:
    """Answers of as many tokens as a context has, of which each event has all so far."""
    it.events = events_of("word " * (NUM_TOKENS // 5), 32)
    ids = {"input_ids": [1], "sampling_params": {"max_new_tokens": NUM_TOKENS}}
    for is_streamed in (False, True):
        body = {**ids, "stream": is_streamed, "return_logprob": True}
        name = "/generate, long answer" + ", streamed" * is_streamed
        assert await it.step(name, it.post("/generate", body)) == 200
    it.events = events_of("a", 1)


async def check_held_requests(it: Waits) -> None:
    """As many as may be held are released, and then lose their engines."""
    body = {"input_ids": [1234] * 340, "sampling_params": {"max_new_tokens": 4}, "stream": True}
    await it.program.call("gate", "holding")
    requests = [asyncio.ensure_future(it.post("/generate", body)) for _ in range(1000)]
    while (await it.program.call("stats"))["gate"]["num_held"] < len(requests):
        pass

    async def open_gate() -> set[int]:
        await it.program.call("gate", "open")
        return set(await asyncio.gather(*requests))

    assert await it.step("the gate opens for many", open_gate()) == {200}
