"""An exchange without sockets: what client, gate, engine and clock do, one after the other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engines.protocol import Endpoint, WorkerType
from rollout.router.gate.gate import GateState
from rollout.rules.routing import Backend
from tests.rollout.router.exchange_rig import PLAIN, Rig, rig_of
from tests.rollout.router.generate_events import PROMPT, STREAM, event, with_logprobs


def test_a_reply_is_passed_on_and_the_place_given_back() -> None:
    rig = rig_of("a", failover=False)
    _, client = rig.begin()
    rig.engines.sent[0].reply(PLAIN, b'{"n": 1}')
    assert (client.status, client.end) == (200, "finished")
    assert client.data.endswith(b'{"n": 1}')
    assert rig.is_empty()


def test_an_engine_lost_before_a_byte_is_replaced_once() -> None:
    rig = rig_of("a", "b", "c", failover=False)
    _, client = rig.begin()
    rig.engines.sent[0].lose()
    first, second = rig.engines.sent
    assert first.port != second.port
    second.lose()
    assert (client.status, client.end) == (502, "finished")
    assert len(rig.engines.sent) == 2
    assert rig.is_empty()


def test_a_stream_continues_on_another_engine_behind_its_first_events() -> None:
    rig = rig_of("a", "b")
    _, client = rig.begin(stream=True)
    rig.engines.sent[0].reply(STREAM, event(1, 2), is_end=False)
    assert b'"output_ids":[1,2]' in client.data
    rig.engines.sent[0].lose()
    assert rig.engines.sent[1].body["input_ids"][-2:] == [1, 2]
    rig.engines.sent[1].reply(STREAM, event(3, 4, finish="length"))
    assert b'"output_ids":[1,2,3,4]' in client.data
    assert client.data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert (client.end, rig.proxy.counts.num_tokens_kept) == ("finished", 2)
    assert rig.is_empty()


def test_an_abort_in_a_pause_waits_at_the_gate() -> None:
    rig = rig_of("a")
    _, client = rig.begin()
    rig.gate.set_state(GateState.HOLDING)
    rig.engines.sent[0].reply(STREAM, event(1, finish="abort"))
    assert (rig.gate.num_held, client.data, len(rig.engines.sent)) == (1, b"", 1)
    rig.gate.set_state(GateState.OPEN, weight_version=8)
    rig.engines.sent[1].reply(STREAM, event(2, 3, 4, finish="length"))
    assert b'"output_ids":[1,2,3,4]' in client.data
    assert rig.is_empty()


def test_an_abort_that_was_asked_for_is_the_end() -> None:
    rig = rig_of("a")
    _, client = rig.begin()
    rig.gate.mark_aborted(None)
    rig.engines.sent[0].reply(STREAM, event(1, finish="abort"))
    assert (client.status, client.end, len(rig.engines.sent)) == (200, "finished", 1)
    assert rig.is_empty()


@pytest.mark.parametrize("num", [1, 8])
def test_an_engine_that_aborts_without_end_is_seen_by_the_client(num: int) -> None:
    rig = rig_of("a")
    rig.proxy.config = rig.proxy.config.model_copy(update={"max_failovers": num})
    _, client = rig.begin()
    while not client.end:
        rig.engines.sent[-1].reply(STREAM, event(finish="abort"))
    assert len(rig.engines.sent) == num + 1
    assert rig.is_empty()


def test_an_engine_that_is_taken_away_does_not_count_as_an_attempt() -> None:
    rig = rig_of("a", "b", failover=False)
    _, client = rig.begin()
    for epoch, gone in enumerate(["a", "b"] * 3, 2):
        upstream = rig.engines.sent[-1]
        stays = [Backend(one, Endpoint("h", 9000)) for one in "ab" if one != gone]
        rig.gate.set_members(epoch, stays)
        assert upstream.is_dropped == (upstream is not rig.engines.sent[-1])
    rig.engines.sent[-1].reply(PLAIN, b"{}")
    assert client.status == 200
    assert rig.proxy.counts.num_cut > 1
    assert rig.is_empty()


def test_a_client_that_does_not_read_pauses_the_engine() -> None:
    rig = rig_of("a")
    exchange, client = rig.begin(stream=True)
    (upstream,) = rig.engines.sent
    exchange.write_paused()
    assert upstream.is_paused
    exchange.write_resumed()
    assert not upstream.is_paused
    client.is_write_paused = True
    upstream.reply(STREAM, event(1), is_end=False)
    assert upstream.is_paused
    exchange.client_left()
    assert upstream.is_dropped
    assert rig.is_empty()


def test_an_error_of_the_router_ends_its_request_alone() -> None:
    rig = rig_of("a")
    _, other = rig.begin()
    rig.engines.fails = True
    _, client = rig.begin()
    assert (client.status, client.end) == (500, "finished")
    assert len(rig.gate.in_flight) == 1
    rig.engines.sent[0].reply(STREAM, event(1, finish="stop"))
    assert other.status == 200
    assert rig.is_empty()


def test_a_deadline_and_a_stop_end_what_has_not_begun_in_words() -> None:
    rig = rig_of("a")
    (late, one), (stopped, other) = rig.begin(), rig.begin()
    late.expire(9.0)
    stopped.stop()
    assert (one.status, other.status) == (504, 503)
    assert all(upstream.is_dropped for upstream in rig.engines.sent)
    assert rig.is_empty()


def pair_rig(num: int = 1) -> Rig:
    rig = rig_of()
    members = [
        Backend(f"{kind}-{place}", Endpoint("h", place + (10 if kind == "decode" else 0)))
        for place in range(num)
        for kind in ("prefill", "decode")
    ]
    members = [replace(one, worker_type=WorkerType(one.engine_id[:-2])) for one in members]
    rig.gate.set_members(2, members)
    return rig


@pytest.mark.parametrize("prefill_is_first", [False, True])
def test_log_probs_of_the_prompt_come_from_the_prefill_engine(prefill_is_first: bool) -> None:
    rig = pair_rig()
    _, client = rig.begin(return_logprob=True, logprob_start_len=0)
    prefill, decode = sorted(rig.engines.sent, key=lambda one: one.port)
    reply = json.dumps({"meta_info": PROMPT}).encode()
    if prefill_is_first:
        prefill.reply(PLAIN, reply)
        decode.reply(STREAM, with_logprobs(1, finish="stop"))
    else:
        decode.reply(STREAM, with_logprobs(1, finish="stop"))
        assert client.end == ""
        prefill.reply(PLAIN, reply)
    assert b'"input_token_logprobs":[[null,1,null],[-1.0,2,null]]' in client.data
    assert rig.is_empty()


def test_a_prefill_engine_lost_behind_the_reply_makes_both_engines_reply_again() -> None:
    """The next prefill engine may reply first, and that is not the end."""
    rig = pair_rig(2)
    _, client = rig.begin(return_logprob=True, logprob_start_len=0)
    prefill, decode = sorted(rig.engines.sent, key=lambda one: one.port)
    decode.reply(STREAM, with_logprobs(1, finish="stop"))
    prefill.lose()
    prefill, decode = sorted(rig.engines.sent[2:], key=lambda one: one.port)
    prefill.reply(PLAIN, json.dumps({"meta_info": PROMPT}).encode())
    assert (client.data, client.end) == (b"", "")
    decode.reply(STREAM, with_logprobs(1, finish="stop"))
    assert (client.status, client.end) == (200, "finished")
    assert rig.is_empty()


def test_a_prefill_engine_without_log_probs_is_named_in_the_error() -> None:
    rig = pair_rig()
    _, client = rig.begin(return_logprob=True, logprob_start_len=0)
    prefill, decode = sorted(rig.engines.sent, key=lambda one: one.port)
    prefill.reply(PLAIN, b"no")
    assert client.status == 502
    assert b"sent no log-probs of the prompt: no" in client.data
    assert decode.is_dropped
    assert rig.is_empty()
