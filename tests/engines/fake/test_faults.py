"""Each fault of the fake strikes at its moment, does what it says and is then used up."""

import asyncio

import pytest

from engines.fake import FakeEngine, FakeLauncher, faults
from engines.fake.engine.faults import OPERATIONS, parse_fault
from engines.launch import EngineSpec
from engines.protocol import MemoryTag, PauseMode, SamplingParams
from engines.protocol.errors import EngineRejected, EngineUnreachable
from tests.support.virtual_time import pass_time, virtual_time

KV = (MemoryTag.KV_CACHE,)


def struck(operation: str, fault: faults.Fault, **when: int) -> FakeEngine:
    engine = FakeEngine()
    engine.faults.strike(operation, fault, **when)
    return engine


async def test_a_rejected_call_does_nothing_and_the_next_one_is_well() -> None:
    engine = struck("release_memory_occupation", faults.reject())
    with pytest.raises(EngineRejected, match="answered 502: Bad Gateway") as caught:
        await engine.release_memory_occupation(KV)
    assert (caught.value.status, engine.released) == (502, set())
    await engine.release_memory_occupation(KV)
    assert engine.released == set(KV)


@pytest.mark.parametrize("executed", [True, False])
async def test_a_lost_answer_says_nothing_about_whether_the_call_was_carried_out(executed) -> None:
    engine = struck("release_memory_occupation", faults.lose(executed=executed))
    with pytest.raises(EngineUnreachable) as caught:
        await engine.release_memory_occupation(KV)
    assert caught.value.maybe_executed
    assert bool(engine.released) is executed
    assert not engine.is_dead


@pytest.mark.parametrize("executed", [True, False])
async def test_a_death_at_a_call_breaks_its_connection(executed) -> None:
    engine = struck("pause_generation", faults.die(executed=executed))
    with pytest.raises(EngineUnreachable, match="a planned death in pause_generation"):
        await engine.pause_generation()
    assert engine.is_dead
    assert (engine.paused is not None) is executed


@pytest.mark.parametrize("executed", [True, False])
@virtual_time
async def test_a_hanging_call_is_never_answered_and_others_are(executed) -> None:
    engine = struck("flush_cache", faults.hang(executed=executed))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.flush_cache(), 3600)
    await engine.flush_cache()


@virtual_time
async def test_a_frozen_engine_answers_nothing_until_it_is_thawed() -> None:
    engine = struck("model_info", faults.freeze())
    asking = [asyncio.create_task(one) for one in (engine.model_info(), engine.is_ready())]
    await pass_time(3600)
    assert not any(task.done() for task in asking)
    engine.thaw()
    assert await asking[1]


@virtual_time
async def test_a_frozen_engine_makes_no_tokens_and_breaks_its_connections_when_killed() -> None:
    engine = FakeEngine(token_s=1.0)
    asking = asyncio.create_task(engine.generate(input_ids=[1]))
    await pass_time(2.5)
    engine.freeze()
    await pass_time(60)
    assert len(next(iter(engine.in_flight.values())).output_ids) == 2
    engine.die("kill -9")
    with pytest.raises(EngineUnreachable, match="kill -9"):
        await asking


@virtual_time
async def test_a_slow_call_takes_its_time_and_is_answered() -> None:
    engine = struck("continue_generation", faults.slow(45))
    await engine.continue_generation()
    assert asyncio.get_running_loop().time() == 45


async def test_a_stream_breaks_after_the_tokens_it_was_given() -> None:
    engine = struck("generate", faults.die(tokens=3))
    stream = engine.stream_generate(input_ids=[1])
    assert [len((await anext(stream)).output_ids) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(EngineUnreachable, match="a planned death in generate"):
        await anext(stream)


async def test_a_fault_strikes_the_nth_call_and_as_often_as_planned() -> None:
    engine = struck("is_ready", faults.reject(), nth=2, times=2)
    answers = []
    for _ in range(4):
        try:
            answers.append(await engine.is_ready())
        except EngineRejected:
            answers.append(None)
    assert answers == [True, None, None, True]


async def test_a_fault_of_any_operation_strikes_whatever_comes() -> None:
    engine = struck(faults.ANY, faults.reject(), nth=2)
    await engine.model_info()
    with pytest.raises(EngineRejected):
        await engine.is_ready()


async def test_what_was_planned_can_be_taken_back() -> None:
    engine = struck("model_info", faults.die())
    engine.faults.clear()
    await engine.model_info()


async def test_a_director_decides_over_every_call_and_may_keep_it_waiting() -> None:
    engine = FakeEngine()
    turn = asyncio.Event()

    async def direct(call: faults.RecordedCall) -> faults.Fault | None:
        await turn.wait()
        return faults.lose(executed=True) if call.operation == "pause_generation" else None

    engine.director = direct
    pausing = asyncio.create_task(engine.pause_generation())
    await asyncio.sleep(0)
    assert engine.paused is None
    turn.set()
    with pytest.raises(EngineUnreachable):
        await pausing
    assert engine.paused is PauseMode.ABORT
    await engine.continue_generation()


@virtual_time
async def test_a_slow_drain_holds_the_pause_until_the_last_has_left() -> None:
    engine = FakeEngine(token_s=1.0, drain_s=30)
    asking = asyncio.create_task(engine.generate(input_ids=[1]))
    await pass_time(1.5)
    await engine.pause_generation()
    assert asyncio.get_running_loop().time() == pytest.approx(31.5)
    assert (await asking).finish_reason.kind == "abort"


@virtual_time
async def test_an_engine_asked_for_its_health_in_a_pause_stays_unhealthy_afterwards() -> None:
    engine = FakeEngine()
    await engine.pause_generation()
    assert not await engine.is_healthy()
    await engine.continue_generation()
    assert not await engine.is_healthy()
    await engine.generate(input_ids=[1], sampling_params=SamplingParams(max_new_tokens=1))
    assert await engine.is_healthy()


async def test_the_load_shown_in_a_pause_is_that_of_before() -> None:
    engine = FakeEngine()
    engine.hold("generate")
    asking = asyncio.create_task(engine.generate(input_ids=[1]))
    await asyncio.sleep(0)
    await engine.pause_generation()
    await asking
    assert (await engine.loads()).num_running_reqs == 1
    await engine.continue_generation()
    assert (await engine.loads()).num_running_reqs == 0


async def test_lost_weights_answer_with_other_tokens() -> None:
    engine = FakeEngine()
    good = await engine.generate(input_ids=[1])
    await engine.release_memory_occupation(tuple(MemoryTag))
    await engine.resume_memory_occupation(tuple(MemoryTag))
    assert (await engine.generate(input_ids=[1])).output_ids != good.output_ids


async def test_a_stopped_process_does_not_hear_that_it_should_end() -> None:
    launcher = FakeLauncher()
    process = await launcher.launch(EngineSpec("main-0", "fake", "/nowhere", "/nowhere"))
    process.engine.freeze()
    assert await process.stop(1.0)
    assert process.num_kills == 1


# -- faults as text -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operation", "fault", "nth"),
    [
        ("pause_generation:hang", "pause_generation", faults.hang(), 1),
        ("flush_cache:lose@after", "flush_cache", faults.lose(executed=True), 1),
        ("generate#2:die@5", "generate", faults.die(tokens=5), 2),
        ("any:freeze@before", "any", faults.freeze(), 1),
        ("continue_generation:slow=2.5", "continue_generation", faults.slow(2.5), 1),
        ("is_ready:reject=503", "is_ready", faults.reject(503, "a planned fault"), 1),
    ],
)
def test_a_switch_says_operation_call_fault_and_moment(text, operation, fault, nth) -> None:
    assert parse_fault(text) == (operation, fault, nth)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pause", r"is not OPERATION\[#NTH\]:FAULT"),
        ("paus:die", "no operation 'paus'; known: abort_request, any"),
        ("generate:explode", "no fault 'explode'; known: reject, lose, die"),
        ("generate:slow", "slow needs its seconds"),
        ("generate:die=3", "die takes no value"),
        ("generate:slow=1@after", "slow strikes before the call"),
        ("is_ready:die@5", "no moment '5'"),
        ("is_ready#0:die", "counted from 1"),
    ],
)
def test_a_wrong_switch_says_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fault(text)


def test_the_operations_of_a_switch_are_those_of_the_protocol() -> None:
    assert {"generate", "release_memory_occupation", "weights_checker"} < OPERATIONS
    assert all(name == "any" or hasattr(FakeEngine, name) for name in OPERATIONS)


async def test_a_switch_that_is_turned_on_strikes() -> None:
    engine = FakeEngine()
    parse_fault("is_ready:reject=503").add_to(engine.faults)
    with pytest.raises(EngineRejected, match="503: a planned fault"):
        await engine.is_ready()
