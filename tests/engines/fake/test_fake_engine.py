"""The fake ends, hangs, refuses and lies where SGLang 0.5.23 was seen to (engine facts 1-4)."""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from engines.fake import FakeEngine, FakeTensor, pack_tensors
from engines.fake.engine.fake_weights import (
    DEFAULT_TENSORS,
    checkpoint_tensors,
    checkpoint_vocabulary,
    write_checkpoint,
)
from engines.protocol import (
    GenerateReply,
    MemoryTag,
    PauseMode,
    SamplingParams,
    TensorInfo,
    VersionSpan,
)
from engines.protocol.errors import EngineRejected, EngineUnreachable
from tests.support.virtual_time import pass_time, virtual_time

ALL_TAGS = tuple(MemoryTag)
WEIGHTS, KV = (MemoryTag.WEIGHTS,), (MemoryTag.KV_CACHE,)


def payload(**tensors: FakeTensor) -> list[str]:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return [base64.b64encode(pack_tensors(named)).decode()]


async def running(engine: FakeEngine, **more) -> asyncio.Task[GenerateReply]:
    """A request in flight that does not end by itself."""
    engine.hold("generate")
    return await started(engine, **more)


async def started(engine: FakeEngine, **more) -> asyncio.Task[GenerateReply]:
    task = asyncio.create_task(engine.generate(input_ids=[1, 2], **more))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


# -- what ends it -------------------------------------------------------------------------------


async def release_twice(engine: FakeEngine) -> None:
    await engine.release_memory_occupation(KV)
    await engine.release_memory_occupation(ALL_TAGS)


async def resume_what_is_there(engine: FakeEngine) -> None:
    await engine.resume_memory_occupation(WEIGHTS)


async def resume_twice(engine: FakeEngine) -> None:
    await engine.release_memory_occupation(ALL_TAGS)
    await engine.resume_memory_occupation(WEIGHTS)
    await engine.resume_memory_occupation(WEIGHTS)


async def resume_all_when_some_are_released(engine: FakeEngine) -> None:
    await engine.release_memory_occupation(KV)
    await engine.resume_memory_occupation(())


async def generate_without_kv(engine: FakeEngine) -> None:
    await engine.release_memory_occupation(KV)
    await engine.generate(input_ids=[1])


async def generate_without_weights(engine: FakeEngine) -> None:
    await engine.release_memory_occupation(WEIGHTS)
    await engine.generate(input_ids=[1])


async def update_without_weights(engine: FakeEngine) -> None:
    await engine.release_memory_occupation(WEIGHTS)
    await engine.begin_weight_update()
    await engine.update_weights_from_tensor(payload(a=FakeTensor((1,))))


async def check_without_weights(engine: FakeEngine) -> None:
    await engine.release_memory_occupation(WEIGHTS)
    await engine.weights_checker()


async def update_with_a_wrong_shape(engine: FakeEngine) -> None:
    await engine.begin_weight_update()
    await engine.update_weights_from_tensor(payload(lm_head__weight=FakeTensor((1, 1))))


async def update_without_payload(engine: FakeEngine) -> None:
    await engine.begin_weight_update()
    await engine.update_weights_from_tensor([])


async def update_with_an_unreadable_payload(engine: FakeEngine) -> None:
    await engine.begin_weight_update()
    await engine.update_weights_from_tensor(["AAAA"])


async def a_token_outside_the_vocabulary(engine: FakeEngine) -> None:
    await engine.generate(input_ids=[1_000])


@pytest.mark.parametrize(
    "call",
    [
        release_twice,
        resume_what_is_there,
        resume_twice,
        resume_all_when_some_are_released,
        generate_without_kv,
        generate_without_weights,
        update_without_weights,
        check_without_weights,
        update_with_a_wrong_shape,
        update_without_payload,
        update_with_an_unreadable_payload,
        a_token_outside_the_vocabulary,
    ],
)
async def test_a_call_that_ends_sglang_ends_the_fake(
    call: Callable[[FakeEngine], Awaitable[None]],
) -> None:
    engine = FakeEngine()
    with pytest.raises(EngineUnreachable, match="connection broke") as caught:
        await call(engine)
    assert caught.value.maybe_executed
    with pytest.raises(EngineUnreachable, match="cannot connect") as later:
        await engine.model_info()
    assert not later.value.maybe_executed
    assert engine.resident_bytes == 0


@pytest.mark.parametrize("mode", [None, PauseMode.IN_PLACE])
async def test_release_while_a_request_runs_ends_it_and_the_request(mode) -> None:
    engine = FakeEngine()
    asking = await running(engine)
    if mode is not None:
        await engine.pause_generation(mode)
    with pytest.raises(EngineUnreachable):
        await engine.release_memory_occupation(ALL_TAGS)
    with pytest.raises(EngineUnreachable):
        await asking


async def test_release_after_a_retract_leaves_it_alive() -> None:
    engine = FakeEngine()
    asking = await running(engine)
    await engine.pause_generation(PauseMode.RETRACT)
    await engine.flush_cache()
    await engine.release_memory_occupation(KV)
    await engine.resume_memory_occupation(KV)
    await engine.continue_generation()
    await engine.abort_request()
    assert (await asking).finish_reason.kind == "abort"


async def test_requests_held_in_a_pause_end_an_engine_that_continues_too_early() -> None:
    engine = FakeEngine()
    await engine.pause_generation()
    held = await started(engine)
    await engine.release_memory_occupation(KV)
    await engine.continue_generation()
    with pytest.raises(EngineUnreachable):
        await held
    assert engine.death_reason == "generate while memory is released"


@virtual_time
async def test_abort_after_in_place_with_requests_is_a_deadlock_for_ever() -> None:
    engine = FakeEngine()
    asking = await running(engine)
    await engine.pause_generation(PauseMode.IN_PLACE)
    calls = [engine.pause_generation(), engine.continue_generation()]
    for call in calls:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 3600)
    engine.die("kill -9")
    with pytest.raises(EngineUnreachable):
        await asking


# -- pause, flush, abort ------------------------------------------------------------------------


async def test_pause_abort_ends_what_is_in_flight_and_keeps_its_tokens() -> None:
    engine = FakeEngine(token_s=1e9)
    asking = await started(engine)
    engine.in_flight[next(iter(engine.in_flight))].add_token("0", 1000)
    await engine.pause_generation()
    reply = await asking
    assert reply.finish_reason.kind == "abort"
    assert reply.output_ids == (3,)
    assert not engine.in_flight


async def test_new_requests_are_held_while_paused_and_answered_after_continue() -> None:
    engine = FakeEngine()
    await engine.pause_generation()
    held = await started(engine)
    assert (engine.num_held, engine.in_flight, held.done()) == (1, {}, False)
    assert not await engine.is_ready()
    await engine.continue_generation()
    assert (await held).finish_reason.kind == "length"
    assert engine.num_held == 0


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
@virtual_time
async def test_frozen_requests_go_on_where_they_were(mode: PauseMode) -> None:
    engine = FakeEngine(token_s=1.0)
    asking = await started(engine, sampling_params=SamplingParams(max_new_tokens=5))
    await pass_time(2.5)
    await engine.pause_generation(mode)
    await pass_time(100)
    assert len(next(iter(engine.in_flight.values())).output_ids) == 2
    await engine.update_weight_version("1")
    await engine.continue_generation()
    reply = await asking
    assert reply.weight_versions == (VersionSpan("0", 0, 2), VersionSpan("1", 2, 5))
    assert reply.output_ids == (3, 10, 17, 24, 31)


@virtual_time
async def test_a_reply_takes_a_moment_for_each_token() -> None:
    """So nothing is over, and no weights are pushed behind it, before its client waits for it."""
    asking = await started(FakeEngine(), sampling_params=SamplingParams(max_new_tokens=20))
    await pass_time(0.015)
    assert not asking.done()
    await pass_time(0.01)
    assert len((await asking).output_ids) == 20


async def test_flush_refuses_while_something_is_in_flight() -> None:
    engine = FakeEngine()
    asking = await running(engine)
    with pytest.raises(EngineRejected, match="1 requests in flight") as caught:
        await engine.flush_cache()
    assert caught.value.status == 400
    await engine.abort_request()
    await asking
    await engine.flush_cache()


@virtual_time
async def test_flush_with_a_timeout_waits_that_long_and_no_longer() -> None:
    engine = FakeEngine(token_s=1.0)
    loop = asyncio.get_running_loop()
    asking = await started(engine, sampling_params=SamplingParams(max_new_tokens=10))
    with pytest.raises(EngineRejected):
        await engine.flush_cache(timeout_s=4)
    assert loop.time() == pytest.approx(4)
    await engine.flush_cache(timeout_s=60)
    assert loop.time() == pytest.approx(10)
    assert (await asking).finish_reason.kind == "length"


async def test_abort_takes_every_id_that_starts_alike() -> None:
    engine = FakeEngine()
    one, ten, other = [await running(engine, rid=rid) for rid in ("p-1", "p-10", "q-1")]
    await engine.abort_request("p-1")
    assert [(await task).rid for task in (one, ten)] == ["p-1", "p-10"]
    assert not other.done()
    await engine.abort_request()
    await other


@virtual_time
async def test_an_abort_of_no_live_id_ends_nothing_whatever_begins_so() -> None:
    engine = FakeEngine()
    task = await running(engine, rid="p-1")
    for rid in ("p-", "p", "", "unknown"):
        await engine.abort_request(rid)
    await pass_time(1)
    assert not task.done()
    await engine.abort_request()
    await task


@virtual_time
async def test_the_id_of_a_stream_is_aborted_two_seconds_after_its_end() -> None:
    engine = FakeEngine()
    sampling = SamplingParams(max_new_tokens=1)
    assert [
        reply
        async for reply in engine.stream_generate(input_ids=[1], sampling_params=sampling, rid="p")
    ]
    begun_s = asyncio.get_running_loop().time()
    again, other = await running(engine, rid="p"), await running(engine, rid="q")
    reply = await again
    assert reply.finish_reason.kind == "abort"
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(2.0, abs=0.1)
    assert not other.done()
    await engine.abort_request()
    await other


async def test_a_live_request_id_may_not_be_used_again() -> None:
    engine = FakeEngine()
    asking = await running(engine, rid="p-1")
    with pytest.raises(EngineRejected, match="'p-1' is in flight"):
        await engine.generate(input_ids=[1], rid="p-1")
    await engine.abort_request()
    await asking


async def test_a_stream_gives_all_so_far_each_time_and_ends_with_a_reason() -> None:
    engine = FakeEngine()
    params = SamplingParams(max_new_tokens=3)
    replies = [one async for one in engine.stream_generate(text="ab", sampling_params=params)]
    assert [len(one.output_ids) for one in replies] == [1, 2, 3]
    assert [one.finish_reason is None for one in replies] == [True, True, False]
    assert not engine.in_flight


async def test_whoever_stops_listening_to_a_stream_frees_the_engine() -> None:
    engine = FakeEngine(token_s=0.0)
    stream = engine.stream_generate(input_ids=[1])
    await anext(stream)
    assert len(engine.in_flight) == 1
    await stream.aclose()
    assert not engine.in_flight


@virtual_time
async def test_a_health_check_in_a_pause_says_no_after_twenty_seconds() -> None:
    engine = FakeEngine()
    await engine.pause_generation()
    assert not await engine.is_healthy()
    assert asyncio.get_running_loop().time() == pytest.approx(20)


# -- memory and weights -------------------------------------------------------------------------


@pytest.mark.parametrize("backup", [True, False])
async def test_weights_are_garbage_after_a_resume_without_backup(backup: bool) -> None:
    engine = FakeEngine(weights_cpu_backup=backup)
    before = engine.weights.checksum()
    await engine.release_memory_occupation(ALL_TAGS)
    assert engine.resident_bytes == 0
    await engine.resume_memory_occupation(ALL_TAGS)
    assert engine.weights_are_garbage is not backup
    assert (engine.weights.checksum() == before) is backup
    assert engine.resident_bytes == 3_000


async def test_without_a_memory_saver_release_says_yes_and_frees_nothing() -> None:
    engine = FakeEngine(memory_saver=False)
    for _ in range(2):
        await engine.release_memory_occupation(ALL_TAGS)
    assert engine.resident_bytes == 3_000
    assert not engine.weights_are_garbage
    await engine.resume_memory_occupation(ALL_TAGS)
    assert not engine.is_dead


async def test_garbage_is_gone_when_every_tensor_has_been_written() -> None:
    engine = FakeEngine()
    await engine.release_memory_occupation(WEIGHTS)
    await engine.resume_memory_occupation(WEIGHTS)
    names = list(engine.weights.tensors)
    await engine.begin_weight_update()
    for name in names:
        assert engine.weights_are_garbage
        tensor = FakeTensor(engine.weights.tensors[name].shape)
        await engine.update_weights_from_tensor(payload(**{name: tensor}))
    assert not engine.weights_are_garbage


async def test_unknown_names_are_taken_in_silence() -> None:
    engine = FakeEngine()
    before = engine.weights.checksum()
    await engine.begin_weight_update()
    await engine.update_weights_from_tensor(payload(nobody=FakeTensor((1,))), weight_version="1")
    assert engine.weights.checksum() == before
    assert await engine.weight_version() == "1"


async def test_tensors_and_broadcasts_need_a_session_and_disk_does_not() -> None:
    engine = FakeEngine()
    await engine.init_weights_update_group(
        master_address="127.0.0.1",
        master_port=1,
        rank_offset=1,
        world_size=2,
        group_name="g",
        backend="gloo",
    )
    with pytest.raises(EngineRejected, match="only after begin_weight_update"):
        await engine.update_weights_from_tensor(payload(a=FakeTensor((1,))))
    with pytest.raises(EngineRejected, match="only after begin_weight_update"):
        await engine.update_weights_from_distributed(
            names=["lm_head.weight"], dtypes=["float32"], shapes=[[16, 8]], group_name="g"
        )
    await engine.update_weights_from_disk("/other", weight_version="2")
    assert (await engine.model_info()).model_path == "/other"
    assert await engine.weight_version() == "2"


async def test_a_session_is_begun_once_and_ended_once() -> None:
    engine = FakeEngine()
    with pytest.raises(EngineRejected, match="no weight update is open"):
        await engine.end_weight_update()
    await engine.begin_weight_update()
    with pytest.raises(EngineRejected, match="already open"):
        await engine.begin_weight_update()
    assert "/begin_weight_update" in await engine.endpoints()
    assert "/begin_weight_update" not in await FakeEngine(needs_session=False).endpoints()


async def test_flush_with_an_update_in_place_is_refused_though_the_weights_changed() -> None:
    engine = FakeEngine()
    asking = await running(engine)
    await engine.pause_generation(PauseMode.IN_PLACE)
    await engine.begin_weight_update()
    new = payload(lm_head__weight=FakeTensor((16, 8), 1.0))
    with pytest.raises(EngineRejected, match="weights changed"):
        await engine.update_weights_from_tensor(new, weight_version="1")
    assert await engine.weight_version() == "1"
    assert engine.is_cache_stale
    engine.die("over")
    with pytest.raises(EngineUnreachable):
        await asking


async def test_forgetting_the_last_flush_leaves_the_old_prefix_cache() -> None:
    engine = FakeEngine()
    await engine.begin_weight_update()
    new = payload(lm_head__weight=FakeTensor((16, 8), 1.0))
    await engine.update_weights_from_tensor(new, flush_cache=False)
    assert engine.is_cache_stale
    await engine.flush_cache()
    assert not engine.is_cache_stale


async def test_the_checker_tells_whether_weights_are_what_they_were() -> None:
    engine = FakeEngine()
    first = await engine.weights_checker()
    await engine.weights_checker("snapshot")
    await engine.weights_checker("compare")
    with pytest.raises(EngineRejected, match="no snapshot"):
        await engine.weights_checker("compare")
    await engine.weights_checker("snapshot")
    await engine.weights_checker("reset_tensors")
    with pytest.raises(EngineRejected, match="differ from the snapshot"):
        await engine.weights_checker("compare")
    assert (await engine.weights_checker()).checksum != first.checksum
    assert engine.weights_are_garbage


async def test_an_adapter_is_loaded_once_and_unloaded_once() -> None:
    engine = FakeEngine()
    await engine.load_lora_adapter("a", "/adapter")
    with pytest.raises(EngineRejected, match="already loaded"):
        await engine.load_lora_adapter_from_tensors("a", {}, [])
    await engine.unload_lora_adapter("a")
    with pytest.raises(EngineRejected, match="no adapter 'a'"):
        await engine.unload_lora_adapter("a")


async def test_the_manifest_lists_the_tensors_it_was_made_with() -> None:
    engine = FakeEngine()
    assert [one.name for one in await engine.weights_manifest()] == list(engine.weights.tensors)


# -- what a test has in store for it ------------------------------------------------------------


async def test_a_gate_holds_a_call_before_it_does_anything() -> None:
    engine = FakeEngine()
    gate = engine.hold("pause_generation")
    pausing = asyncio.create_task(engine.pause_generation())
    await gate.entered.wait()
    assert (engine.paused, gate.num_waiting) == (None, 1)
    gate.open()
    await pausing
    assert (engine.paused, gate.num_waiting) == (PauseMode.ABORT, 0)


async def test_a_call_that_is_held_when_the_engine_ends_gets_a_broken_connection() -> None:
    engine = FakeEngine()
    gate = engine.hold("flush_cache")
    flushing = asyncio.create_task(engine.flush_cache())
    await gate.entered.wait()
    engine.die("kill -9")
    with pytest.raises(EngineUnreachable, match="kill -9"):
        await flushing


async def test_a_planned_failure_does_nothing_and_is_used_up() -> None:
    engine = FakeEngine()
    engine.fail_next("pause_generation", EngineRejected("no", status=500))
    with pytest.raises(EngineRejected):
        await engine.pause_generation()
    assert engine.paused is None
    await engine.pause_generation()
    assert engine.paused is PauseMode.ABORT


async def test_a_lost_answer_comes_after_the_effect() -> None:
    engine = FakeEngine()
    engine.lose_next_answer("release_memory_occupation")
    with pytest.raises(EngineUnreachable) as caught:
        await engine.release_memory_occupation(KV)
    assert caught.value.maybe_executed
    assert engine.released == set(KV)
    assert not engine.is_dead
    await engine.resume_memory_occupation(KV)


async def test_a_lost_generation_is_no_longer_in_flight() -> None:
    engine = FakeEngine()
    engine.lose_next_answer("generate")
    with pytest.raises(EngineUnreachable, match="its answer was lost"):
        await engine.generate(input_ids=[1])
    assert not engine.in_flight


@virtual_time
async def test_every_call_is_recorded_with_its_time() -> None:
    engine = FakeEngine()
    await engine.pause_generation(PauseMode.RETRACT)
    await pass_time(5)
    await engine.release_memory_occupation(KV)
    first, second = engine.calls
    assert (first.operation, first.arguments) == ("pause_generation", {"mode": PauseMode.RETRACT})
    assert second.arguments == {"tags": KV}
    assert second.at_s - first.at_s == pytest.approx(5)


# -- its model ----------------------------------------------------------------------------------


def test_the_model_of_a_fake_is_its_checkpoint(tmp_path: Path) -> None:
    tensors = (TensorInfo("a", "bfloat16", (3, 5)), TensorInfo("b", "float32", (7,)))
    write_checkpoint(tmp_path, tensors)
    assert set(checkpoint_tensors(tmp_path)) == set(tensors)
    assert checkpoint_vocabulary(tmp_path, 1000) == 1000
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 300}}')
    assert checkpoint_vocabulary(tmp_path, 1000) == 300
    (tmp_path / "config.json").write_text('{"vocab_size": 200}')
    assert checkpoint_vocabulary(tmp_path, 1000) == 200


def test_without_a_checkpoint_a_fake_has_three_tensors(tmp_path: Path) -> None:
    assert checkpoint_tensors(tmp_path / "none") == DEFAULT_TENSORS
    assert checkpoint_vocabulary(tmp_path / "none", 1000) == 1000
