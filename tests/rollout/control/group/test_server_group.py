"""One group over fake engines: what is sent, to whom, and what a failure leaves behind."""

import asyncio
import json
import logging
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.engine.faults import hang
from engines.launch import EngineSpec
from engines.protocol import Endpoint, MemoryTag, PauseMode, ServerInfo, WorkerType
from engines.protocol.errors import EngineNotReady, EngineRejected, EngineUnreachable
from rollout.control.engine.probe import Probe
from rollout.control.group.server_group import ServerGroup
from rollout.control.server.gate_control import member
from rollout.core.errors import ConfigError, LifecycleError, PhaseFailed, WeightsUnavailable
from rollout.rules.lifecycle import Command
from rollout.weights.push.weight_push import WeightPush
from tests.support.builders import (
    TENSOR_NAMES,
    make_group,
    manifest,
    push,
    started_group,
    write_checkpoint,
)
from tests.support.virtual_time import pass_time, virtual_time

# What start asks an engine; a test of a later command looks past it.
ASKED_AT_START = 3


def sent(engine: FakeEngine) -> list[str]:
    return engine.operations()[ASKED_AT_START:]


async def offload(group: ServerGroup) -> None:
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(Command.RELEASE_MEMORY_OCCUPATION)


async def phase_of(group: ServerGroup) -> str:
    return (await group.status()).phase


async def states_of(group: ServerGroup) -> list[str]:
    return [engine.state for engine in (await group.status()).engines]


async def test_the_first_engine_that_does_not_start_ends_the_starts_of_the_others() -> None:
    group, launcher = make_group(3)
    launcher.hold("main-0")  # it would load for minutes
    launcher.fail_next("main-1", EngineNotReady("no such option"))
    with pytest.raises(PhaseFailed) as caught:
        await asyncio.wait_for(group.start(), 10)
    assert [failure.engine_id for failure in caught.value.failures] == ["main-1"]
    assert "no such option" in str(caught.value)
    assert launcher["main-2"].is_dead


async def settled(*started: Awaitable) -> None:
    """Let what was started get as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


# -- the whole way ------------------------------------------------------------------------------


async def test_a_step_sends_each_engine_its_calls_in_the_order_that_works() -> None:
    group, engines = await started_group()
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1, num_buckets=2))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.ONLOAD_KV)
    await group.run(Command.CONTINUE_GENERATION)
    for engine in engines:
        assert sent(engine) == [
            "pause_generation",
            "flush_cache",
            "release_memory_occupation",
            "resume_memory_occupation",
            "begin_weight_update",
            "update_weight_version",
            "update_weights_from_tensor",
            "update_weights_from_tensor",
            "end_weight_update",
            "weight_version",
            "weights_checker",
            "resume_memory_occupation",
            "continue_generation",
        ]
        assert not engine.weights_are_garbage
        assert not engine.released
    assert await states_of(group) == ["serving", "serving"]


async def test_requests_in_flight_are_aborted_before_the_memory_goes() -> None:
    group, (engine,) = await started_group(1)
    engine.hold("generate")
    asking = asyncio.create_task(engine.generate(input_ids=[1]))
    await settled()
    await offload(group)
    assert (await asking).finish_reason.kind == "abort"
    assert engine.calls[ASKED_AT_START + 1].arguments == {"mode": PauseMode.ABORT}
    assert engine.released == set(MemoryTag)


async def test_a_release_reports_what_came_free() -> None:
    group, _ = await started_group()
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    report = await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert report.freed_bytes == 6_000
    assert [one.freed_bytes for one in report.engines] == [3_000, 3_000]
    assert (await group.status()).engines[0].resident_bytes == 0


async def test_a_repeated_command_sends_nothing() -> None:
    group, (engine,) = await started_group(1)
    await offload(group)
    before = sent(engine)
    report = await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert sent(engine) == before
    assert (report.phase, report.engines, report.freed_bytes) == ("offloaded", (), 0)


async def test_a_command_that_is_not_legal_reaches_no_engine() -> None:
    group, (engine,) = await started_group(1)
    with pytest.raises(
        LifecycleError,
        match="cannot release_memory_occupation while serving; legal now: pause_generation",
    ):
        await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert sent(engine) == []


async def test_a_stale_order_is_refused() -> None:
    group, (engine,) = await started_group(1)
    await group.run(Command.PAUSE_GENERATION, 2)
    with pytest.raises(LifecycleError, match="command 1 came after command 2"):
        await group.run(Command.FLUSH_CACHE, 1)
    with pytest.raises(LifecycleError, match="command 2 came after command 2"):
        await group.run(Command.FLUSH_CACHE, 2)
    await group.run(Command.FLUSH_CACHE, 3)
    assert sent(engine) == ["pause_generation", "flush_cache"]


async def test_the_engine_itself_waits_a_little_less_than_its_first_half_of_the_phase() -> None:
    group, (engine,) = await started_group(1, lifecycle={"command_timeout_s": 30})
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    assert engine.calls[-1].arguments == {"timeout_s": 13.0}


async def test_a_group_that_keeps_its_gpus_is_updated_and_never_released() -> None:
    group, (engine,) = await started_group(1, needs_offload=False)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    with pytest.raises(LifecycleError, match="cannot release_memory_occupation while flushed"):
        await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.CONTINUE_GENERATION)
    assert "release_memory_occupation" not in sent(engine)
    assert "resume_memory_occupation" not in sent(engine)


# -- an engine fails ----------------------------------------------------------------------------


async def test_siblings_finish_when_one_fails_and_only_it_is_fenced_and_killed() -> None:
    group, launcher = make_group(3)
    await group.start()
    gate = launcher["main-2"].hold("pause_generation")
    launcher["main-0"].fail_next("pause_generation", EngineUnreachable("connection broke"))
    pausing = asyncio.create_task(group.run(Command.PAUSE_GENERATION))
    await gate.entered.wait()
    await settled()
    assert not pausing.done()
    gate.open()
    report = await pausing
    assert [one.engine_id for one in report.failures] == ["main-0"]
    assert await states_of(group) == ["fenced", "paused", "paused"]
    assert [one.num_kills for one in launcher.processes.values()] == [1, 0, 0]


async def test_a_fenced_engine_gets_no_further_call() -> None:
    group, (bad, good) = await started_group()
    bad.fail_next("pause_generation", EngineUnreachable("connection broke"))
    await offload(group)
    assert sent(bad) == ["pause_generation"]
    assert good.released == set(MemoryTag)
    assert bad.num_closed == 1


@virtual_time
async def test_a_late_engine_is_told_with_operation_and_budget_and_killed() -> None:
    group, launcher = make_group(2, lifecycle={"memory_timeout_s": 60})
    await group.start()
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    launcher["main-1"].hold("release_memory_occupation")
    report = await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert (
        report.failures[0].failure
        == "engine main-1: release_memory_occupation took longer than 60 s"
    )
    assert (await group.status()).engines[1].fence_reason == report.failures[0].failure
    assert launcher.processes["main-1"].num_kills == 1


async def test_a_lost_answer_is_never_followed_by_the_same_call() -> None:
    group, (uncertain, good) = await started_group()
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    uncertain.lose_next_answer("release_memory_occupation")
    await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert uncertain.operations().count("release_memory_occupation") == 1
    assert uncertain.death_reason == "killed"
    assert not good.is_dead


async def test_below_the_fewest_engines_the_phase_fails_and_the_group_is_where_the_others_are() -> (
    None
):
    group, (bad, good) = await started_group(min_engines=2)
    await group.run(Command.PAUSE_GENERATION)
    bad.fail_next("flush_cache", EngineRejected("broken", status=500))
    message = "1 of 2 engines left, 2 needed; the group is flushed"
    with pytest.raises(PhaseFailed, match=message) as caught:
        await group.run(Command.FLUSH_CACHE)
    assert [failure.engine_id for failure in caught.value.failures] == ["main-0"]
    assert await phase_of(group) == "flushed"
    assert sent(good) == ["pause_generation", "flush_cache"]


async def test_with_raise_one_failure_stops_the_phase_after_all_siblings_finished() -> None:
    group, (bad, good) = await started_group(lifecycle={"on_failure": "raise"}, min_engines=0)
    bad.fail_next("pause_generation", EngineUnreachable("connection broke"))
    with pytest.raises(PhaseFailed, match="engine main-0: pause_generation failed"):
        await group.run(Command.PAUSE_GENERATION)
    assert good.paused is PauseMode.ABORT
    assert await phase_of(group) == "paused"


async def test_a_group_without_any_engine_left_never_goes_on() -> None:
    group, engines = await started_group()
    for engine in engines:
        engine.die("kill -9")
    with pytest.raises(PhaseFailed, match="0 of 2 engines left, 1 needed") as caught:
        await group.run(Command.PAUSE_GENERATION)
    assert len(caught.value.failures) == 2


async def test_after_a_half_failed_release_the_sibling_is_not_released_twice() -> None:
    group, (bad, good) = await started_group(lifecycle={"on_failure": "raise"}, min_engines=1)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    bad.fail_next("release_memory_occupation", EngineUnreachable("connection broke"))
    with pytest.raises(PhaseFailed):
        await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert sent(good).count("release_memory_occupation") == 1
    assert not good.is_dead
    assert await phase_of(group) == "offloaded"


@pytest.mark.parametrize("command", ["continue_generation", "update"])
async def test_after_a_half_failed_release_an_empty_engine_neither_serves_nor_is_updated(
    command: str,
) -> None:
    group, (bad, good) = await started_group(lifecycle={"on_failure": "raise"}, min_engines=1)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    bad.fail_next("release_memory_occupation", EngineUnreachable("connection broke"))
    with pytest.raises(PhaseFailed):
        await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    with pytest.raises(LifecycleError, match="while offloaded; legal now: onload_weights"):
        await (
            group.run(Command.CONTINUE_GENERATION)
            if command == "continue_generation"
            else group.run(Command.UPDATE_WEIGHTS, push=push(1))
        )
    assert not good.is_dead
    assert sent(good)[-1] == "release_memory_occupation"


async def test_an_engine_whose_client_cannot_be_closed_is_killed_all_the_same(monkeypatch) -> None:
    group, launcher = make_group(2)
    await group.start()

    async def fail() -> None:
        raise RuntimeError("closed twice")

    monkeypatch.setattr(launcher["main-0"], "aclose", fail)
    launcher["main-0"].fail_next("pause_generation", EngineUnreachable("connection broke"))
    await group.run(Command.PAUSE_GENERATION)
    assert launcher.processes["main-0"].num_kills == 1
    assert await states_of(group) == ["fenced", "paused"]
    launcher["main-1"].die("kill -9")
    await group.stop()
    assert all(process.is_stopped for process in launcher.processes.values())


# -- weights: fail closed -----------------------------------------------------------------------


async def test_full_weights_without_a_backup_need_a_push_before_anything_else() -> None:
    group, (engine,) = await started_group(1)
    await offload(group)
    assert (await group.status()).engines[0].weight_version is None
    await group.run(Command.ONLOAD_WEIGHTS)
    assert engine.weights_are_garbage
    with pytest.raises(LifecycleError, match="cannot verify while weights_onloaded"):
        await group.run(Command.VERIFY, version=0)
    with pytest.raises(LifecycleError, match="cannot continue_generation while weights_onloaded"):
        await group.run(Command.CONTINUE_GENERATION)
    assert "continue_generation" not in sent(engine)


@pytest.mark.parametrize(
    ("update", "backup"), [("frozen", None), ("partial", None), ("lora", None), ("full", True)]
)
async def test_weights_with_a_backup_come_back_without_a_push(update: str, backup) -> None:
    group, (engine,) = await started_group(1, update=update, engine={"weights_cpu_backup": backup})
    before = engine.weights.checksum()
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.VERIFY, version=0)
    await group.run(Command.ONLOAD_KV)
    await group.run(Command.CONTINUE_GENERATION)
    assert engine.weights.checksum() == before
    assert await phase_of(group) == "serving"


async def test_a_frozen_group_is_never_updated() -> None:
    group, (engine,) = await started_group(1, update="frozen")
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    with pytest.raises(LifecycleError, match="cannot update_weights while flushed"):
        await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    assert "begin_weight_update" not in sent(engine)


async def test_an_engine_that_misses_a_bucket_is_fenced_with_its_session_closed() -> None:
    group, (bad, good) = await started_group()
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    bad.fail_next("update_weights_from_tensor", EngineRejected("no", status=400))
    await group.run(Command.UPDATE_WEIGHTS, push=push(1, num_buckets=3))
    assert sent(bad)[-2:] == ["update_weights_from_tensor", "end_weight_update"]
    assert [one.weight_version for one in (await group.status()).engines] == [None, 1]
    assert await states_of(group) == ["fenced", "weights_updated"]
    assert good.weights.lost == set()


async def lost_bucket() -> bytes:
    raise WeightsUnavailable("the trainer is gone")


@pytest.mark.parametrize("needs_offload", [True, False])
async def test_a_push_that_breaks_off_can_neither_be_verified_nor_served(needs_offload) -> None:
    group, (engine,) = await started_group(1, needs_offload=needs_offload)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    if needs_offload:
        await group.run(Command.RELEASE_MEMORY_OCCUPATION)
        await group.run(Command.ONLOAD_WEIGHTS)
    half = WeightPush(1, manifest(), [push(1, num_buckets=2).buckets[0], lost_bucket()])
    with pytest.raises(WeightsUnavailable):
        await group.run(Command.UPDATE_WEIGHTS, push=half)
    assert not engine.is_updating
    assert (await group.status()).engines[0].weight_version is None
    for command in (Command.VERIFY, Command.CONTINUE_GENERATION):
        with pytest.raises(LifecycleError):
            await group.run(command, version=1)
    assert "continue_generation" not in sent(engine)
    assert not engine.is_dead


async def test_after_a_push_that_broke_off_a_whole_one_mends_it() -> None:
    group, (engine,) = await started_group(1, needs_offload=False)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    with pytest.raises(WeightsUnavailable):
        await group.run(Command.UPDATE_WEIGHTS, push=WeightPush(1, manifest(), [lost_bucket()]))
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.CONTINUE_GENERATION)
    assert engine.paused is None


async def test_new_weights_that_one_sibling_missed_are_not_served_unverified() -> None:
    group, (bad, good) = await started_group(
        needs_offload=False, min_engines=1, lifecycle={"on_failure": "raise"}
    )
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    bad.fail_next("begin_weight_update", EngineUnreachable("connection broke"))
    with pytest.raises(PhaseFailed):
        await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    with pytest.raises(LifecycleError, match="cannot continue_generation while weights_updated"):
        await group.run(Command.CONTINUE_GENERATION)
    assert good.paused is PauseMode.ABORT


async def test_verify_asks_the_engine_and_not_only_the_record() -> None:
    group, (liar, good) = await started_group(needs_offload=False)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await liar.update_weight_version("0")
    report = await group.run(Command.VERIFY, version=1)
    assert "it reports weight version '0', not '1'" in report.failures[0].failure
    assert not good.is_dead


async def test_verifying_a_version_that_no_engine_was_given_kills_nobody() -> None:
    group, engines = await started_group(needs_offload=False)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    with pytest.raises(LifecycleError, match="weight version 2 reached no engine"):
        await group.run(Command.VERIFY, version=2)
    assert not any(engine.is_dead for engine in engines)
    await group.run(Command.VERIFY, version=1)


# -- start and stop -----------------------------------------------------------------------------


async def test_a_spec_carries_what_the_policy_decided() -> None:
    group, launcher = make_group(1, update="lora", engine={"options": {"tp": 2}})
    await group.start()
    spec = launcher.specs[0]
    assert (spec.engine_id, spec.memory_saver, spec.weights_cpu_backup) == ("main-0", True, True)
    assert spec.options == {"tp": 2}


async def test_a_start_that_fails_stops_what_was_started_and_shows_the_log() -> None:
    group, launcher = make_group(3)
    error = EngineNotReady("engine main-1: exited with status 1; CUDA out of memory")
    launcher.fail_next("main-1", error)
    with pytest.raises(PhaseFailed, match="CUDA out of memory") as caught:
        await group.start()
    assert caught.value.failures[0].__cause__ is error
    assert sorted(launcher.processes) == ["main-0", "main-2"]
    assert all(process.is_stopped for process in launcher.processes.values())


async def test_a_cancelled_start_leaves_nothing_running() -> None:
    group, launcher = make_group(2)
    gate = launcher.hold("main-1")
    starting = asyncio.create_task(group.start())
    await gate.entered.wait()
    starting.cancel()
    await settled()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(process.is_stopped for process in launcher.processes.values())


async def test_a_group_that_is_stopped_while_it_starts_leaves_nothing_running() -> None:
    group, launcher = make_group(2)
    gate = launcher.hold("main-1")
    starting = asyncio.create_task(group.start())
    await gate.entered.wait()
    await settled()
    await group.stop()
    gate.open()
    with pytest.raises(PhaseFailed, match="stopped while it started"):
        await starting
    assert all(process.is_stopped for process in launcher.processes.values())


async def test_an_engine_without_a_memory_saver_cannot_offload() -> None:
    launcher = FakeLauncher(
        lambda spec, endpoint: FakeEngine(spec.engine_id, endpoint=endpoint, memory_saver=False)
    )
    group, _ = make_group(1, launcher=launcher)
    with pytest.raises(PhaseFailed, match="runs without a memory saver") as caught:
        await group.start()
    assert isinstance(caught.value.failures[0].__cause__, ConfigError)
    assert launcher.processes["main-0"].is_stopped


async def test_an_older_engine_is_updated_without_a_session() -> None:
    launcher = FakeLauncher(
        lambda spec, endpoint: FakeEngine(spec.engine_id, endpoint=endpoint, needs_session=False)
    )
    group, (engine,) = await started_group(1, needs_offload=False, launcher=launcher)
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    assert sent(engine)[-1] == "update_weights_from_tensor"


async def test_stop_ends_every_engine_and_may_be_repeated() -> None:
    group, launcher = make_group(2)
    await group.start()
    await group.stop()
    await group.stop()
    assert all(process.is_stopped for process in launcher.processes.values())
    assert (await group.status()).engines == ()


async def test_stop_tells_which_engine_would_not_end(monkeypatch, caplog) -> None:
    group, launcher = make_group(2)
    await group.start()

    async def fail(grace_s: float) -> bool:
        raise EngineUnreachable("processes still there after SIGKILL: 4711")

    monkeypatch.setattr(launcher.processes["main-0"], "stop", fail)
    with caplog.at_level(logging.ERROR):
        await group.stop()
    assert "engine main-0: stop failed" in caplog.text
    assert "4711" in caplog.text
    assert launcher.processes["main-1"].is_stopped


async def test_a_group_that_is_stopped_under_a_command_never_reaches_its_target() -> None:
    group, (engine,) = await started_group(1)
    gate = engine.hold("pause_generation")
    pausing = asyncio.create_task(group.run(Command.PAUSE_GENERATION))
    await gate.entered.wait()
    await group.stop()
    with pytest.raises(PhaseFailed, match="was stopped"):
        await pausing
    assert await phase_of(group) == "serving"


async def test_a_cancelled_command_is_carried_to_its_end_and_its_failures_are_fenced() -> None:
    group, (bad, good) = await started_group()
    gate = good.hold("pause_generation")
    bad.fail_next("pause_generation", EngineUnreachable("connection broke"))
    pausing = asyncio.create_task(group.run(Command.PAUSE_GENERATION))
    await gate.entered.wait()
    pausing.cancel()
    await settled()
    assert not pausing.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert await states_of(group) == ["fenced", "paused"]


async def test_a_command_waits_for_the_one_that_is_still_under_way() -> None:
    group, (engine,) = await started_group(1)
    await group.run(Command.PAUSE_GENERATION, order=1)
    gate = engine.hold("continue_generation")
    exclusive = asyncio.create_task(group.run(Command.CONTINUE_GENERATION, order=2))
    await gate.entered.wait()
    pausing = asyncio.create_task(group.run(Command.PAUSE_GENERATION, order=3))
    await settled()
    assert not pausing.done()
    gate.open()
    assert (await exclusive).phase == "serving"
    assert (await pausing).phase == await phase_of(group) == "paused"


class TwoStages(FakeEngine):
    """Has its layers on two pipeline stages."""

    async def server_info(self) -> ServerInfo:
        return replace(await super().server_info(), raw={"pp_size": 2})


def in_two_stages(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return TwoStages(spec.engine_id, endpoint=endpoint)


async def test_an_engine_with_pipeline_stages_is_not_in_a_group_of_broadcasts() -> None:
    group, _ = make_group(1, transport="distributed", launcher=FakeLauncher(in_two_stages))
    with pytest.raises(PhaseFailed, match="engine main-0: it has 2 pipeline stages"):
        await group.start()
    group, _ = make_group(1, launcher=FakeLauncher(in_two_stages))
    await group.start()
    await group.stop()


@pytest.mark.parametrize(("reported", "expected"), [(10_123, 10_123), (None, 8998)])
async def test_the_router_gets_the_bootstrap_port_that_a_prefill_engine_reports(
    reported: int | None, expected: int
) -> None:
    class Prefill(FakeEngine):
        async def server_info(self) -> ServerInfo:
            found = await super().server_info()
            return replace(found, raw={"disaggregation_bootstrap_port": reported})

    def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        return Prefill(spec.engine_id, endpoint=endpoint)

    group, _ = make_group(1, launcher=FakeLauncher(make))
    await group.start()
    (engine,) = (await group.status()).engines
    assert member(WorkerType.PREFILL, engine, {}, 0).bootstrap_port == expected
    await group.stop()


async def test_one_whose_last_stage_could_keep_an_old_head_is_refused(tmp_path: Path) -> None:
    """A partial push may have the embedding alone, and the checkpoint has the tied head too."""
    model_path = write_checkpoint(tmp_path)
    config = {"model_type": "qwen3", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: Any = {"model_path": model_path, "needs_offload": False}
    launcher = FakeLauncher(in_two_stages)
    group, _ = make_group(1, update="partial", launcher=launcher, **settings)
    with pytest.raises(PhaseFailed, match=r"engine main-0: 2 pipeline stages of .* push lm_head"):
        await group.start()
    group, _ = make_group(1, launcher=FakeLauncher(in_two_stages), **settings)
    await group.start()
    await group.stop()


# -- fingerprints -------------------------------------------------------------------------------


class Forgetful(FakeEngine):
    """Says that it backs its weights up, and does not."""

    async def server_info(self) -> ServerInfo:
        return replace(await super().server_info(), enable_weights_cpu_backup=True)


def forgetful(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return Forgetful(spec.engine_id, endpoint=endpoint)


async def test_a_base_that_came_back_as_garbage_is_found_and_its_engines_fenced() -> None:
    group, launcher = make_group(2, update="lora", launcher=FakeLauncher(forgetful))
    await group.start()
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    with pytest.raises(PhaseFailed, match="is not what it was before, and was not pushed"):
        await group.run(Command.VERIFY, version=0)
    assert await states_of(group) == ["fenced", "fenced"]
    assert all(process.is_stopped for process in launcher.processes.values())


async def test_a_base_that_was_backed_up_is_proved() -> None:
    group, engines = await started_group(2, update="lora")
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.VERIFY, version=0)
    await group.run(Command.ONLOAD_KV)
    await group.run(Command.CONTINUE_GENERATION)
    assert not any(engine.weights_are_garbage for engine in engines)


async def test_an_engine_whose_push_differs_from_the_others_is_outvoted() -> None:
    group, engines = await started_group(3)
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    engines[1].weights.digests[TENSOR_NAMES[0]] = "torn"
    report = await group.run(Command.VERIFY, version=1)
    assert [one.engine_id for one in report.failures] == ["main-1"]
    said = report.failures[0].failure
    assert f"tensor '{TENSOR_NAMES[0]}' differs from engine main-0 and 1 more" in said
    assert await states_of(group) == ["verified", "fenced", "verified"]


# -- the memory is measured ---------------------------------------------------------------------

MIB = 1024 * 1024


class Hoarder(FakeEngine):
    """Answers a release with yes, and keeps most of the memory."""

    @property
    def resident_bytes(self) -> int:
        return 900 * MIB - (100 * MIB if self.released else 0)


async def test_an_engine_that_keeps_its_memory_is_fenced_before_the_trainer_gets_it(
    tmp_path: Path,
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as checkpoint:
        checkpoint.truncate(600 * MIB)
    launcher = FakeLauncher(
        lambda spec, endpoint: (Hoarder if spec.engine_id == "main-1" else FakeEngine)(
            spec.engine_id, endpoint=endpoint, memory_bytes=900 * MIB
        )
    )
    group, _ = make_group(2, launcher=launcher, model_path=str(tmp_path))
    await group.start()
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    report = await group.run(Command.RELEASE_MEMORY_OCCUPATION)
    assert [one.engine_id for one in report.failures] == ["main-1"]
    said = report.failures[0].failure
    assert "engine main-1: release_memory_occupation failed" in said
    assert "freed 100 MiB, at least 268 MiB must be freed; 800 MiB are still in use" in said
    assert launcher.processes["main-1"].is_stopped
    assert report.freed_bytes == 900 * MIB


# -- many engines -------------------------------------------------------------------------------


async def test_a_command_asks_once_for_all_engines_whether_any_needs_the_logprob_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, _ = await started_group(16)
    await offload(group)
    await group.run(Command.ONLOAD_WEIGHTS)
    await group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await group.run(Command.VERIFY, version=1)
    await group.run(Command.ONLOAD_KV)
    asked = []
    monkeypatch.setattr(Probe, "any_pending", lambda self, members: asked.append(members))
    await group.run(Command.CONTINUE_GENERATION)
    assert len(asked) == 1


# -- one deadline, handed down --------------------------------------------------------------------


@virtual_time
async def test_engines_have_what_is_left_of_the_phase() -> None:
    group, (hanging,) = await started_group(1)
    hanging.faults.strike("pause_generation", hang(), times=2)
    with pytest.raises(PhaseFailed, match=r"main-0: pause_generation took longer than 7 s"):
        await group.run(Command.PAUSE_GENERATION, budget_s=7.0)


@virtual_time
async def test_a_command_whose_turn_comes_too_late_reaches_no_engine() -> None:
    group, (busy,) = await started_group(1)
    busy.faults.strike("pause_generation", hang(), times=2)
    first = asyncio.create_task(group.run(Command.PAUSE_GENERATION, budget_s=60.0))
    await pass_time(1.0)
    before = sent(busy)
    with pytest.raises(PhaseFailed, match=r"flush_cache has not begun after 10 s, and no engine"):
        await group.run(Command.FLUSH_CACHE, budget_s=20.0)
    assert sent(busy) == before
    with pytest.raises(PhaseFailed, match="took longer than 60 s"):
        await first


@virtual_time
async def test_the_time_before_its_turn_is_not_given_to_a_command_again() -> None:
    group, (engine,) = await started_group(1)
    engine.faults.strike("flush_cache", hang())
    await group.run(Command.PAUSE_GENERATION)
    async with group._commands.turn:
        late = asyncio.create_task(group.run(Command.FLUSH_CACHE, budget_s=20.0))
        await pass_time(8.0)
    began = asyncio.get_running_loop().time()
    with pytest.raises(PhaseFailed, match="flush_cache took longer than 12 s"):
        await late
    assert asyncio.get_running_loop().time() - began == pytest.approx(12.0, abs=0.2)
