"""The driver over the real router and fake engines over HTTP."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from rollout.config import RouterConfig
from rollout.core.errors import RolloutError
from rollout.core.samples import all_samples
from rollout.driver.driver import RolloutDriver
from rollout.driver.stream.options import RolloutOptions
from rollout.router import Backend, RouterHost
from tests.support.driving import SAMPLING, always, numbers, prompts, source

# The last is so slow that what it has is cut off, however busy the machine.
SPEEDS = {"e0": 0.001, "e1": 0.001, "e2": 0.5}


def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint, token_s=SPEEDS[spec.engine_id])


@asynccontextmanager
async def routed(
    *names: str,
    keys: Mapping[str, str] | None = None,
    **shown: Any,
) -> AsyncIterator[tuple[RolloutDriver, RouterHost, dict[str, FakeEngine]]]:
    async with AsyncExitStack() as stack:
        engines, members = {}, []
        for name in names or SPEEDS:
            running = await HttpFakeLauncher(make).launch(EngineSpec(name, "fake", "/m", ""))
            stack.push_async_callback(running.kill)
            engines[name] = running.engine
            members.append(Backend(name, running.endpoint, access=running.access))
        host = RouterHost(RouterConfig(max_connections=64, **(keys or {})))
        url = (await host.start()).url
        stack.push_async_callback(host.stop, 1.0)
        await host.set_members(1, members)
        await host.set_gate("open", weight_version=3)
        driver = await stack.enter_async_context(RolloutDriver(url, always(1.0), **shown))
        yield driver, host, engines
        await driver.close()
        assert (await host.stats())["num_in_flight"] == 0


async def until_stats(is_so: Callable[[dict[str, Any]], bool], host: RouterHost) -> None:
    """Query the router until the condition holds; each reply takes a turn of its loop."""
    while not is_so(await host.stats()):
        pass


async def test_partial_samples_continue_through_the_router() -> None:
    async with routed() as (driver, _, engines):
        data, options = source(60), RolloutOptions(over_sampling=3.0)
        made = [
            await driver.rollout(
                step, data, num_groups=4, group_size=1, sampling=SAMPLING, options=options
            )
            for step in range(4)
        ]
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
        assert not any(engine.in_flight for engine in engines.values())
        calls = sum(engine.operations().count("abort_request") for engine in engines.values())
    for sample in all_samples([group for groups in made for group in groups]):
        sample.check()
        assert len(sample.output_ids) == 10
    assert len({number for groups in made for number in numbers(groups)}) == 16
    assert calls > 0


async def test_requests_held_by_the_router_wait_and_refused_ones_are_retried() -> None:
    async with routed("e0", "e1") as (driver, host, _):
        await host.set_gate("holding", reason="a push")
        held = asyncio.create_task(driver.rollout(0, prompts(4), group_size=1, sampling=SAMPLING))
        await until_stats(lambda stats: stats["gate"]["num_held"] == 4, host)
        load = await driver._engines.client.load()
        assert load is not None
        assert load.why_waiting.startswith(
            "4 requests wait at the router's gate, which is holding: a push; engines serve after"
        )
        await host.set_gate("closed", reason="an offload")
        await until_stats(lambda stats: stats["num_refused"] == 4, host)
        await host.set_gate("open")
        assert numbers(await held) == [1, 2, 3, 4]


async def test_requests_held_by_the_router_are_aborted_when_the_call_is_cancelled() -> None:
    async with routed() as (driver, host, _):
        await host.set_gate("holding", reason="a push")
        data = source(9)
        call = asyncio.create_task(
            driver.rollout(0, data, num_groups=4, group_size=1, sampling=SAMPLING)
        )
        await until_stats(lambda stats: stats["gate"]["num_held"] == 4, host)
        began_s = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - began_s < 10
        assert (await host.stats())["gate"]["num_held"] == 0
        stream = driver.stream_of(data)
        assert (stream.auditor.findings(stream.pending), len(stream.pending)) == ([], 4)


async def test_a_sample_names_the_engine_of_each_token() -> None:
    async with routed("e0", "e1") as (driver, _, engines):
        groups = await driver.rollout(0, prompts(6), group_size=2, sampling=SAMPLING)
        spans = [span for sample in all_samples(groups) for span in sample.engines]
        assert {(span.start, span.end) for span in spans} == {(0, 10)}
        by_engine = Counter(span.engine_id for span in spans)
        assert by_engine == {
            name: engine.operations().count("generate") for name, engine in engines.items()
        }


async def test_the_driver_learns_the_weight_version_from_the_gate() -> None:
    async with routed("e0", "e1") as (driver, _, _engines):
        options = RolloutOptions(max_version_lag=10)
        await driver.rollout(0, prompts(2), group_size=1, sampling=SAMPLING, options=options)
        assert driver.weight_version == 3


async def test_a_dead_engine_behind_the_router_costs_no_sample() -> None:
    async with routed() as (driver, host, engines):
        call = asyncio.create_task(driver.rollout(0, prompts(20), group_size=2, sampling=SAMPLING))
        await until_stats(lambda stats: bool(engines["e2"].in_flight), host)
        engines["e2"].die("a planned death")
        groups = await call
    assert numbers(groups) == list(range(1, 21))
    assert {len(sample.output_ids) for sample in all_samples(groups)} == {10}


async def test_the_router_keeps_the_metrics_that_a_driver_reports() -> None:
    async with routed("e0") as (driver, host, _):
        await driver.rollout(3, prompts(1), group_size=2, sampling=SAMPLING)
        await driver.close()
        (report,) = (await host.stats())["figures"]
        assert report["step"] == 3
        assert report["metrics"]["rollout/num_samples"] == 2.0


async def test_a_driver_learns_the_loads_of_engines_whose_keys_it_has_not() -> None:
    async with routed("e0") as (driver, host, engines):
        gate = engines["e0"].hold("generate")
        call = asyncio.create_task(driver.rollout(1, prompts(2), group_size=1, sampling=SAMPLING))
        await until_stats(lambda stats: len(engines["e0"].in_flight) == 2, host)
        load = await driver._engines.client.load()
        gate.open()
        await call
    assert load is not None
    assert load.num_running == 2


async def test_a_driver_sends_its_keys_to_the_router_and_to_no_engine() -> None:
    keys = {"client_key": "tell", "control_key": "steer"}
    async with routed("e0", keys=keys, key="tell", control_key="steer") as (driver, host, _):
        assert len(await driver.rollout(1, prompts(2), group_size=1, sampling=SAMPLING)) == 2
        load = await driver._engines.client.load()
        assert load is not None
        assert load.weight_version == 3
        await until_stats(lambda stats: bool(stats["figures"]), host)
    async with routed("e0", keys=keys) as (driver, _, _):
        with pytest.raises(RolloutError, match="401"):
            await driver.rollout(1, prompts(2), group_size=1, sampling=SAMPLING)


async def test_metrics_of_the_servers_step_come_with_those_of_the_rollout() -> None:
    found: list[Mapping[str, float]] = []
    async with routed("e0", on_metrics=lambda _, metrics: found.append(metrics)) as (
        driver,
        host,
        _,
    ):
        await driver.rollout(0, prompts(1), group_size=1, sampling=SAMPLING)
        of_step = {"server/lost_s": 0.25, "server/phase_s/pause": 0.1}
        await host.set_gate("open", weight_version=4, metrics=of_step)
        await host.set_gate("holding", reason="the engines of another step are paused")
        await host.set_gate("open")
        await driver.rollout(1, prompts(1), group_size=1, sampling=SAMPLING)
    assert not any(name.startswith("server/") for name in found[0])
    assert found[1].items() >= of_step.items()
