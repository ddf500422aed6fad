"""One suite over every kind of engine: what all of them do.

It is what makes the fake and the embedded engine worth trusting.  Facts are those of SGLang
0.5.23; what a kind does otherwise on purpose stands in
``differences.py``, by name.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from engines.http import sglang_json
from engines.process.tcp_ports import reserve_port
from engines.protocol import MemoryTag, PauseMode, SamplingParams
from engines.protocol.errors import EngineRejected
from tests.engines.conftest import KINDS, VLLM
from tests.engines.contract.differences import differs
from tests.support.contract import ENDLESS, GREEDY, PROMPT, VOCABULARY, Bench, InFlight, features_of
from tests.support.event_lines import async_lines_of
from tests.support.kinds import not_for
from tests.support.toy_kind import TOY
from tests.support.waits import until

pytestmark = [pytest.mark.clock, pytest.mark.timeout(400)]

W, KV, GRAPH = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
LONG = SamplingParams(max_new_tokens=120, temperature=0.0, ignore_eos=True)
# Not over before a pause that is sent at its first token, on a busy machine either.
LONGER = SamplingParams(max_new_tokens=500, temperature=0.0, ignore_eos=True)

NOT_VLLM = not_for("vllm")
"""Marks a test of what vLLM does not have."""


@pytest.fixture(params=[*KINDS, VLLM, TOY.name])
def kind(request: pytest.FixtureRequest) -> str:
    """One kind of engine after the other."""
    return str(request.param)


# -- generation -----------------------------------------------------------------------------


async def test_a_completion_has_all_that_a_trainer_needs(bench: Bench) -> None:
    reply = await bench.engine.generate(
        input_ids=PROMPT, sampling_params=GREEDY, rid="whole", return_logprob=True
    )
    assert reply.rid == "whole"
    assert len(reply.output_ids) == reply.completion_tokens == 8
    assert reply.prompt_tokens == len(PROMPT)
    assert reply.output_logprobs is not None
    assert len(reply.output_logprobs) == 8
    assert all(value <= 0 for value in reply.output_logprobs)
    assert reply.finish_reason is not None
    assert reply.finish_reason.kind == "length"
    assert reply.weight_version == "0"
    assert [(one.version, one.start, one.end) for one in reply.weight_versions] == [("0", 0, 8)]


async def test_the_logprobs_of_a_prompt_differ_between_two_sets_of_weights(
    bench: Bench,
) -> None:
    async def ask() -> tuple[float, ...]:
        reply = await bench.engine.generate(
            input_ids=PROMPT,
            # As the log-prob check asks.
            sampling_params=SamplingParams(max_new_tokens=0, temperature=0.0),
            return_logprob=True,
            logprob_start_len=0,
        )
        assert reply.output_ids == ()
        assert not reply.output_logprobs
        assert reply.completion_tokens == 0
        assert reply.input_logprobs is not None
        return reply.input_logprobs

    before = await ask()
    assert len(before) == len(PROMPT) - 1
    assert all(value < 0 for value in before)
    assert await ask() == pytest.approx(before, abs=1e-4)
    await bench.push("second", "1")
    after = await ask()
    assert max(abs(one - other) for one, other in zip(before, after, strict=True)) > 0.1


@pytest.mark.parametrize("kind", [*KINDS[2:], VLLM], indirect=True)
async def test_a_streamed_completion_has_the_log_prob_of_each_token(bench: Bench) -> None:
    """What a router goes on from when this engine is lost; the fakes have no such route."""
    body = {
        "prompt": list(PROMPT),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    async with bench.http() as http:
        # Not by httpx's lines: random text has characters that end a line for it.
        lines = (await http.post("/v1/completions", json=body)).content.split(b"\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for one in choices for token in one.get("token_ids") or ()]
    assert tuple(ids) == await bench.greedy()
    told = [one["logprobs"] for one in choices if one["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert sum(len(one[name]) for one in told) == 8, name
    # Not missing: empty, as none were requested, or vLLM's, which has the token itself.
    for one in told:
        assert len(one["top_logprobs"]) in (0, len(one["tokens"]))


async def test_a_stream_is_cumulative_and_ends_like_the_whole_answer(bench: Bench) -> None:
    whole = await bench.greedy()
    seen: list[tuple[int, ...]] = []
    async for reply in bench.engine.stream_generate(input_ids=PROMPT, sampling_params=GREEDY):
        assert reply.output_ids[: len(seen[-1]) if seen else 0] == (seen[-1] if seen else ())
        seen.append(reply.output_ids)
        last = reply
    assert seen[-1] == whole
    assert last.finish_reason is not None
    assert last.finish_reason.kind == "length"


async def test_an_engine_answers_a_text_too(bench: Bench) -> None:
    reply = await bench.engine.generate(text="Once upon a time", sampling_params=GREEDY)
    assert len(reply.output_ids) == 8
    assert reply.prompt_tokens > 0


async def test_a_client_that_leaves_aborts_its_request(bench: Bench) -> None:
    async with bench.in_flight():
        pass
    await bench.engine.flush_cache(timeout_s=8.0)


@NOT_VLLM  # vLLM gives each request an id of its own besides
async def test_an_id_in_use_is_refused(bench: Bench) -> None:
    async with bench.in_flight(rid="mine"):
        with pytest.raises(EngineRejected) as refused:
            await bench.engine.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="mine")
    assert refused.value.status == 400


async def test_an_aborted_request_keeps_its_tokens(bench: Bench) -> None:
    async with bench.in_flight(rid="long") as request:
        await bench.engine.abort_request("long")
        last = await request.end()
    assert last.finish_reason is not None
    assert last.finish_reason.kind == "abort"
    assert len(last.output_ids) >= 1
    await bench.engine.abort_request("nobody")


async def test_an_abort_by_id_ends_every_id_that_begins_with_it(bench: Bench) -> None:
    what = "an abort by id ends every id that begins with it"
    async with bench.in_flight(rid="p-1") as one, bench.in_flight(rid="p-10") as ten:
        await bench.engine.abort_request("p-1")
        assert (await one.end()).finish_reason is not None
        if differs(bench, what):
            assert ten.task is not None
            assert not ten.task.done()
        else:
            reason = (await ten.end()).finish_reason
            assert reason is not None
            assert reason.kind == "abort"


async def test_an_abort_of_no_live_id_ends_nothing(bench: Bench) -> None:
    async with bench.in_flight(rid="p-1") as request:
        for rid in ("p-", "p-10", "p"):
            await bench.engine.abort_request(rid)
        assert request.last is not None
        await request.reaches(len(request.last.output_ids) + 20)
        assert request.task is not None
        assert not request.task.done()


async def test_an_abort_of_an_id_that_has_ended_ends_nothing(bench: Bench) -> None:
    async with bench.in_flight() as request:
        await bench.engine.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="p-1")
        await bench.engine.abort_request("p-1")
        assert request.last is not None
        await request.reaches(len(request.last.output_ids) + 20)
    again = await bench.engine.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="p-1")
    assert len(again.output_ids) == 8


async def test_a_retracted_request_that_is_aborted_ends_at_once(bench: Bench) -> None:
    async with frozen_and_aborted(bench, PauseMode.RETRACT) as request:
        assert request.task is not None
        assert request.task.done()


async def test_a_request_frozen_in_place_ends_aborted_when_the_pause_does(bench: Bench) -> None:
    async with frozen_and_aborted(bench, PauseMode.IN_PLACE) as request:
        assert request.task is not None
        assert request.task.done() is differs(
            bench, "a request frozen in place ends aborted when the pause does"
        )


@asynccontextmanager
async def frozen_and_aborted(bench: Bench, mode: PauseMode) -> AsyncIterator[InFlight]:
    """A request that was aborted in a pause, which ends behind the block; another one goes on.

    The step that ran when the pause came is over before: it would end the request.
    """
    async with bench.in_flight(rid="p-1") as request, bench.in_flight(rid="q-1") as other:
        await bench.engine.pause_generation(mode)
        assert other.task is not None
        await asyncio.wait({other.task}, timeout=0.5)
        await bench.engine.abort_request("p-1")
        assert request.task is not None
        await asyncio.wait({request.task}, timeout=1.0)
        yield request
        assert other.last is not None
        num_tokens = len(other.last.output_ids)
        await bench.engine.continue_generation()
        last = await request.end()
        await other.reaches(num_tokens + 20)
    assert last.finish_reason is not None
    assert last.finish_reason.kind == "abort"
    assert len(last.output_ids) >= 1


async def test_an_abort_of_a_request_that_came_in_a_pause_ends_nothing(bench: Bench) -> None:
    await bench.engine.pause_generation(PauseMode.ABORT)
    held = asyncio.create_task(
        bench.engine.generate(input_ids=PROMPT, sampling_params=GREEDY, rid="p-1")
    )
    await asyncio.wait({held}, timeout=0.5)
    await bench.engine.abort_request("p-1")
    await asyncio.wait({held}, timeout=0.5)
    is_ended = differs(bench, "an abort of a request that came in a pause ends nothing")
    await bench.engine.continue_generation()
    reply = await asyncio.wait_for(held, 30)
    assert reply.finish_reason is not None
    assert reply.finish_reason.kind == ("abort" if is_ended else "length")


ORDERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "id": ({"rid": "p-1"}, {"p-1"}),
    "list": ({"rid": ["p-1", "q-1"]}, {"p-1", "q-1"}),
    "key": ({"rid_prefix": "p-1/"}, {"p-1/a"}),
    "unknown": ({"rid": ["p-", "p", "p-100"]}, set()),
}


@pytest.mark.parametrize("order", ORDERS)
@not_for("fake")  # it has no port
async def test_a_router_in_front_ends_what_an_abort_names_and_no_neighbour(
    bench: Bench, order: str
) -> None:
    body, named = ORDERS[order]
    async with bench.router() as router, router.in_flight("p-1", "p-10", "p-1/a", "q-1") as all_:
        found = await router.abort(**body)
        assert (found["num_on_engines"], found["failed"]) == (len(named), {})
        for rid in named:
            last = await all_[rid].end()
            assert last.finish_reason is not None
            assert last.finish_reason.kind == "abort"
            assert 1 <= len(last.output_ids) < ENDLESS.max_new_tokens
        for rid in all_.keys() - named:
            request = all_[rid]
            assert request.last is not None
            await asyncio.wait_for(request.reaches(len(request.last.output_ids) + 20), 60)


@pytest.mark.parametrize("is_frozen", [False, True])
@not_for("fake")  # it has no port
async def test_a_router_in_front_answers_what_is_aborted_within_half_a_second(
    bench: Bench, is_frozen: bool
) -> None:
    took_s = []
    async with bench.router() as router, router.in_flight("p-1", "p-2", "p-3") as requests:
        if is_frozen:
            await bench.engine.pause_generation(PauseMode.IN_PLACE)
        for rid, request in requests.items():
            has = request.last
            began_s = asyncio.get_running_loop().time()
            await router.abort(rid=rid)
            last = await request.end()
            took_s.append(asyncio.get_running_loop().time() - began_s)
            assert last.finish_reason is not None
            assert last.finish_reason.kind == "abort"
            assert has is not None
            assert last.output_ids[: len(has.output_ids)] == has.output_ids
    assert min(took_s) < 0.5, took_s  # one of three, since a busy machine is late now and then
    await bench.engine.continue_generation()


async def test_the_id_of_a_stream_is_aborted_some_time_after_its_end(bench: Bench) -> None:
    async with bench.in_flight(rid="p-1") as ended:
        await bench.engine.abort_request("p-1")
        await ended.end()
    async with bench.in_flight(rid="p-1") as again:
        assert again.task is not None
        await asyncio.wait({again.task}, timeout=4.0)  # SGLang and the fake: 2 s
        kind = again.last and again.last.finish_reason and again.last.finish_reason.kind
        if differs(bench, "the id of a stream is aborted some time after its end"):
            assert kind in (None, "length")
        else:
            assert kind == "abort"


# -- pauses ---------------------------------------------------------------------------------


async def test_a_pause_ends_what_runs_and_holds_what_comes(bench: Bench) -> None:
    async with bench.in_flight() as request:
        await bench.engine.pause_generation(PauseMode.ABORT)
        last = await request.end()
    assert last.finish_reason is not None
    assert last.finish_reason.kind == "abort"
    assert len(last.output_ids) >= 1
    assert not await bench.engine.is_ready()
    held = asyncio.create_task(bench.greedy())
    await bench.engine.flush_cache(timeout_s=10.0)
    assert not held.done()
    await bench.engine.continue_generation()
    assert len(await asyncio.wait_for(held, 30)) == 8
    assert await bench.engine.is_ready()


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_a_pause_of_any_mode_holds_what_comes(bench: Bench, mode: PauseMode) -> None:
    await bench.engine.pause_generation(mode)
    assert not await bench.engine.is_ready()
    held = asyncio.create_task(bench.greedy())
    await asyncio.wait({held}, timeout=0.3)
    assert not held.done()
    await bench.engine.continue_generation()
    assert len(await asyncio.wait_for(held, 30)) == 8


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_a_frozen_request_goes_on_as_if_nothing_had_been(
    bench: Bench, mode: PauseMode
) -> None:
    whole = await bench.engine.generate(input_ids=PROMPT, sampling_params=LONGER)
    async with bench.in_flight(LONGER) as request:
        await bench.engine.pause_generation(mode)
        await bench.engine.continue_generation()
        last = await request.end()
    assert last.output_ids == whole.output_ids


async def test_flush_waits_for_requests_only_within_its_timeout(bench: Bench) -> None:
    async with bench.in_flight():
        for timeout_s in (None, 0.05):
            with pytest.raises(EngineRejected):
                await bench.engine.flush_cache(timeout_s)
        await bench.engine.pause_generation(PauseMode.IN_PLACE)
        with pytest.raises(EngineRejected):
            await bench.engine.flush_cache()
        await bench.engine.continue_generation()


@NOT_VLLM  # vLLM takes their blocks back at once
async def test_retracted_requests_let_it_flush_and_release(bench: Bench) -> None:
    whole = await bench.engine.generate(input_ids=PROMPT, sampling_params=LONGER)
    async with bench.in_flight(LONGER) as request:
        await bench.engine.pause_generation(PauseMode.RETRACT)
        with pytest.raises(EngineRejected):
            await bench.engine.flush_cache(0.2)  # with a timeout it means: until all have left
        await bench.engine.flush_cache()
        await bench.release(KV)
        await bench.resume(KV)
        await bench.engine.continue_generation()
        last = await request.end()
    assert last.output_ids == whole.output_ids


async def test_aborts_after_a_retract_cut_off_what_was_not_streamed(bench: Bench) -> None:
    asked = asyncio.create_task(
        bench.engine.generate(input_ids=PROMPT, sampling_params=ENDLESS, rid="whole")
    )
    if bench.kind != "sglang":  # which publishes its loads too late
        await loads_are(bench, 1)
    async with bench.in_flight() as other:
        await other.reaches(60)  # it began later, so the first has as many or more
        await bench.engine.pause_generation(PauseMode.RETRACT)
        await bench.engine.abort_request()
        # Who was retracted leaves when the scheduler runs again.
        await bench.engine.continue_generation()
        last = await asyncio.wait_for(asked, 60)
    assert last.finish_reason is not None
    assert last.finish_reason.kind == "abort"
    if differs(bench, "aborts after a retract cut off what was not streamed"):
        assert len(last.output_ids) >= 60
    else:
        assert len(last.output_ids) % 50 == 0


async def test_a_pause_that_is_repeated_changes_nothing(bench: Bench) -> None:
    for _ in range(2):
        await bench.engine.pause_generation(PauseMode.ABORT)
    for _ in range(2):
        await bench.engine.continue_generation()
    assert len(await bench.greedy()) == 8


# -- weights --------------------------------------------------------------------------------


async def test_pushed_weights_answer_under_their_version(bench: Bench) -> None:
    before = await bench.greedy()
    await bench.push("second", "1", num_buckets=3)
    reply = await bench.engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
    assert reply.cached_tokens == 0
    assert reply.weight_version == await bench.engine.weight_version() == "1"
    if bench.kind != "fake":  # whose tokens are no function of its weights
        from tests.engines.embedded import reference

        assert reply.output_ids != before
        expected = reference.greedy(bench.models.second, list(PROMPT), max_new_tokens=8)
        assert list(reply.output_ids[: len(expected)]) == expected


async def test_a_flattened_bucket_holds_what_a_list_of_pairs_does(bench: Bench) -> None:
    torch = pytest.importorskip("torch")
    from rollout.weights.tensors.payload import flattened_bucket

    tensors = bench.tensors("second")
    if bench.kind == "fake":  # a bucket is bytes, and has to come from real tensors
        tensors = {name: torch.ones(one.shape) for name, one in tensors.items()}
    bucket = base64.b64encode(flattened_bucket(list(tensors.items()))).decode()
    await bench.engine.begin_weight_update()
    await bench.engine.update_weights_from_tensor(
        [bucket], load_format="flattened_bucket", weight_version="1"
    )
    await bench.engine.end_weight_update()
    flattened = (await bench.engine.weights_checker()).checksum
    assert await bench.engine.weight_version() == "1"
    await bench.push("first", "2")
    assert (await bench.engine.weights_checker()).checksum != flattened
    if bench.kind != "fake":  # whose digests are of what came, in whatever form
        await bench.push("second", "3")
        assert (await bench.engine.weights_checker()).checksum == flattened


@NOT_VLLM  # vLLM says start_weight_update in place of begin
async def test_tensors_are_taken_only_in_a_session(bench: Bench) -> None:
    with pytest.raises(EngineRejected, match="begin"):
        await bench.send(bench.tensors("second"), "1")
    await bench.engine.begin_weight_update()
    with pytest.raises(EngineRejected):
        await bench.engine.begin_weight_update()
    await bench.engine.end_weight_update()
    with pytest.raises(EngineRejected):
        await bench.engine.end_weight_update()
    assert await bench.engine.weight_version() == "0"


async def test_weights_come_from_disk_without_a_session(bench: Bench) -> None:
    before = await bench.engine.weights_checker()
    await bench.engine.update_weights_from_disk(str(bench.models.second), weight_version="4")
    info = await bench.engine.model_info()
    assert info.weight_version == "4"
    renamed = not differs(bench, "an update from disk renames the model")
    assert (info.model_path == str(bench.models.second)) is renamed
    assert (await bench.engine.weights_checker()).checksum != before.checksum


async def test_an_update_without_a_pause_waits_for_what_runs(bench: Bench) -> None:
    waits = not differs(bench, "an update without a pause waits for what runs")
    # vLLM has 500 tokens before the call arrives.
    longer = replace(LONG, max_new_tokens=3000) if bench.kind == "vllm" else LONG
    async with bench.in_flight(longer) as request:
        await bench.push("second", "1")
        assert request.task is not None
        last = await request.end()
    assert len(last.output_ids) == longer.max_new_tokens
    assert [span.version for span in last.weight_versions] == (["0"] if waits else ["0", "1"])
    assert len(await bench.greedy()) == GREEDY.max_new_tokens


async def test_new_weights_in_a_pause_show_in_the_spans(bench: Bench) -> None:
    # vLLM has 500 tokens before the call arrives.
    longer = replace(LONGER, max_new_tokens=3000) if bench.kind == "vllm" else LONGER
    async with bench.in_flight(longer) as request:
        await bench.engine.pause_generation(PauseMode.RETRACT)
        await bench.push("second", "7")
        await bench.engine.continue_generation()
        last = await request.end()
    old, new = last.weight_versions
    assert (old.version, old.start) == ("0", 0)
    assert (new.version, new.start, new.end) == ("7", old.end, longer.max_new_tokens)
    assert last.weight_version == "7"


@not_for("fake", "fake-http", "toy")  # it has no cache, only a flag that it is stale
async def test_a_forgotten_flush_serves_the_old_prefix(bench: Bench) -> None:
    prompt = PROMPT * 4
    await bench.greedy(prompt)
    # Where a push without a pause makes one of its own, that clears the cache.
    await bench.engine.pause_generation(PauseMode.IN_PLACE)
    await bench.engine.begin_weight_update()
    await bench.engine.update_weights_from_tensor(
        payload_of(bench, "second"), flush_cache=False, weight_version="1"
    )
    await bench.engine.end_weight_update()
    await bench.engine.continue_generation()
    reply = await bench.engine.generate(input_ids=prompt, sampling_params=GREEDY)
    assert reply.cached_tokens > 0


@NOT_VLLM  # vLLM flushes with the session's end
async def test_an_update_that_cannot_flush_says_no_after_it_was_done(bench: Bench) -> None:
    before = (await bench.engine.weights_checker()).checksum
    async with bench.in_flight():
        await bench.engine.pause_generation(PauseMode.IN_PLACE)
        await bench.engine.begin_weight_update()
        with pytest.raises(EngineRejected):
            await bench.send(bench.tensors("second"), "1")
        await bench.engine.end_weight_update()
        after = (await bench.engine.weights_checker()).checksum
        await bench.engine.continue_generation()
    unchanged = differs(bench, "an update that cannot flush says no after it was done")
    assert (after == before) is unchanged


@NOT_VLLM  # our plugin refuses them
async def test_unknown_names_and_tags_are_passed_over_in_silence(bench: Bench) -> None:
    what = "unknown names and tags are passed over in silence"
    stranger = {"nobody.weight": next(iter(bench.tensors("first").values()))}
    before = (await bench.engine.weights_checker()).checksum
    await bench.engine.begin_weight_update()
    if differs(bench, what):
        with pytest.raises(EngineRejected) as refused:
            await bench.send(stranger, "1")
        assert refused.value.status == 400
    else:
        await bench.send(stranger, "1")
    await bench.engine.end_weight_update()
    assert (await bench.engine.weights_checker()).checksum == before
    if bench.kind == "fake":
        return
    attic: Any = "attic"
    if differs(bench, what):
        with pytest.raises(EngineRejected):
            await bench.engine.release_memory_occupation([attic])
    else:
        await bench.engine.release_memory_occupation([attic])
    assert len(await bench.greedy()) == 8


@not_for("fake")
@NOT_VLLM  # vLLM never aborts, and has other routes
async def test_a_version_set_without_a_word_aborts_everything(bench: Bench) -> None:
    # With an event per token a request once ran to its end before SGLang had taken the call.
    sampling = ENDLESS.to_wire() | {"stream_interval": 50}
    body = {"input_ids": list(PROMPT), "sampling_params": sampling, "stream": True}
    async with bench.http() as http, http.stream("POST", "/generate", json=body) as answer:
        payloads = sglang_json.sse_payloads(answer.aiter_bytes())
        await anext(payloads)
        version = {"new_version": "8"}
        assert (await http.post("/update_weight_version", json=version)).status_code == 200
        *_, last, _done = [payload async for payload in payloads]
    assert json.loads(last)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("aborts", [False, True])
async def test_a_version_set_by_itself_aborts_only_on_request(bench: Bench, aborts: bool) -> None:
    # One that is to be aborted must not be over before, however busy the machine is.
    async with bench.in_flight(ENDLESS if aborts else LONG) as request:
        await bench.engine.update_weight_version("8", abort_all_requests=aborts)
        last = await request.end()
    assert await bench.engine.weight_version() == "8"
    assert last.finish_reason is not None
    assert last.finish_reason.kind == ("abort" if aborts else "length")


async def test_the_checker_sees_what_changed(bench: Bench) -> None:
    first = await bench.engine.weights_checker()
    assert first.checksum
    assert len(first.tensors) == 1
    await bench.engine.weights_checker("snapshot")
    await bench.engine.weights_checker("compare")
    await bench.engine.weights_checker("reset_tensors")
    with pytest.raises(EngineRejected):
        await bench.engine.weights_checker("compare")
    assert (await bench.engine.weights_checker()).checksum != first.checksum


@NOT_VLLM  # vLLM has checksums alone
async def test_the_checker_refuses_what_it_cannot_do(bench: Bench) -> None:
    for action in ("compare", "no_such_action"):
        with pytest.raises(EngineRejected) as refused:
            await bench.engine.weights_checker(action)
        assert refused.value.status == 400, action
    assert len(await bench.greedy()) == 8


@not_for("fake", "fake-http", "toy")  # no numbers travel to it
async def test_a_trainer_broadcasts_weights_through_a_group(bench: Bench) -> None:
    import torch

    from engines.tensors.collective.groups import join

    new = bench.tensors("second")
    with reserve_port("127.0.0.1") as reservation:
        port = reservation.port
    where: dict[str, Any] = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "world_size": 2,
        "group_name": "push",
        "backend": "gloo",
    }
    asked = asyncio.create_task(bench.engine.init_weights_update_group(rank_offset=1, **where))
    group = await asyncio.to_thread(lambda: join(rank=0, **where))
    await asked
    await bench.engine.begin_weight_update()
    asked = asyncio.create_task(
        bench.engine.update_weights_from_distributed(
            names=list(new),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in new.values()],
            shapes=[list(tensor.shape) for tensor in new.values()],
            group_name="push",
            weight_version="5",
        )
    )

    def broadcast() -> None:
        for tensor in new.values():
            torch.distributed.broadcast(tensor, src=0, group=group)

    await asyncio.to_thread(broadcast)
    await asked
    await bench.engine.end_weight_update()
    await bench.engine.destroy_weights_update_group("push")
    torch.distributed.destroy_process_group(group)
    from tests.engines.embedded import reference

    expected = reference.greedy(bench.models.second, list(PROMPT), max_new_tokens=8)
    assert list((await bench.greedy())[: len(expected)]) == expected
    assert await bench.engine.weight_version() == "5"


# -- memory ---------------------------------------------------------------------------------


# Its process has no weights in its memory.
@not_for("toy")
async def test_the_order_that_works(bench: Bench) -> None:
    """Pause, flush, release, resume weights, push, resume the rest, continue."""
    engine, before = bench.engine, await bench.greedy()
    held = await bench.held_bytes()
    checksum = (await engine.weights_checker()).checksum
    async with bench.in_flight() as request:
        await engine.pause_generation(PauseMode.ABORT)
        await request.end()
        await engine.flush_cache(timeout_s=10.0)
        await bench.release(KV, W, GRAPH)
        released = await bench.held_bytes()
        assert held - released > (8 * 2**20 if bench.kind != "fake" else 0)
        await bench.resume(W)
        await bench.push("second", "1", num_buckets=2)
        await bench.resume(KV, GRAPH)
        assert not await engine.is_ready()  # vLLM itself would serve now
        await engine.continue_generation()
    assert (await engine.weights_checker()).checksum != checksum
    assert await engine.weight_version() == "1"
    if bench.kind != "fake":
        assert await bench.greedy() != before


@NOT_VLLM  # vLLM releases the KV cache with the weights
async def test_weights_without_a_backup_are_lost(bench: Bench) -> None:
    before = (await bench.engine.weights_checker()).checksum
    await bench.engine.pause_generation(PauseMode.ABORT)
    await bench.release(W)
    await bench.resume(W)
    assert (await bench.engine.weights_checker()).checksum != before
    await bench.push("first", "2")
    await bench.engine.continue_generation()
    assert len(await bench.greedy()) == 8


async def test_tags_come_and_go_one_by_one(bench: Bench) -> None:
    await bench.engine.pause_generation(PauseMode.ABORT)
    await bench.release(KV)
    await bench.release(W)
    await bench.resume(KV)
    await bench.resume(W)


# -- questions ------------------------------------------------------------------------------


async def test_an_engine_says_what_it_is(bench: Bench) -> None:
    info = await bench.engine.server_info()
    found = await features_of(bench.engine)
    assert info.engine == bench.kind
    assert found.undrivable == ""
    assert found.has_weight_session
    assert found.is_retract_safe
    assert found.has_memory_saver
    # vLLM learns at each sleep whether to keep one.
    assert found.has_weights_cpu_backup is (info.engine == "vllm")
    assert (await bench.engine.model_info()).model_path == str(bench.models.first)
    assert await bench.engine.weight_version() == "0"
    assert info.start
    assert {await bench.engine.process_start() for _ in range(3)} == {info.start}


async def test_loads_count_what_runs(bench: Bench) -> None:
    async with bench.in_flight():
        await loads_are(bench, 1)
    await loads_are(bench, 0)


@not_for("sglang", "sglang-gpu")  # which only has tokens per second, and those with its metrics
async def test_loads_count_the_tokens_that_were_generated(bench: Bench) -> None:
    before = (await bench.engine.loads()).num_output_tokens or 0
    eight = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    await bench.engine.generate(input_ids=PROMPT, sampling_params=eight)

    async def is_counted() -> bool:
        return (await bench.engine.loads()).num_output_tokens == before + 8

    await until(is_counted)  # vLLM publishes its metrics after it has replied


async def loads_are(bench: Bench, num_running: int) -> None:
    async def is_so() -> bool:
        return (await bench.engine.loads()).num_running_reqs == num_running

    await until(is_so)  # SGLang publishes them now and then


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_loads_are_of_before_while_it_is_frozen(bench: Bench, mode: PauseMode) -> None:
    async with bench.in_flight():
        await loads_are(bench, 1)
        await bench.engine.pause_generation(mode)
    # Its client has disconnected; the engine checks that only after the pause.
    if bench.kind in ("sglang", "sglang-gpu"):
        await asyncio.sleep(1.5)  # it publishes its loads now and then
    for _ in range(10):  # all of them come after the end of that connection
        await bench.engine.loads()
    was = (await bench.engine.loads()).num_running_reqs
    assert was == (0 if differs(bench, "loads are of before while it is frozen") else 1)
    await bench.engine.continue_generation()
    await loads_are(bench, 0)


async def test_a_pause_makes_it_unready_and_not_unhealthy(bench: Bench) -> None:
    assert await bench.engine.is_healthy()
    await bench.engine.pause_generation(PauseMode.ABORT)
    assert not await bench.engine.is_ready()
    if bench.kind != "fake":  # which does what SGLang does if its health endpoint generates
        assert await bench.engine.is_healthy()
    await bench.engine.continue_generation()
    assert await bench.engine.is_ready()
    assert await bench.engine.is_healthy()


async def test_only_the_embedded_engine_lists_its_tensors(bench: Bench) -> None:
    asked: Any = bench.engine
    if bench.kind == "sglang":
        with pytest.raises(EngineRejected) as refused:
            await asked.weights_manifest()
        assert refused.value.status == 404
    else:
        assert {one.name for one in await asked.weights_manifest()} == set(bench.tensors("first"))


# -- the wire -------------------------------------------------------------------------------


NEEDS_BODY = (
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/generate",
)


@not_for("fake")
@NOT_VLLM  # vLLM has other routes
async def test_without_a_body_a_call_is_refused(bench: Bench) -> None:
    async with bench.http() as http:
        for path in NEEDS_BODY:
            assert (await http.post(path)).status_code == 400, path
        for path in ("/flush_cache", "/weights_checker"):
            assert (await http.post(path)).status_code == 200, path


@not_for("fake")
@NOT_VLLM  # vLLM has other routes
async def test_an_error_in_a_stream_is_an_event_in_a_200(bench: Bench) -> None:
    too_long = {"input_ids": [65] * 5000, "stream": True}
    async with (
        bench.http() as http,
        http.stream("POST", "/generate", json=too_long) as answer,
    ):
        if differs(bench, "a prompt that is too long is refused inside the stream"):
            assert answer.status_code == 400
            return
        assert answer.status_code == 200
        lines = [line async for line in async_lines_of(answer) if line]
    assert '"error"' in lines[0]
    assert lines[-1] == "data: [DONE]"


async def test_the_vocabulary_is_as_large_as_the_suite_thinks(bench: Bench) -> None:
    reply = await bench.engine.generate(
        input_ids=[VOCABULARY - 1], sampling_params=SamplingParams(max_new_tokens=1)
    )
    assert len(reply.output_ids) == 1


def payload_of(bench: Bench, which: str) -> list[str]:
    from tests.support.contract import payload

    return payload(bench.kind, bench.tensors(which))
