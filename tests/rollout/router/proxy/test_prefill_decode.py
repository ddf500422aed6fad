"""Prefill and decode engines, faked: tests check that both get the same address to connect at."""

import asyncio
import json

import pytest

from engines.protocol import WorkerType
from tests.rollout.router.conftest import router_config
from tests.rollout.router.stub_engine import Hold, die_unanswered, hold_then_reply, reply, stream


async def pair(make_bench, *scripts, prefill=1, port=9123, config=None):
    bench = await make_bench(*scripts, **({"config": config} if config else {}))
    members = [
        bench.member(
            index,
            worker_type=WorkerType.PREFILL if index < prefill else WorkerType.DECODE,
            bootstrap_port=port,
        )
        for index in range(len(scripts))
    ]
    await bench.host.set_members(2, members)
    return bench


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_both_get_the_request_with_the_same_address_and_decode_replies(make_bench, path):
    bench = await pair(make_bench, reply(b"prefill"), reply(b"decode"))
    got = await bench.ask(path)
    assert (got.body, got.headers["x-engine-id"]) == (b"decode", "e-1")
    while not bench.engines[0].seen:
        await bench.host.stats()
    first, second = (engine.seen[0].json for engine in bench.engines)
    assert first == second
    assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", 9123)
    assert 0 <= first["bootstrap_room"] < 1 << 63


async def test_rooms_differ_and_pairs_share_the_load(make_bench):
    holds = [Hold() for _ in range(4)]
    bench = await pair(make_bench, *map(hold_then_reply, holds), prefill=2)
    pending = [bench.begin() for _ in "12"]
    for hold in holds:
        await hold.entered.wait()
    engines = (await bench.host.stats())["engines"]
    assert [engine["num_in_flight"] for engine in engines] == [1, 1, 1, 1]
    rooms = [engine.seen[0].json["bootstrap_room"] for engine in bench.engines]
    assert (len(set(rooms)), set(rooms[:2]) == set(rooms[2:])) == (2, True)
    for hold in holds:
        hold.opened.set()
    await asyncio.gather(*pending)


async def test_a_prefill_engine_alone_serves_no_request(make_bench):
    bench = await pair(make_bench, reply())
    got = await bench.ask()
    assert (got.status, "a prefill engine" in got.json["error"]["message"]) == (503, True)


async def test_a_prefill_engine_that_dies_is_replaced_with_a_new_place_to_meet(make_bench):
    hold = Hold()
    bench = await pair(make_bench, die_unanswered(), reply(), hold_then_reply(hold), prefill=2)
    pending = bench.begin()
    while len(bench.engines[2].seen) < 2:
        await bench.host.stats()
    hold.opened.set()
    assert (await pending).status == 200
    rooms = [seen.json["bootstrap_room"] for seen in bench.engines[2].seen]
    assert (len(set(rooms)), bench.failures[0].engine_id) == (2, "e-0")


WITH_PROMPT = {
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 2},
    "return_logprob": True,
    "logprob_start_len": 0,
}
PROMPT_LOGPROBS = [[None, 1, None], [-1.5, 2, None], [-2.5, 3, None]]


def event(num: int, of_prompt=(), finish=None) -> bytes:
    meta = {
        "id": "r",
        "completion_tokens": num,
        "weight_version": "1",
        "finish_reason": finish,
        "input_token_logprobs": list(of_prompt),
        "output_token_logprobs": [[-0.5, 7, None]] * num,
    }
    reported = {"text": "a" * num, "output_ids": [7] * num, "meta_info": meta}
    return b"data: " + json.dumps(reported).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
PREFILLED = (event(1, PROMPT_LOGPROBS, {"type": "length", "length": 1}), DONE)
DECODED = (event(1), event(2, finish={"type": "length", "length": 2}), DONE)


@pytest.mark.parametrize("is_last", [False, True], ids=["prefill-first", "prefill-last"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("failover", ["off", "asked", "on"])
async def test_log_probs_of_the_prompt_come_from_the_prefill_engine(
    make_bench, failover, is_streamed, is_last
):
    hold = Hold()
    held, free = (PREFILLED, DECODED) if is_last else (DECODED, PREFILLED)
    slow, quick = stream(hold, *held), stream(*free)
    bench = await pair(
        make_bench,
        *((slow, quick) if is_last else (quick, slow)),
        config=router_config(token_failover=failover),
    )
    pending = bench.begin(json=WITH_PROMPT | {"stream": is_streamed})
    await hold.entered.wait()
    while not all(engine.seen for engine in bench.engines):
        await bench.host.stats()
    hold.opened.set()
    got = await pending
    assert got.status == 200
    if is_streamed:
        *events, done = got.body.strip().split(b"\n\n")
        assert done == DONE.strip()
        reported = [json.loads(entry.removeprefix(b"data:")) for entry in events]
    else:
        reported = [got.json]
    assert [entry["meta_info"]["input_token_logprobs"] for entry in reported] == [
        PROMPT_LOGPROBS
    ] * len(reported)
    assert reported[-1]["output_ids"] == [7, 7]
    assert reported[-1]["meta_info"]["output_token_logprobs"] == [[-0.5, 7, None]] * 2
    await bench.host.drained(2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", WITH_PROMPT | {"logprob_start_len": -1}),
        ("/generate", WITH_PROMPT | {"return_logprob": False}),
        ("/generate", WITH_PROMPT | {"input_ids": [[1, 2], [3]]}),
        ("/v1/completions", WITH_PROMPT | {"prompt": [1, 2]}),
    ],
    ids=["of-the-output", "none", "several-prompts", "not-generate"],
)
async def test_a_request_without_prompt_log_probs_gets_the_decode_engines_bytes(
    make_bench, path, body
):
    bench = await pair(make_bench, reply(b"{}"), reply(b'{ "text": "as it is" }'))
    assert (await bench.ask(path, json=body)).body == b'{ "text": "as it is" }'


REFUSED = reply(b'{"error": "logprob_start_len is over 3"}', "400 Bad Request")


@pytest.mark.parametrize("prefill", [reply(b"{}"), reply(b"[1]"), REFUSED], ids=["{}", "[]", "400"])
async def test_a_prefill_engine_that_reports_no_log_probs_stays_and_its_request_ends(
    make_bench, prefill
):
    hold = Hold()
    bench = await pair(make_bench, prefill, prefill, hold_then_reply(hold), prefill=2)
    got = await bench.ask(json=WITH_PROMPT)
    assert (got.status, "no log-probs of the prompt" in got.json["error"]["message"]) == (502, True)
    stats = await bench.host.stats()
    assert [engine["state"] for engine in stats["engines"]] == ["serving"] * 3
    assert (stats["num_unusable_replies"], bench.failures) == (1, [])


async def test_a_client_that_leaves_ends_the_work_of_both(make_bench):
    holds = [Hold(), Hold()]
    bench = await pair(make_bench, *map(hold_then_reply, holds))
    pending = bench.begin()
    for hold in holds:
        await hold.entered.wait()
    pending.cancel()
    for engine in bench.engines:
        await asyncio.wait_for(engine.peer_closed.wait(), 2)
    await bench.host.drained(2)


async def test_sessions_reach_their_engine_by_header_and_by_body(make_bench):
    bench = await make_bench(*[reply()] * 4, config=router_config(policy="affinity"))
    by_header = {
        (await bench.ask(json={}, headers={"X-Affinity": "s1"})).headers["x-engine-id"]
        for _ in range(5)
    }
    by_body = {(await bench.ask(json={"affinity": "s1"})).headers["x-engine-id"] for _ in "ab"}
    without = {(await bench.ask()).headers["x-engine-id"] for _ in range(5)}
    assert (len(by_header), by_body == by_header, len(without)) == (1, True, 4)


async def test_prompts_with_the_same_beginning_reach_the_same_engine(make_bench):
    bench = await make_bench(*[reply()] * 4, config=router_config(policy="prefix"))
    shared = list(range(1000, 1200))
    chosen = {
        (await bench.ask(json={"input_ids": [*shared, n]})).headers["x-engine-id"] for n in range(6)
    }
    assert len(chosen) == 1


@pytest.mark.parametrize(
    ("path", "wanted", "is_refused"),
    [
        ("/generate", {"return_routed_experts": True}, True),
        ("/v1/chat/completions", {"return_routed_experts": True}, True),
        ("/v1/completions", {"echo": True, "logprobs": 0}, True),
        ("/generate", {"return_routed_experts": False}, False),
        ("/v1/completions", {"echo": True}, False),
    ],
)
async def test_results_of_the_prompt_that_the_decode_engine_did_not_compute_are_refused(
    make_bench, path, wanted, is_refused
):
    bench = await pair(make_bench, reply(b"prefill"), reply(b"decode"))
    got = await bench.ask(path, json={"text": "a", **wanted})
    if is_refused:
        assert got.status == 400
        assert f"{next(iter(wanted))}" in got.json["error"]["message"]
        assert "only the prefill engine computes the prompt" in got.json["error"]["message"]
        assert not [seen for engine in bench.engines for seen in engine.seen]
    else:
        assert got.body == b"decode"
    engines = (await bench.host.stats())["engines"]
    assert [engine["num_in_flight"] for engine in engines] == [0, 0]
