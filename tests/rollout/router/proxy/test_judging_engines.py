"""An engine is judged by its own faults: what a client sent never takes one out of routing."""

import asyncio
import json
from contextlib import suppress

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.router.http.routes import COMPLETION_PATHS
from tests.rollout.router.conftest import router_config
from tests.rollout.router.odd_bodies import ODD, PLAIN, odd_bodies
from tests.rollout.router.stub_engine import (
    CHUNKED,
    Hold,
    chunk,
    die_unanswered,
    reply,
    stream,
)

ON = router_config(token_failover="on")
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


def event(payload) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def tokens(path, num, finish="length"):
    """An event with this many tokens, as each route has it."""
    if path == GENERATE:
        reason = {"type": finish} if finish else None
        meta = {"completion_tokens": num, "finish_reason": reason, "weight_version": "1"}
        return event({"text": "a" * num, "output_ids": [7] * num, "meta_info": meta})
    choice = {"index": 0, "finish_reason": finish}
    if path == CHAT:
        choice["delta"] = {"content": "a" * num}
    else:
        choice |= {"text": "a" * num, "token_ids": [7] * num}
    usage = {"prompt_tokens": 3, "completion_tokens": num}
    return event({"id": "r", "choices": [choice], "usage": usage})


def limited(path, budget):
    if path == GENERATE:
        return {**PLAIN[path], "sampling_params": {"max_new_tokens": budget}}
    return {**PLAIN[path], "max_tokens": budget}


async def states(bench):
    return [engine["state"] for engine in (await bench.host.stats())["engines"]]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [GENERATE, COMPLETION, CHAT])
async def test_more_tokens_than_the_router_read_as_budget_end_the_request_alone(
    make_bench, path, is_streamed
):
    bench = await make_bench(*[stream(tokens(path, 50), b"data: [DONE]\n\n")] * 2, config=ON)
    got = await bench.ask(path, json={**limited(path, 16), "stream": is_streamed})
    assert (got.status, got.json["error"]["type"]) == (502, "engine_failure")
    assert got.json["error"]["engine"] == got.headers["x-engine-id"] == "e-0"
    assert "50 output tokens where at most 16" in got.json["error"]["message"]
    assert (await states(bench), bench.failures) == (["serving"] * 2, [])
    stats = await bench.host.stats()
    assert (stats["num_unusable_replies"], stats["num_failovers"]) == (1, 0)
    assert bench.engines[1].seen == []


async def test_an_unusable_event_after_the_first_ends_the_clients_stream_with_an_error(make_bench):
    hold = Hold()
    odd = event({"meta_info": {"finish_reason": "length"}})
    bench = await make_bench(*[stream(tokens(GENERATE, 1, None), hold, odd)] * 2, config=ON)
    body = {**limited(GENERATE, 16), "stream": True}
    async with bench.client.post(GENERATE, json=body) as response:
        assert json.loads((await response.content.readany()).removeprefix(b"data: "))["text"] == "a"
        hold.opened.set()
        last, rest = (await response.content.read()).split(b"\n\n")
    assert rest == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["engine"] == "e-0"
    assert (await states(bench), bench.failures) == (["serving"] * 2, [])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETION, {"max_completion_tokens": 50}),
        (COMPLETION, {"max_tokens": None}),
        (COMPLETION, {"max_tokens": "40"}),
        (COMPLETION, {"max_tokens": 40.0}),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 50}),
        (GENERATE, {"sampling_params": {"max_new_tokens": 5.0}}),
        (GENERATE, {"sampling_params": {"stop": 5}}),
    ],
)
async def test_a_body_that_engines_read_in_their_own_way_is_forwarded_as_it_is(
    make_bench, path, fields
):
    bench = await make_bench(reply(b'{"as": "it is"}'), config=ON)
    got = await bench.ask(path, json={**PLAIN[path], **fields})
    assert (got.status, got.body) == (200, b'{"as": "it is"}')
    sent = bench.engines[0].seen[0].json
    assert {name: sent[name] for name in fields} == fields
    assert "stream" not in sent


async def test_a_request_that_breaks_three_engines_in_a_row_is_not_sent_to_a_fourth(make_bench):
    bench = await make_bench(*[die_unanswered()] * 4, config=ON)
    got = await bench.ask(json=limited(GENERATE, 16))
    assert (got.status, got.json["error"]["engine"]) == (502, "e-2")
    assert "not sent again: 3 engines in a row" in got.json["error"]["message"]
    assert await states(bench) == ["dead", "serving", "serving", "serving"]
    assert bench.engines[3].seen == []
    assert [failure.has_left_routing for failure in bench.failures] == [True, False, False]
    # The engines that stayed are judged by the next request, as any other.
    assert (await bench.ask(json=limited(GENERATE, 16))).status == 502
    assert (await states(bench)).count("dead") == 2


async def test_a_request_whose_two_engines_end_together_is_answered_by_a_third(make_bench):
    finished = stream(tokens(GENERATE, 3), b"data: [DONE]\n\n")
    bench = await make_bench(die_unanswered(), die_unanswered(), finished, config=ON)
    got = await bench.ask(json=limited(GENERATE, 3))
    assert (got.status, got.headers["x-engine-id"]) == (200, "e-2")


async def test_engines_without_a_connection_are_not_counted_as_broken_by_the_request(make_bench):
    finished = stream(tokens(GENERATE, 3), b"data: [DONE]\n\n")
    bench = await make_bench(reply(), reply(), finished, config=ON)
    for engine in bench.engines[:2]:
        engine.refuse()
    got = await bench.ask(json=limited(GENERATE, 3))
    assert (got.status, got.headers["x-engine-id"]) == (200, "e-2")
    assert await states(bench) == ["dead", "dead", "serving"]


ODD_EVENTS = st.one_of(
    st.sampled_from([tokens(path, num) for path in PLAIN for num in (0, 1, 16, 500)]),
    st.sampled_from([tokens(path, num, None) for path in PLAIN for num in (0, 1, 16, 500)]),
    st.sampled_from(
        [
            b"data: [DONE]\n\n",
            b"data: 5\n\n",
            b"data: [1]\n\n",
            b'data: "error"\n\n',
            b'data: ["error"]\n\n',
            b"data: {\n\n",
            b"data: " + b"[" * 5000 + b"]" * 5000 + b"\n\n",
            b'data: {"meta_info": {"x": ' + b"[" * 500 + b"]" * 500 + b"}}\n\n",
            b"data:\r\n\r\n",
            b"event: x\ndata: {}\n\n",
            event({"error": {"message": "no", "code": 400}}),
            event({"error": 5}),
            event({"choices": 5, "usage": [1]}),
            event({"choices": [{"delta": 5, "text": 5, "finish_reason": 5}]}),
            event({"choices": [{"token_ids": 5, "logprobs": {"content": ["x"]}}]}),
            event({"usage": {"completion_tokens": "many"}, "choices": [{"delta": {"content": 5}}]}),
            event({"text": {}, "output_ids": {"a": 1}, "meta_info": {"finish_reason": {}}}),
            event({"output_ids": [1], "meta_info": {"weight_versions": [7]}}),
            event({"output_ids": [[]], "meta_info": {"finish_reason": {"type": "abort"}}}),
        ]
    ),
)
ODD_REPLIES = st.one_of(
    st.lists(ODD_EVENTS, max_size=4).map(lambda events: stream(*events)),
    st.sampled_from(
        [
            reply(b'{"error": "no"}', "400 Bad Request"),
            reply(b"Internal Server Error", "500 Internal Server Error"),
            reply(b'{"choices": []}', headers=("Content-Type: application/json",)),
            reply(b"[" * 2000, headers=("Content-Type: application/json",)),
            reply(b"data: {}\n\n", headers=("Content-Type: text/event-stream",)),
            reply(b"", "204 No Content"),
            reply(b"<html>", headers=("Content-Type: text/html",)),
        ]
    ),
)


async def test_no_request_takes_a_healthy_engine_out_and_every_request_ends(make_bench, caplog):
    """Whatever a client sends on whichever route, and whatever the engines answer to it."""
    scripts = []

    async def answers(connection, seen):
        await scripts[-1](connection, seen)

    bench = await make_bench(answers, answers, config=ON)
    loop = asyncio.get_running_loop()

    async def ask(path, body):
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with suppress(aiohttp.ClientPayloadError):  # a stream that cannot end well is cut
            await asyncio.wait_for(bench.ask(path, data=data, headers=headers), 10)
        assert await states(bench) == ["serving"] * 2

    @settings(suppress_health_check=list(HealthCheck))
    @given(odd_bodies(), st.sampled_from(sorted(COMPLETION_PATHS)), ODD_REPLIES)
    def attack(drawn, other_path, script):
        path, body = drawn
        scripts.append(script)
        for at in {path, other_path}:
            asyncio.run_coroutine_threadsafe(ask(at, body), loop).result(20)

    await asyncio.to_thread(attack)
    assert bench.failures == []
    assert not any(record.exc_info for record in caplog.records)
    scripts.append(stream(tokens(GENERATE, 3), b"data: [DONE]\n\n"))
    assert (await bench.ask(json=limited(GENERATE, 3))).status == 200


async def test_each_odd_body_ends_and_no_engine_leaves(make_bench):
    refuses = reply(b'{"error": "no"}', "422 Unprocessable Entity")
    bench = await make_bench(refuses, refuses, config=ON)
    for path, odd in ODD.items():
        for fields in odd:
            # The router refuses some itself.
            assert (await bench.ask(path, json={**PLAIN[path], **fields})).status in (400, 422)
    assert (await states(bench), bench.failures) == (["serving"] * 2, [])


async def test_a_body_nested_deep_is_released_from_the_gate_like_any_other(make_bench):
    bench = await make_bench(reply(b"{}"), config=ON)
    await bench.host.set_gate("holding", phase="offloaded")
    deep = b'{"input_ids": [1], "x": ' + b"[" * 982 + b"]" * 982 + b"}"
    pending = [bench.begin(data=body) for body in (deep, b'{"input_ids": [1]}', deep)]
    await bench.wait_until_held(3)
    await bench.host.set_gate("open")
    responses = await asyncio.gather(*pending)
    assert [got.status for got in responses] == [200] * 3
    assert sorted(seen.body.count(b"[") for seen in bench.engines[0].seen) == [1, 983, 983]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
async def test_events_are_seen_whole_however_they_are_cut(make_bench, end, size):
    whole = b"".join(
        part.replace(b"\n\n", end)
        for part in (tokens(GENERATE, 1, None), tokens(GENERATE, 3), b"data: [DONE]\n\n")
    )

    async def cuts(connection, seen):
        await connection.send(CHUNKED % b"text/event-stream")
        for at in range(0, len(whole), size):
            await connection.send(chunk(whole[at : at + size]))
            await asyncio.sleep(0)
        await connection.send(b"0\r\n\r\n")

    bench = await make_bench(cuts, config=ON)
    got = await bench.ask(json={**limited(GENERATE, 3), "stream": True})
    events = [json.loads(part.removeprefix(b"data: ")) for part in got.body.split(b"\n\n")[:-2]]
    assert events[-1]["output_ids"] == [7, 7, 7]
