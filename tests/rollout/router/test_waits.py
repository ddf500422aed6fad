"""No client waits for another: every route gets its largest inputs while a heartbeat beats.

The router is a process of its own, whose event loop beats every 2 ms.  Measured are the CPU of its
thread between two beats, which other work on the machine does not change; and how late a beat is,
with all that other threads of the router keep from it.  A process beside it measures how many times
longer any work takes on this machine than on idle cores: a beat may be late by as much more.

Scaled for CI: 8 sessions of 64 k tokens for 1 000, since what the router holds is measured for each
byte of 64 of their turns; and 64 MiB for the longest body that is not read (256 MiB by default).
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from benchmarks.router.agents import corpus, history, write_model
from rollout.agents.model.call_forms import FORMS
from rollout.router.control_api import control_app
from rollout.router.http.routes import GENERATION_PATHS
from tests.rollout.router.exchange_rig import rig_of
from tests.rollout.router.router_process import RouterProcess
from tests.rollout.router.stub_engine import STREAM, Connection, Seen, StubEngine, chunk

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytestmark = [pytest.mark.clock, pytest.mark.slow]

CPU_S = 0.05
WAIT_S = 0.05
PER_HELD_BYTE = 8.0
NUM_SESSIONS, NUM_TOKENS = 8, 65_536
NUM_BRANCHES = 8
LONG, READ = 64 << 20, 7 << 20
MIB = float(1 << 20)
# For each line it prints how many times longer than its CPU time its slowest work took.
BEAT = """
import select, sys, time
slowest = 1.0
while True:
    is_read = select.select([sys.stdin], [], [], 0.05)[0]
    begin, work = time.monotonic(), time.process_time() + 0.005
    while time.process_time() < work:
        pass
    slowest = max(slowest, (time.monotonic() - begin) / 0.005)
    if is_read:
        if not sys.stdin.readline():
            break
        print(slowest, flush=True)
        slowest = 1.0
"""


@dataclass
class Waits:
    """A router under measurement.

    Attributes:
        beat: the process that measures the machine.
        events: what the engines answer.
        sent: methods and paths that were requested within a step.
        found: a line for each step.
        failed: the steps that made others wait for too long.
    """

    router: RouterProcess
    client: aiohttp.ClientSession
    beat: asyncio.subprocess.Process
    events: list[bytes] = field(default_factory=list)
    sent: set[tuple[str, str]] = field(default_factory=set)
    found: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def post(self, path: str, body: bytes | dict[str, Any]) -> int:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"content-type": "application/json", "x-token-failover": "on"}
        self.sent.add(("POST", path))
        async with self.client.post(path, data=io.BytesIO(data), headers=headers) as response:
            await response.read()
            return response.status

    async def get(self, path: str, method: str = "GET") -> int:
        self.sent.add((method, path))
        async with self.client.request(method, path) as response:
            await response.read()
            return response.status

    async def until_held(self, num: int) -> None:
        while (await self.router.call("stats"))["gate"]["num_held"] < num:
            pass

    async def step(self, name: str, work: Awaitable[Any]) -> Any:
        """Do ``work``, and measure who waits for it."""
        await self._slowness()
        await self.router.call("measure")
        began_s = time.monotonic()
        result = await work
        took_s = time.monotonic() - began_s
        measured = await self.router.call("measure")
        cpu_s, wait_s = measured["longest_s"], measured["longest_wait_s"]
        slowness = await self._slowness()
        self.found.append(
            f"{name:32} wait {wait_s * 1e3:6.1f} ms, work takes {slowness:4.1f} times as long; "
            f"CPU {cpu_s * 1e3:5.1f} ms; took {took_s:5.2f} s; {result}"
        )
        print(self.found[-1], flush=True)
        if cpu_s > CPU_S or wait_s > WAIT_S * slowness:
            self.failed.append(self.found[-1])
        return result

    async def _slowness(self) -> float:
        assert self.beat.stdin is not None
        assert self.beat.stdout is not None
        self.beat.stdin.write(b"\n")
        return float(await self.beat.stdout.readline())


def events_of(text: str, num_events: int) -> list[bytes]:
    """An answer of one token for each character, in so many events with all of it so far."""
    sizes = [len(text) * number // num_events for number in range(1, num_events + 1)]
    return [_event(text[:size], size == len(text)) for size in sizes]


def _event(text: str, is_last: bool) -> bytes:
    ids = [100] * len(text)
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": len(ids)} if is_last else None,
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "weight_version": "1",
        "output_token_logprobs": [[-0.5, 100, None]] * len(ids),
    }
    payload = {"text": text, "output_ids": ids, "meta_info": meta}
    return chunk(b"data: " + orjson.dumps(payload) + b"\n\n")


WHOLE = json.dumps({"text": "ok", "choices": []}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@asynccontextmanager
async def waits(folder: Path) -> AsyncIterator[Waits]:
    """A router with two engines; its measurements are printed and judged at the end."""

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
        "tokenizer_path": str(folder),
        "max_session_bytes": 1 << 30,
        "max_held_requests": 4096,
        "max_body_bytes": LONG + 1024,
        "request_timeout_s": 300.0,
        "hold_timeout_s": 300.0,
    }
    pipe = asyncio.subprocess.PIPE
    beat = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", BEAT), stdin=pipe, stdout=pipe
    )
    try:
        async with RouterProcess(**config) as router:
            ports = [[number, engine.endpoint.port] for number, engine in enumerate(engines)]
            await router.call("members", 1, ports)
            await router.call("gate", "open")
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(router.endpoint.url, connector=connector) as client:
                it = Waits(router, client, beat, events_of("an answer of some words. " * 8, 4))
                yield it
    finally:
        assert beat.stdin is not None
        beat.stdin.close()
        await beat.wait()
        for engine in engines:
            await engine.stop()
    assert it.failed == []


@pytest.mark.timeout(400)
async def test_no_client_waits_for_another(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    text = corpus()
    async with waits(folder) as it:
        await it.step("nothing", asyncio.sleep(0.5))
        await check_routes(it, text)
        await check_sessions(it, folder)
        await check_degenerate_answers(it)
        await check_held_requests(it)
        await check_the_reading_process(it, text)
        assert unmeasured(it.sent) == []


def unmeasured(sent: set[tuple[str, str]]) -> list[str]:
    """The routes of the router of which no step has measured who waits for them."""
    app = control_app(rig_of("a").proxy, connect_timeout_s=1.0)
    routes = [(route.methods, route.path_regex, route.path) for route in app.router.routes]  # type: ignore[attr-defined]
    routes += [({"POST"}, re.compile(re.escape(path)), path) for path in GENERATION_PATHS]
    return [
        path
        for methods, pattern, path in routes
        if not any(method in methods and pattern.fullmatch(one) for method, one in sent)
    ]


def test_a_route_without_a_step_is_found() -> None:
    assert "/figures" in unmeasured({("GET", "/figures"), ("POST", "/abort_request")})
    assert "/abort_request" not in unmeasured({("POST", "/abort_request")})


async def check_routes(it: Waits, text: str) -> None:
    """Every route with its longest body, of each form that the router reads."""
    body = b'{"x": "%s"}' % (b"x" * READ)

    async def every_path() -> set[int]:
        return {await it.post(path, body) for path in sorted(GENERATION_PATHS)}

    assert await it.step("every path", every_path()) == {200, 404}
    await it.step("/v1/score, not read", it.post("/v1/score", b"x" * LONG))
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
    session = "/sessions/{}/v1/chat/completions"
    first = await it.step(
        "session, long messages", it.post(session.format("a"), {"messages": messages[:150]})
    )
    one = [{"role": "user", "content": "some words " * (READ // 11)}]
    second = await it.step("session, one message", it.post(session.format("b"), {"messages": one}))
    third = await it.step(
        "session, many messages", it.post(session.format("c"), {"messages": many})
    )
    assert (first, second, third) == (200, 200, 400)
    for path in ("/sessions/a", "/sessions/b", "/health", "/ready", "/engines", "/metrics"):
        assert await it.step(f"GET {path}", it.get(path)) == 200
    for path in ("/v1/models", "/model_info", "/get_model_info", "/engines/e-0/loads"):
        await it.step(f"GET {path}", it.get(path))
    for path in ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"):
        await it.step(f"GET {path}", it.get(path))
    await it.step("GET models of a session", it.get("/sessions/a/v1/models"))
    prompt: dict[str, Any] = {"prompt": long}
    assert await it.step("session, prompt", it.post("/sessions/a/v1/completions", prompt)) == 400
    assert await it.step("DELETE a session", it.get("/sessions/b", "DELETE")) == 200
    figures = {"step": 1, "metrics": {f"{number:0200}": 1.0 for number in range(512)}}
    assert await it.step("/figures", it.post("/figures", figures)) == 200
    await it.step(
        "/abort_request", it.post("/abort_request", b'{"rid": "%s"}' % (b"x" * 1_000_000))
    )


async def check_sessions(it: Waits, folder: Path) -> None:
    """Sessions of 64 k tokens, and what the gate holds of them."""
    first = history(folder, NUM_TOKENS)
    histories = [[*first] for _ in range(NUM_SESSIONS)]
    answer = {"role": "assistant", "content": "an answer of some words. " * 8}

    async def turn(number: int, branch: int = 0) -> int:
        question = f"question {len(histories[number])} of {number}, {branch}"
        messages = [*histories[number], {"role": "user", "content": question}]
        body = {"messages": messages, "stream": number % 2 == 0}
        status = await it.post(f"/sessions/s-{number}/v1/chat/completions", body)
        if not branch:
            histories[number] = [*messages, answer]
        return status

    async def all_turns(num_branches: int = 1) -> set[int]:
        places = product(range(NUM_SESSIONS), range(num_branches))
        return set(await asyncio.gather(*(turn(*place) for place in places)))

    for name in ("first", "second", "third"):
        assert await it.step(f"{name} turn of all sessions", all_turns()) == {200}
    await it.router.call("gate", "holding")
    before = (await it.router.call("measure"))["now"]
    num_bytes = NUM_BRANCHES * sum(len(json.dumps(messages)) for messages in histories)
    turns = asyncio.ensure_future(all_turns(NUM_BRANCHES))
    await it.until_held(NUM_BRANCHES * NUM_SESSIONS)
    taken = (await it.router.call("measure"))["now"] - before
    per_byte = taken / num_bytes
    print(f"held turns: {taken / MIB:.0f} MiB for {num_bytes / MIB:.0f}: {per_byte:.1f} a byte")
    assert per_byte < PER_HELD_BYTE

    async def open_gate() -> set[int]:
        await it.router.call("gate", "open")
        return await turns

    assert await it.step("the gate opens for them", open_gate()) == {200}


async def check_degenerate_answers(it: Waits) -> None:
    """A model that writes one part of a call without end, for each form of calls."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "tools": tools}
    for form in FORMS:
        await it.router.call("form", form.name)
        begin = next(iter(form.blocks), "<|start|>")
        for unit in (begin, "\n", '{"name": "'):
            it.events = events_of((begin + unit * 16_384)[:16_384], 8)
            path = f"/sessions/{form.name}/v1/chat/completions"
            assert await it.step(f"{form.name}: {unit!r:.16}", it.post(path, body)) == 200
    await check_long_answers(it)


async def check_long_answers(it: Waits) -> None:
    """Answers of as many tokens as a session has, of which each event has all so far."""
    it.events = events_of("word " * (NUM_TOKENS // 5), 32)
    chat = "/v1/chat/completions"
    messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": NUM_TOKENS}
    ids = {"input_ids": [1], "sampling_params": {"max_new_tokens": NUM_TOKENS}}
    for path, body in (("/generate", ids), ("/sessions/long" + chat, messages)):
        for is_streamed in (False, True):
            body = {**body, "stream": is_streamed, "return_logprob": True}
            name = f"{path:.10}, long answer" + ", streamed" * is_streamed
            assert await it.step(name, it.post(path, body)) == 200
    it.events = events_of("a", 1)


async def check_the_reading_process(it: Waits, text: str) -> None:
    """One client's long chats delay the turn of another by one of them, not by all."""
    chat = "/sessions/{}/v1/chat/completions"
    one = {"messages": [{"role": "user", "content": text[: 96 << 10]}]}
    long = {"messages": [{"role": "user", "content": (text * (READ // len(text) + 1))[:READ]}]}

    async def took_s(session: str, body: dict[str, Any]) -> float:
        began_s = time.monotonic()
        await it.post(chat.format(session), body)
        return time.monotonic() - began_s

    running = [asyncio.ensure_future(took_s("greedy", long)) for _ in range(4)]

    async def turns() -> list[float]:
        others = []
        while not all(task.done() for task in running):
            others.append(await took_s(f"other-{len(others)}", one))
        return others

    others = await it.step("turns beside four long chats", turns())
    all_s = max(await asyncio.gather(*running))
    print(f"the four long chats {all_s:.1f} s, the slowest other turn {max(others):.1f} s")
    assert max(others) < 0.75 * all_s


async def check_held_requests(it: Waits) -> None:
    """As many as may be held are released, and then lose their engines."""
    body = {"input_ids": [1234] * 340, "sampling_params": {"max_new_tokens": 4}, "stream": True}
    await it.router.call("gate", "holding")
    requests = [asyncio.ensure_future(it.post("/generate", body)) for _ in range(1000)]
    await it.until_held(len(requests))

    async def open_gate() -> set[int]:
        await it.router.call("gate", "open")
        return set(await asyncio.gather(*requests))

    assert await it.step("the gate opens for many", open_gate()) == {200}
