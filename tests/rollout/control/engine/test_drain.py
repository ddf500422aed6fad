"""How an engine gets empty: the three ways of a drain, and what happens to one that does not."""

import asyncio
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.engine.faults import hang
from engines.fake.launcher import make_engine
from engines.launch import EngineSpec
from engines.protocol import Endpoint, GenerateReply, PauseMode, SamplingParams
from engines.protocol.errors import EngineRejected
from rollout.config import LifecycleConfig
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import PhaseFailed
from rollout.rules.lifecycle import Command
from tests.support.builders import RecordingRouter, make_group, push, started_group, started_server
from tests.support.virtual_time import pass_time, virtual_time

TOKENS = SamplingParams(max_new_tokens=10)


def slow(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    """Ten tokens take ten seconds; an aborted request takes forty more to leave."""
    return make_engine(spec, endpoint, token_s=1.0, drain_s=40.0)


async def slow_group(**lifecycle: Any) -> tuple[ServerGroup, FakeEngine]:
    group, launcher = make_group(1, launcher=FakeLauncher(slow), lifecycle=lifecycle)
    await group.start()
    return group, launcher["main-0"]


def asking(engine: FakeEngine) -> asyncio.Task[GenerateReply]:
    return asyncio.create_task(engine.generate(input_ids=[1], sampling_params=TOKENS))


def paused(engine: FakeEngine) -> list[PauseMode]:
    return [call.arguments["mode"] for call in engine.calls if call.operation == "pause_generation"]


@virtual_time
async def test_abort_ends_what_is_in_flight_with_the_tokens_it_has() -> None:
    group, engine = await slow_group(command_timeout_s=100)
    asked = asking(engine)
    await pass_time(3.5)
    await group.run(Command.PAUSE_GENERATION)
    assert len((await asked).output_ids) == 3
    assert paused(engine) == [PauseMode.ABORT]


@virtual_time
async def test_an_engine_that_is_busy_after_an_abort_is_aborted_again() -> None:
    group, engine = await slow_group(command_timeout_s=60)
    asked = asking(engine)
    await pass_time(0.5)
    await group.run(Command.PAUSE_GENERATION)
    assert paused(engine) == [PauseMode.ABORT, PauseMode.ABORT]
    assert (await asked).finish_reason is not None
    assert not engine.is_dead


@virtual_time
async def test_what_two_aborts_do_not_empty_is_killed_and_never_released() -> None:
    group, engine = await slow_group(command_timeout_s=30)
    asked = asking(engine)
    await pass_time(0.5)
    with pytest.raises(PhaseFailed, match="engine main-0: pause_generation took longer than 30 s"):
        await group.run(Command.PAUSE_GENERATION)
    with pytest.raises(Exception, match="killed"):
        await asked
    assert "release_memory_occupation" not in engine.operations()
    assert (await group.status()).engines[0].state == "fenced"


async def test_a_flush_that_is_refused_aborts_and_asks_again() -> None:
    group, (engine,) = await started_group(1)
    await group.run(Command.PAUSE_GENERATION)
    engine.fail_next("flush_cache", EngineRejected("1 request in flight", status=400))
    report = await group.run(Command.FLUSH_CACHE)
    assert not report.failures
    assert engine.operations()[-3:] == ["flush_cache", "abort_request", "flush_cache"]


async def test_a_flush_that_is_refused_twice_ends_the_engine() -> None:
    group, (engine,) = await started_group(1)
    await group.run(Command.PAUSE_GENERATION)
    for _ in range(2):
        engine.fail_next("flush_cache", EngineRejected("1 request in flight", status=400))
    with pytest.raises(
        PhaseFailed, match=r"main-0: flush_cache failed after .*: 1 request in flight"
    ):
        await group.run(Command.FLUSH_CACHE)
    assert engine.death_reason == "killed"


@virtual_time
async def test_retracted_requests_go_on_under_the_new_weights() -> None:
    group, engine = await slow_group(drain="retract")
    asked = asking(engine)
    await pass_time(3.5)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.ONLOAD_KV)
    await group.run(Command.CONTINUE_GENERATION)
    reply = await asked
    assert len(reply.output_ids) == 10
    assert [(span.version, span.start, span.end) for span in reply.weight_versions] == [
        ("0", 0, 3),
        ("1", 3, 10),
    ]
    assert paused(engine) == [PauseMode.RETRACT]
    assert engine.calls[-1].operation == "continue_generation"


async def test_a_retracted_engine_that_cannot_be_flushed_is_aborted() -> None:
    group, (engine,) = await started_group(1, lifecycle={"drain": "retract"})
    await group.run(Command.PAUSE_GENERATION)
    engine.fail_next("flush_cache", EngineRejected("1 request in flight", status=400))
    await group.run(Command.FLUSH_CACHE)
    assert paused(engine) == [PauseMode.RETRACT, PauseMode.ABORT]


async def test_finish_waits_for_requests_before_anything_is_paused(tmp_path: Any) -> None:
    bench = await started_server(tmp_path, lifecycle={"drain": "finish"})
    order: list[str] = []
    bench.router.drained = _noting(bench.router, order)  # type: ignore[method-assign]
    await bench.server.offload()
    paused_first = [paused(engine) for engine in bench.engines]
    assert order == ["holding"]
    assert paused_first == [[PauseMode.ABORT]] * 3


def _noting(router: RecordingRouter, order: list[str]) -> Any:
    async def drained(timeout_s: float, engine_id: str = "") -> None:
        order.append(router.gate)

    return drained


async def test_what_does_not_finish_in_time_is_aborted(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lifecycle = {"drain": "finish", "drain_timeout_s": 5}
    bench = await started_server(tmp_path, lifecycle=lifecycle)
    bench.router.late = "shared-0 has 2 requests in flight"
    await bench.server.offload()
    assert (await bench.server.status()).groups[0].phase == "offloaded"
    assert (
        "not drained within 5 s: shared-0 has 2 requests in flight; these requests are abort"
        in (caplog.text)
    )


@virtual_time
async def test_a_pause_that_is_never_answered_has_its_deadline() -> None:
    group, (engine,) = await started_group(1, lifecycle={"command_timeout_s": 20})
    engine.faults.strike("pause_generation", hang(), times=2)
    started = asyncio.get_running_loop().time()
    with pytest.raises(PhaseFailed, match="pause_generation took longer than 20 s"):
        await group.run(Command.PAUSE_GENERATION)
    assert asyncio.get_running_loop().time() - started == pytest.approx(20, abs=0.1)


def test_the_ways_of_a_drain_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="'abort', 'retract' or 'finish'"):
        LifecycleConfig.model_validate({"drain": "wait"})
