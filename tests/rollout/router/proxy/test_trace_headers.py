"""The trace of a caller goes with its requests: from its span through the router to each engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from engines.protocol import SamplingParams
from rollout.config import RouterConfig
from rollout.driver.client.agent_session import AgentSession
from rollout.driver.client.sample_requests import make_requests
from rollout.driver.data.prompt import Prompt
from rollout.driver.driver import Driver
from rollout.driver.stream.options import RolloutOptions
from rollout.runtime.calls.sample_client import SampleClient
from tests.rollout.router.conftest import router_config
from tests.rollout.router.counting_engine import ASK, counting
from tests.rollout.router.stub_engine import Hold
from tests.support.driving import source
from tests.support.otel_program import bare_program, keep_spans, traceparent_of

pytest.importorskip("opentelemetry.sdk.trace")
api = pytest.importorskip("opentelemetry.trace")

FAILS_OVER = router_config(token_failover="on")
TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=a,other=b",
}
SAMPLING = SamplingParams(max_new_tokens=20)


@pytest.fixture
def tracer(monkeypatch):
    with bare_program(monkeypatch):
        keep_spans()
        yield api.get_tracer("trainer")


def requests(engine):
    return [seen for seen in engine.seen if seen.target == "/generate"]


def traces(bench, name="traceparent"):
    """What each engine got in this header, in each of its requests."""
    return [[seen.header(name) for seen in requests(engine)] for engine in bench.engines]


@pytest.mark.parametrize("config", [None, FAILS_OVER], ids=["plain", "read"])
async def test_the_headers_of_a_client_reach_the_engine(make_bench, config):
    bench = await make_bench(counting(), config=config)
    body = ASK if config else {**ASK, "stream": True}
    await bench.ask(json=body, headers=TRACE)
    for name, value in TRACE.items():
        assert traces(bench, name) == [[[value]]]


async def test_they_reach_the_engine_of_another_try(make_bench):
    bench = await make_bench(None, counting(), config=FAILS_OVER)
    await bench.host.set_members(2, [bench.member(0)])
    pending = bench.begin(json=ASK, headers=TRACE)
    await bench.host.set_members(3, [bench.member(0), bench.member(1)])
    assert (await pending).status == 200
    for name, value in TRACE.items():
        assert traces(bench, name)[1] == [[value]]


async def test_they_reach_the_engine_on_which_a_request_continues(make_bench):
    hold = Hold()
    bench = await make_bench(counting(dies_after=8, hold=hold), counting(), config=FAILS_OVER)
    await bench.host.set_members(2, [bench.member(0)])
    pending = bench.begin(json=ASK, headers=TRACE)
    await hold.entered.wait()
    await bench.host.set_members(3, [bench.member(0), bench.member(1)])
    hold.opened.set()
    got = (await pending).json
    assert got["meta_info"]["num_failovers"] == 1
    for name, value in TRACE.items():
        assert traces(bench, name) == [[[value]], [[value]]]


async def test_a_request_of_a_handle_has_the_span_of_its_caller(make_bench, tracer):
    bench = await make_bench(counting(), config=FAILS_OVER)

    async def find_url() -> str:
        return bench.url

    client = SampleClient(find_url, RouterConfig())
    (request,) = make_requests([1, 2, 3], SAMPLING, "")
    with tracer.start_as_current_span("evaluate") as within:
        await client.generate_one(request, "")
        async for _ in client.stream(request, "again"):
            pass
    await client.generate_one(request, "")
    assert traces(bench) == [[[traceparent_of(within)], [traceparent_of(within)], []]]


async def test_the_samples_of_a_step_have_the_span_of_the_step(make_bench, tracer):
    """Also those that an asynchronous stream begins ahead of time."""
    bench = await make_bench(counting(), config=FAILS_OVER)
    options = RolloutOptions(mode="async")
    with Driver(bench.url, lambda _: 1.0, adapt_every_s=None) as driver:

        async def step(number: int, of: Any, **more: Any) -> None:
            await driver.rollout(number, of, group_size=2, sampling=SAMPLING, **more)

        with tracer.start_as_current_span("step 0") as first:
            await step(0, [Prompt((101,))])
        with tracer.start_as_current_span("step 1") as second:
            await step(1, source(8), num_groups=1, options=options)
        await step(2, [Prompt((102,))])
        await asyncio.to_thread(driver.close)
    sent = {
        tuple(seen.json["input_ids"]): seen.header("traceparent")
        for seen in requests(bench.engines[0])
    }
    assert sent[101,] == [traceparent_of(first)]
    assert sent[1,] == sent[2,] == [traceparent_of(second)]
    assert sent[102,] == []


def test_a_session_has_the_span_in_which_it_was_made(tracer):
    def made():
        return AgentSession(["http://worker"], "", key="", control_key="", submit=lambda _: None)

    with tracer.start_as_current_span("episode") as within:
        session = made()
    assert session.default_headers == {"traceparent": traceparent_of(within)}
    assert made().default_headers == {}


def test_a_program_without_opentelemetry_does_not_import_it():
    code = (
        "import sys\n"
        "from engines.http import trace_context as of\n"
        "import rollout.driver.driver\n"
        "assert (of.trace_headers(), of.current_traceparent()) == ({}, '')\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
