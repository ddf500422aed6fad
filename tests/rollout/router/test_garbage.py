"""Requests leave nothing for the garbage collector, whose pauses make all clients wait.

What a request took is freed as its last reference goes.  Objects that refer to each other would
wait for a collection: with 100 000 of them one takes 80 ms of the router's event loop.  What they
leave in rare cases is collected while no request waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout.router.proxy.context import SWEEP_S
from tests.support.waits import until

from .raw import post, response_to
from .router_process import RouterProcess
from .stub_engine import StubEngine
from .test_attacks import FAIL_OVER, KEY, Attacked, serve

pytestmark = pytest.mark.clock

NUM_REQUESTS = 30
GENERATE = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 16}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 16}
STREAM = {"stream": True}
LONG = {"x": "a" * 300_000}
REQUESTS: dict[str, tuple[str, dict[str, Any], bytes, bytes]] = {
    "passed on": ("/generate", GENERATE, KEY, b"200"),
    "streamed": ("/generate", GENERATE | STREAM, KEY, b"200"),
    "failover": ("/generate", GENERATE, FAIL_OVER, b"200"),
    "failover, streamed": ("/generate", GENERATE | STREAM, FAIL_OVER, b"200"),
    "failover, long": ("/generate", GENERATE | LONG, FAIL_OVER, b"200"),
    "chat": ("/v1/chat/completions", CHAT, FAIL_OVER, b"200"),
    "chat, streamed": ("/v1/chat/completions", CHAT | STREAM, FAIL_OVER, b"200"),
    "another route of an engine": ("/v1/score", {}, KEY, b"200"),
    "of the router itself": ("/figures", {"step": 1, "metrics": {}}, KEY, b"200"),
    "no such route": ("/nowhere", {}, KEY, b"404"),
    "without the key": ("/generate", GENERATE, b"", b"401"),
}


@asynccontextmanager
async def serving() -> AsyncIterator[Attacked]:
    engine = StubEngine("e-0", serve)
    await engine.start()
    try:
        async with RouterProcess(client_key="tell") as router:
            await router.call("members", 1, [[0, engine.endpoint.port]])
            await router.call("gate", "open")
            yield Attacked(router, engine)
    finally:
        await engine.stop()


async def test_requests_leave_nothing_for_the_garbage_collector() -> None:
    async with serving() as it:
        found = {name: await _num_left(it, *REQUESTS[name]) for name in REQUESTS}
    assert {name: num for name, num in found.items() if num >= NUM_REQUESTS} == {}


async def test_garbage_is_collected_while_no_request_waits() -> None:
    async with serving() as it:
        await it.router.call("gate", "holding")
        message = post(b"{}", b"/generate", KEY + b"Connection: close\r\n")
        held = asyncio.ensure_future(response_to(it, message))
        while not (await it.router.call("stats"))["gate"]["num_held"]:
            pass
        await it.router.call("make_garbage", 20_000)
        await asyncio.sleep(3 * SWEEP_S)
        assert await it.router.call("num_objects") >= 20_000
        await it.router.call("gate", "open")
        assert (await held).startswith(b"HTTP/1.1 200")

        async def are_collected() -> bool:
            return bool(await it.router.call("num_objects") < 10_000)

        await until(are_collected)
        assert await it.router.call("garbage") < 10_000


async def _num_left(it: Attacked, path: str, payload: Any, head: bytes, status: bytes) -> int:
    """The objects that a collection finds after such requests."""
    message = post(json.dumps(payload).encode(), path.encode(), head + b"Connection: close\r\n")
    for number in range(NUM_REQUESTS + 1):
        if number == 1:  # the first request makes what is needed once
            await it.router.call("garbage")
        whole = await asyncio.wait_for(response_to(it, message), 30)
        assert whole[9:12] == status, (path, whole[:200])
    return await it.router.call("garbage")
