"""Queues and tokens per second, as engines of each kind report them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from engines.kinds import KINDS
from rollout.observability.page import engine_loads
from rollout.observability.page.engine_loads import EngineLoad, EngineLoads, LoadTarget

SGLANG = KINDS["sglang"]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def engine(reply: Callable[[str], Any]) -> AsyncIterator[str]:
    """The URL of an engine that answers each path with this JSON or text."""

    async def answer(request: web.Request) -> web.Response:
        found = reply(request.path)
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def rank(**more: Any) -> dict[str, Any]:
    return {"num_running_reqs": 2, "num_waiting_reqs": 3} | more


async def test_the_throughput_that_sglang_measures_is_summed_over_its_ranks() -> None:
    loads = EngineLoads()
    reply = {"loads": [rank(gen_throughput=100.5), rank(gen_throughput=50.0)]}
    async with engine(lambda path: reply) as url:
        await loads.request([LoadTarget("main-0", url, SGLANG)])
    assert loads.get("main-0") == EngineLoad(6, 150.5)


async def test_sglang_that_does_not_measure_it_has_a_queue_and_no_throughput() -> None:
    loads = EngineLoads()
    async with engine(lambda path: {"loads": [rank(gen_throughput=0.0)]}) as url:
        await loads.request([LoadTarget("main-0", url, SGLANG)])
    assert loads.get("main-0") == EngineLoad(3, None)


async def test_a_counter_of_tokens_becomes_a_rate_and_begins_again_after_a_restart() -> None:
    counts = [1000, 1600, 40]
    clock = Clock()
    loads = EngineLoads(clock)

    def metrics(path: str) -> str:
        assert path == "/metrics"
        labels = '{engine="0",model_name="m"}'
        return (
            f"vllm:num_requests_waiting{labels} 7.0\n"
            f"vllm:generation_tokens_total{labels} {counts.pop(0)}.0\n"
        )

    seen = []
    async with engine(metrics) as url:
        for _ in range(3):
            await loads.request([LoadTarget("main-0", url, KINDS["vllm"])])
            seen.append(loads.get("main-0"))
            clock.now_s += 3.0
    assert seen == [EngineLoad(7, None), EngineLoad(7, 200.0), EngineLoad(7, None)]


@pytest.mark.parametrize("reply", ["no JSON", {"loads": [{}]}, {}, "x" * 2000])
async def test_an_engine_with_another_reply_has_no_load_and_others_keep_theirs(
    reply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loads, "_MAX_BYTES", 1000)
    loads = EngineLoads()
    async with engine(lambda path: {"loads": [rank()]}) as good, engine(lambda path: reply) as bad:
        targets = [LoadTarget("main-0", good, SGLANG), LoadTarget("main-1", bad, SGLANG)]
        await loads.request([*targets, LoadTarget("main-2", "http://127.0.0.1:1", SGLANG)])
    assert loads.get("main-0") is not None
    assert loads.get("main-1") is None
    assert loads.get("main-2") is None


async def test_an_engine_that_is_no_target_any_more_has_no_load() -> None:
    loads = EngineLoads()
    async with engine(lambda path: {"loads": [rank(num_output_tokens=5)]}) as url:
        await loads.request([LoadTarget("main-0", url, SGLANG)])
        await loads.request([])
    assert loads.get("main-0") is None


async def test_many_engines_are_requested_less_often() -> None:
    clock = Clock()
    loads, requests = EngineLoads(clock), []

    def reply(path: str) -> Any:
        requests.append(path)
        return {"loads": [rank()]}

    async def request_at(now_s: float, targets: list[LoadTarget]) -> int:
        before, clock.now_s = len(requests), now_s
        loads.request_soon(targets)
        if loads._task is not None:
            await loads._task
        return len(requests) - before

    async with engine(reply) as url:
        few = [LoadTarget("main-0", url, SGLANG)]
        many = [LoadTarget(f"main-{index}", url, SGLANG) for index in range(80)]
        assert await request_at(100.0, few) == 1
        assert await request_at(101.9, few) == 0
        assert await request_at(102.1, many) == 80
        assert await request_at(106.0, many) == 0
        assert await request_at(106.2, many) == 80
    await loads.aclose()
