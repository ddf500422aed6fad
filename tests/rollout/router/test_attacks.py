"""Attacks on a router in a process of its own: it serves others meanwhile, and forgets them after.

Each attack runs beside a client that sends ordinary requests.  Measured are the resident memory
before, during and after, and the longest stretch of CPU time on the router's event loop.
"""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from .raw import connect, post, response_to
from .router_process import RouterProcess
from .stub_engine import STREAM, StubEngine, chunk

pytestmark = [pytest.mark.clock, pytest.mark.slow]

LONGEST_S = 0.05
GROWTH, SLACK = 1.2, 24 << 20
MOST = 160 << 20
KEY = b"Authorization: Bearer tell\r\n"
FAIL_OVER = KEY + b"X-Token-Failover: on\r\n"


@dataclass
class Attacked:
    """A router process, its engine, and what came of the attack."""

    router: RouterProcess
    engine: StubEngine

    @property
    def endpoint(self):
        return self.router.endpoint

    async def ask(self, body=b"{}", path=b"/generate", extra=KEY) -> bytes:
        message = post(body, path, extra + b"Connection: close\r\n")
        return await asyncio.wait_for(response_to(self, message), 30)


async def serve(connection, seen):
    """As an engine does: events if they are wanted, and as many tokens as it reads a budget."""
    asked = {} if len(seen.body) > 1 << 20 else _loaded(seen.body)
    if not asked.get("stream"):
        body = b'{"text": "ok"}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await connection.send(head % len(body), body)
        return
    await connection.send(STREAM)
    for num in (8, 16):
        event = json.dumps(_event(seen.target, asked, num)).encode()
        await connection.send(chunk(b"data: %s\n\n" % event))
    await connection.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")


def _loaded(body):
    with suppress(ValueError, RecursionError):
        return json.loads(body)
    return {}


def _event(target, asked, num):
    if target == "/generate":
        ids = list(range(num))
        meta = {
            "completion_tokens": num,
            "prompt_tokens": 3,
            "weight_version": "0",
            "finish_reason": {"type": "length", "length": num} if num == 16 else None,
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }
        return {"text": "a" * num, "output_ids": ids, "meta_info": meta}
    text = {"delta": {"content": "a" * 8}} if "chat" in target else {"text": "a" * 8}
    choice = {"index": 0, **text, "finish_reason": "length" if num == 16 else None}
    usage = {"prompt_tokens": 3, "completion_tokens": num, "total_tokens": num + 3}
    return {
        "id": "i",
        "object": "o",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


@asynccontextmanager
async def attacked():
    """The router, before and after an attack; the checks are made as it ends."""
    config = {"client_key": "tell", "max_held_requests": 200, "max_body_bytes": 8 << 20}
    engine = StubEngine("e-0", serve)
    await engine.start()
    try:
        async with RouterProcess(**config) as router:
            await router.call("members", 1, [[0, engine.endpoint.port]])
            await router.call("gate", "open")
            it = Attacked(router, engine)
            for _ in range(50):
                assert (await it.ask()).startswith(b"HTTP/1.1 200")
                await it.ask(b'{"stream": true}', extra=FAIL_OVER)
            before = await router.call("measure")
            is_over = asyncio.Event()
            others = asyncio.ensure_future(_ask_on(it, is_over))
            try:
                yield it
            finally:
                is_over.set()
                await others
            await asyncio.sleep(1.0)  # for what is freed to be given back
            after = await router.call("measure")
            stats = await router.call("stats")
    finally:
        await engine.stop()
    print(_figures(before, after))
    assert stats["engines"][0]["state"] == "serving", stats["engines"][0]
    assert (stats["num_in_flight"], stats["gate"]["num_held"]) == (0, 0)
    assert after["longest_s"] < LONGEST_S, _figures(before, after)
    assert after["most"] < before["now"] + MOST, _figures(before, after)
    assert after["now"] < GROWTH * before["now"] + SLACK, _figures(before, after)


def _figures(before, after):
    mib = [round(num / (1 << 20)) for num in (before["now"], after["most"], after["now"])]
    idle_ms, ms = before["longest_s"] * 1e3, after["longest_s"] * 1e3
    return f"{mib} MiB before, most, after; longest {ms:.1f} ms, before {idle_ms:.1f} ms"


async def _ask_on(it, is_over):
    """An ordinary client; each of its requests is served."""
    while not is_over.is_set():
        whole = await it.ask()
        assert whole.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), whole[:300]
        await asyncio.sleep(0.01)


async def test_bodies_too_deep_to_be_written_while_the_gate_holds():
    async with attacked() as it:
        await it.router.call("gate", "holding")
        asked = b'{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 16}, "x": %s}'
        bodies = [asked % (b"[" * depth + b"]" * depth) for depth in range(900, 1000)]
        pending = [asyncio.ensure_future(it.ask(body, extra=FAIL_OVER)) for body in bodies]
        while (await it.router.call("stats"))["gate"]["num_held"] < len(bodies):
            pass
        await it.router.call("gate", "open")
        for whole in await asyncio.gather(*pending):
            assert whole[9:12] in (b"200", b"400", b"500"), whole[:100]


BUDGETS = [{"max_completion_tokens": 50}, {"max_tokens": None}, {"max_tokens": 40.0}]
BUDGETS += [
    {"max_tokens": "40"},
    {"max_tokens": 1, "max_completion_tokens": 50},
    {"max_tokens": -1},
]


async def test_budgets_that_the_router_could_read_otherwise_than_the_engine():
    async with attacked() as it:
        for path in (b"/v1/completions", b"/v1/chat/completions"):
            for budget in BUDGETS:
                prompt = {"messages": [{"role": "user", "content": "a"}]}
                asked = {"model": "m", **({"prompt": [1]} | prompt), **budget}
                await it.ask(json.dumps(asked).encode(), path, FAIL_OVER)


async def test_hosts_that_are_paths():
    async with attacked() as it:
        head = b"GET /model_info HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n" + KEY + b"\r\n"
        for host in (b"x/flush_cache?", b"x/release_memory_occupation#", b"x"):
            await response_to(it, head % host)
        targets = {seen.target for seen in it.engine.seen if seen.method == "GET"}
        assert targets <= {"/model_info"}


@pytest.mark.parametrize("num", [200_000, 400_000])
async def test_a_long_stop_string(num):
    async with attacked() as it:
        params = {"max_new_tokens": 16, "stop": "b" * num}
        for path, asked in (
            (b"/generate", {"input_ids": [1], "sampling_params": params}),
            (b"/v1/completions", {"prompt": [1], "max_tokens": 16, "stop": "b" * num}),
        ):
            await it.ask(json.dumps(asked).encode(), path, FAIL_OVER)


@pytest.mark.parametrize("path", [b"/generate", b"/health", b"/nowhere", b"/v1/score?..%2f"])
async def test_a_client_that_pipelines_and_never_reads(path):
    async with attacked() as it:
        message = post(b"{}", path, KEY)
        connections = [await connect(it) for _ in range(3)]
        sending = [asyncio.ensure_future(_send_on(*pair, message)) for pair in connections]
        await asyncio.sleep(3)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


async def _send_on(reader, writer, message):
    writer.transport.pause_reading()
    try:
        while True:
            writer.write(message * 200)
            await writer.drain()
    finally:
        writer.transport.abort()


async def test_thousands_of_long_targets_without_the_key():
    async with attacked() as it:
        for number in range(4096):
            target = b"/%06d" % number + b"x" * 60_000
            if number % 512 == 0:
                reader, writer = await connect(it)
            writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
            await reader.readuntil(b"}}")
            if number % 512 == 511:
                writer.close()


@pytest.mark.parametrize("path", [b"/abort_request", b"/figures", b"/model_info"])
async def test_a_long_body_for_the_router_itself(path):
    async with attacked() as it:
        size = 200 << 20
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n" % (
            path,
            size,
            KEY,
        )
        reader, writer = await connect(it, head)
        with suppress(ConnectionError):
            for _ in range(size >> 18):
                writer.write(b"x" * (1 << 18))
                await writer.drain()
        with suppress(ConnectionError):
            assert (await reader.read()).startswith((b"HTTP/1.1 413", b""))
        writer.transport.abort()
        assert not any(seen.target == path.decode() for seen in it.engine.seen)


@pytest.mark.parametrize("stop", [5, [5], {"a": 1}, [["a"]], True])
async def test_stops_that_are_no_strings(stop):
    async with attacked() as it:
        params = {"max_new_tokens": 16, "stop": stop}
        for path, asked in (
            (b"/generate", {"input_ids": [1], "sampling_params": params}),
            (b"/v1/completions", {"prompt": [1], "max_tokens": 16, "stop": stop}),
            (b"/v1/chat/completions", {"messages": [], "max_tokens": 16, "stop": stop}),
        ):
            whole = await it.ask(json.dumps(asked).encode(), path, FAIL_OVER)
            assert whole[9:12] in (b"200", b"400", b"422", b"500"), whole[:200]


async def test_long_bodies_and_pieces_of_the_next_head_in_one_packet():
    async with attacked() as it:
        second = post(b"second", extra=KEY + b"Connection: close\r\n")
        for num in range(65_000, 75_000, 1000):
            reader, writer = await connect(it, post(b"x" * num, extra=KEY) + second[:30])
            writer.write(second[30:])
            assert (await reader.read()).count(b"HTTP/1.1 200") == 2
            writer.close()
        for num in (70_000, 300_000, 1_000_000):
            head = b"GET /health HTTP/1.1\r\nHost: localhost\r\na: " + b"x" * num + b"\r\n\r\n"
            assert (await response_to(it, head)).startswith((b"HTTP/1.1 431", b""))


async def test_bodies_in_chunks_of_two_bytes_that_never_end():
    async with attacked() as it:
        head = (
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            + KEY
            + b"\r\n"
        )
        pairs = [await connect(it, head) for _ in range(4)]
        for _ in range(40):
            for _, writer in pairs:
                writer.write(chunk(b"ab") * 20_000)
                await writer.drain()
        for _, writer in pairs:
            writer.transport.abort()


async def test_thousands_of_small_requests_in_one_packet():
    async with attacked() as it:
        await it.router.call("gate", "closed")
        message = post(b"", extra=KEY)
        whole = await response_to(it, message * 5000, post(b"", extra=b"Connection: close\r\n"))
        assert whole.count(b"HTTP/1.1 ") == 5001
        await it.router.call("gate", "open")
