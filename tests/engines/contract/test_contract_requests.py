"""Requests, on every kind of engine: sampling parameters, ids, unknown fields, long ones.

And a router in front of it, where the kinds differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import pytest

from engines.fake.engine.fake_engine import FakeEngine
from engines.protocol import GenerateReply, PauseMode, SamplingParams
from engines.protocol.errors import EngineRejected
from rollout.driver.client.generation_client import (
    FailureKind,
    GenerationError,
    GenerationRequest,
)
from tests.engines.conftest import KINDS, VLLM
from tests.engines.contract.differences import differs
from tests.engines.contract.parameters import GREEDY, PARAMETERS, TEXT, WRONG, Asker
from tests.support.contract import ENDLESS, PROMPT, VLLM_STUB, Bench, Routed
from tests.support.kinds import chaos_for, not_for

# That the embedded engine is on a logical GPU makes no difference here.
pytestmark = [pytest.mark.clock, pytest.mark.timeout(400), chaos_for("embedded-gpu")]

NOT_VLLM = not_for("vllm", VLLM_STUB)
NO_PORT = not_for("fake")
SHORT = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=120, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=[*KINDS, VLLM, VLLM_STUB])
def kind(request: pytest.FixtureRequest) -> str:
    """One kind of engine after the other."""
    return str(request.param)


# -- sampling parameters --------------------------------------------------------------------


def test_the_table_has_each_sampling_parameter() -> None:
    assert PARAMETERS.keys() == {one.name for one in fields(SamplingParams)}


def asker_of(bench: Bench) -> Asker:
    async def reply(sampling: SamplingParams) -> GenerateReply:
        return await bench.engine.generate(input_ids=TEXT, sampling_params=sampling)

    return Asker(bench.label, reply)


async def found_of(name: str, ask: Asker) -> str:
    """What becomes of a parameter."""
    try:
        return "effect" if await PARAMETERS[name].shows(ask) else "passed over"
    except EngineRejected as error:
        return "refused" if error.status == 400 else repr(error)
    except GenerationError as error:
        return "refused" if error.kind is FailureKind.REFUSED else repr(error)
    except ValueError:
        return "refused"  # the client sends nothing


@pytest.mark.parametrize("name", PARAMETERS)
async def test_a_sampling_parameter_has_its_effect_or_is_refused(bench: Bench, name: str) -> None:
    assert await found_of(name, asker_of(bench)) == PARAMETERS[name].expected(bench.label)


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "n"])
@NO_PORT
async def test_a_router_in_front_gives_each_parameter_what_the_engine_gives_it(
    bench: Bench, name: str
) -> None:
    async with bench.router() as router:

        async def reply(sampling: SamplingParams) -> GenerateReply:
            asked = GenerationRequest("", TEXT, sampling, fails_over=True)
            return await router.client.generate(asked)

        ask = Asker(bench.label, reply)
        assert await found_of(name, ask) == PARAMETERS[name].expected(bench.label)


@pytest.mark.parametrize("sampling", WRONG, ids=lambda one: "-".join(one.to_wire()))
async def test_a_value_out_of_its_bounds_is_refused(bench: Bench, sampling: SamplingParams) -> None:
    with pytest.raises((EngineRejected, ValueError)) as refused:
        await bench.engine.generate(input_ids=TEXT, sampling_params=sampling)
    if isinstance(refused.value, EngineRejected):
        assert refused.value.status == 400
    assert await bench.greedy()


async def test_what_ignores_the_end_token_ignores_the_tokens_that_are_to_stop_it(
    bench: Bench,
) -> None:
    ask = asker_of(bench)
    third = (await ask.ids(GREEDY))[2]
    found = await ask.ids(replace(GREEDY, stop_token_ids=(third,), ignore_eos=True))
    what = "what ignores the end token ignores the tokens that are to stop it"
    assert (len(found) == 12) is not differs(bench, what)


@NO_PORT
@NOT_VLLM  # its route of token ids makes one completion
async def test_several_completions_of_a_prompt_are_a_list(bench: Bench) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True, "n": 2}
    async with bench.http() as http:
        body = {"input_ids": list(PROMPT), "sampling_params": sampling}
        found = (await http.post("/generate", json=body)).raise_for_status().json()
    assert [len(one["output_ids"]) for one in found] == [8, 8]
    assert len({one["meta_info"]["id"] for one in found}) == 2


# -- unknown fields -------------------------------------------------------------------------


async def post(bench: Bench, *, unknown: str) -> Any:
    """The reply to a request with an unknown field in this part of it."""
    more = {"no_such_field": 1}
    is_inside = unknown == "sampling_params"
    if bench.kind == "vllm":
        sampling: dict[str, Any] = {"max_tokens": 8}
        body: dict[str, Any] = {"token_ids": list(PROMPT), "output_mode": "text"}
    else:
        sampling, body = {"max_new_tokens": 8}, {"input_ids": list(PROMPT)}
    body["sampling_params"] = sampling | (more if is_inside else {})
    path = "/inference/v1/generate" if bench.kind == "vllm" else "/generate"
    async with bench.http() as http:
        return await http.post(path, json=body | ({} if is_inside else more))


@NO_PORT
async def test_an_unknown_field_of_the_body_is_passed_over(bench: Bench) -> None:
    assert (await post(bench, unknown="body")).status_code == 200


@NO_PORT
async def test_an_unknown_sampling_parameter_is_refused(bench: Bench) -> None:
    is_taken = differs(bench, "an unknown sampling parameter is refused")
    reply = await post(bench, unknown="sampling_params")
    assert reply.status_code == (200 if is_taken else 400), reply.text


@NO_PORT
async def test_a_router_in_front_refuses_an_unknown_sampling_parameter(bench: Bench) -> None:
    import httpx

    sampling = {"max_new_tokens": 8, "no_such_field": 1}
    body = {"input_ids": list(PROMPT), "sampling_params": sampling}
    async with bench.router() as router, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        reply = await http.post(f"{router.url}/generate", json=body)
    assert reply.status_code == 400
    assert "no_such_field" in reply.text


# -- ids ------------------------------------------------------------------------------------


async def test_an_id_that_has_ended_serves_again_at_once(bench: Bench) -> None:
    for _ in range(6):
        reply = await bench.engine.generate(input_ids=PROMPT, sampling_params=SHORT, rid="again")
        assert len(reply.output_ids) == 8


async def test_ids_that_begin_alike_run_beside_each_other(bench: Bench) -> None:
    async def whole(rid: str) -> GenerateReply:
        return await bench.engine.generate(input_ids=PROMPT, sampling_params=LONG, rid=rid)

    rids = ["p", "p-1", "p-10", "p-1/a"]
    replies = await asyncio.gather(*map(whole, rids))
    assert [len(one.output_ids) for one in replies] == [120] * 4
    if bench.kind != "vllm":  # whose client does not read it back
        assert [one.rid for one in replies] == rids


async def test_a_stream_that_is_refused_for_its_id_aborts_the_one_that_has_it(
    bench: Bench,
) -> None:
    what = "a stream that is refused for its id aborts the one that has it"
    async with bench.in_flight(rid="mine") as first:
        if bench.kind == "vllm":
            assert len(await streamed(bench, rid="mine")) == 8
        else:
            with pytest.raises(EngineRejected) as refused:
                await streamed(bench, rid="mine")
            assert refused.value.status == 400
        assert first.task is not None
        await asyncio.wait({first.task}, timeout=3.0)  # SGLang and the fake: 2 s
        reason = first.last and first.last.finish_reason
        is_aborted = reason is not None and reason.kind == "abort"
        assert is_aborted is not differs(bench, what)


async def streamed(bench: Bench, rid: str) -> tuple[int, ...]:
    stream = bench.engine.stream_generate(input_ids=PROMPT, sampling_params=SHORT, rid=rid)
    return [reply.output_ids async for reply in stream][-1]


def through(router: Routed, rid: str, sampling: SamplingParams) -> AsyncIterator[GenerateReply]:
    return router.client.stream(GenerationRequest(rid, PROMPT, sampling, fails_over=True))


@NO_PORT
async def test_a_router_in_front_serves_an_id_again_at_once(bench: Bench) -> None:
    """Also over what an engine does some seconds after the id was used last."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    async with bench.router() as router:
        while loop.time() < begin_s + 5:
            *_, last = [reply async for reply in through(router, "again", LONG)]
            assert last.finish_reason is not None
            assert (last.finish_reason.kind, len(last.output_ids)) == ("length", 120)
            assert last.num_failovers == 0


@NO_PORT
async def test_a_router_in_front_keeps_a_request_whose_id_comes_twice(bench: Bench) -> None:
    async with bench.router() as router, router.in_flight("mine") as requests:
        *_, last = [reply async for reply in through(router, "mine", SHORT)]
        assert len(last.output_ids) == 8
        first = requests["mine"]
        assert first.task is not None
        await asyncio.wait({first.task}, timeout=3.0)  # SGLang would abort it after 2 s
        assert first.last is not None
        if first.last.finish_reason is not None:
            assert first.last.finish_reason.kind == "length"
        assert first.last.num_failovers == 0


# -- a router in front, where the kinds differ -----------------------------------------------


@NO_PORT
async def test_a_router_in_front_ends_what_came_in_a_pause_of_its_engine(bench: Bench) -> None:
    async with bench.router() as router:
        await bench.engine.pause_generation(PauseMode.ABORT)
        asked = GenerationRequest("held", PROMPT, SHORT, fails_over=True)
        held = asyncio.create_task(router.client.generate(asked))
        await asyncio.wait({held}, timeout=0.5)
        assert not held.done()
        await router.abort(rid="held")
        await asyncio.wait({held}, timeout=10.0)
        assert held.done()
        if (failure := held.exception()) is None:  # an engine that knows it has aborted it
            reply = held.result()
            assert reply.finish_reason is not None
            assert (reply.finish_reason.kind, reply.output_ids) == ("abort", ())
        else:
            assert isinstance(failure, GenerationError)
            assert failure.kind is FailureKind.ABORTED
        await bench.engine.continue_generation()


@NO_PORT
async def test_a_router_in_front_keeps_every_token_of_what_is_retracted_and_aborted(
    bench: Bench,
) -> None:
    async with bench.router() as router, router.in_flight("beside") as others:
        asked = GenerationRequest("whole", PROMPT, ENDLESS, fails_over=True)
        whole = asyncio.create_task(router.client.generate(asked))
        beside = others["beside"]
        assert beside.last is not None
        await beside.reaches(len(beside.last.output_ids) + 130)  # the other has at least a few
        await bench.engine.pause_generation(PauseMode.RETRACT)
        await router.abort(abort_all=True)
        await bench.engine.continue_generation()
        last = await asyncio.wait_for(whole, 60)
        streamed = await beside.end()
    for reply in (last, streamed):
        assert reply.finish_reason is not None
        assert reply.finish_reason.kind == "abort"
    shorter, longer = sorted((last.output_ids, streamed.output_ids), key=len)
    assert longer[: len(shorter)] == shorter
    assert len(shorter) >= 60


@pytest.mark.parametrize("is_streamed", [False, True])
@NO_PORT
async def test_a_router_in_front_refuses_a_prompt_that_is_too_long(
    bench: Bench, is_streamed: bool
) -> None:
    asked = GenerationRequest("long", [65] * 5000, SHORT, fails_over=True)
    async with bench.router() as router:
        client = router.client
        reply = anext(client.stream(asked)) if is_streamed else client.generate(asked)
        with pytest.raises(GenerationError) as refused:
            await reply
    assert refused.value.kind is FailureKind.TOO_LONG


# -- requests that last ---------------------------------------------------------------------

NUM_TOKENS = {"sglang": 1500, "embedded": 2500}
"""Of a request of some seconds; of the others 4000."""


@asynccontextmanager
async def slowed(bench: Bench) -> AsyncIterator[None]:
    """A fake has the pace of a real engine meanwhile."""
    engine = getattr(bench.running, "engine", None)
    if not isinstance(engine, FakeEngine):
        yield
        return
    fast, engine.settings = engine.settings, replace(engine.settings, token_s=0.002)
    try:
        yield
    finally:
        engine.settings = fast


@pytest.mark.slow
async def test_a_request_of_more_than_ten_seconds_is_whole(bench: Bench) -> None:
    """Beside it go short ones, whose ids begin as its own and are used again; and it is frozen."""
    num = NUM_TOKENS.get(bench.kind, 4000)
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    sampling = replace(ENDLESS, max_new_tokens=num)
    async with slowed(bench), bench.in_flight(sampling, rid="long") as request:
        assert request.task is not None
        for number in range(3):
            for rid in ("long-1", "long-10", "lon", "again"):
                name = rid if rid == "again" else f"{rid}{number}"
                assert len(await streamed(bench, name)) == 8
            await asyncio.wait({request.task}, timeout=0.5)
        await bench.engine.abort_request("lon")
        assert not request.task.done()
        await bench.engine.pause_generation(PauseMode.IN_PLACE)
        await asyncio.wait({request.task}, timeout=max(0.0, begin_s + 9.5 - loop.time()))
        await bench.engine.continue_generation()
        last = await request.end()
    assert loop.time() - begin_s > 10
    assert last.finish_reason is not None
    assert (last.finish_reason.kind, len(last.output_ids)) == ("length", num)
    assert [(one.version, one.start, one.end) for one in last.weight_versions] == [("0", 0, num)]
