"""An exchange without sockets: what client, gate, engine and clock do, one after the other."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engines.protocol import Endpoint, WorkerType
from rollout.router.gate.aborts import AbortOrder
from rollout.router.gate.gate import GateState
from rollout.router.http.fast_json import Data
from rollout.router.proxy import exchange
from rollout.rules.routing import Backend
from tests.rollout.router.exchange_rig import PLAIN, Client, Rig, Upstream, rig_of
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
    rig.gate.abort(AbortOrder(is_for_all=True))
    rig.engines.sent[0].reply(STREAM, event(1, finish="abort"))
    assert (client.status, client.end, len(rig.engines.sent)) == (200, "finished", 1)
    assert rig.is_empty()


ABORT = AbortOrder(frozenset({"mine"}))


def payload_of(client: Client) -> dict[str, Any]:
    """The last complete reply, or event, that a client has."""
    text = client.data.decode()
    payload: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.rindex('{"text"'))[0]
    return payload


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_aborted_request_gets_its_tokens_so_far_from_an_engine_that_does_nothing(
    is_streamed: bool,
) -> None:
    rig = rig_of("a")
    _, client = rig.begin(rid="mine", stream=is_streamed)
    (upstream,) = rig.engines.sent
    upstream.reply(STREAM, event(1, 2), is_end=False)
    rig.gate.abort(ABORT)
    assert (client.end, upstream.is_dropped) == ("", False)
    rig.timers[-1].pass_()
    assert (client.status, client.end, upstream.is_dropped) == (200, "finished", True)
    reply = payload_of(client)
    assert reply["output_ids"] == [1, 2]
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert rig.is_empty()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_learns_of_an_abort_when_the_engines_connection_is_closed(
    is_streamed: bool,
) -> None:
    rig = rig_of("a")
    _, client = rig.begin(rid="mine", stream=is_streamed)
    (upstream,) = rig.engines.sent
    upstream.reply(STREAM, event(1, 2), is_end=False)
    rig.gate.abort(ABORT)
    written, was_closed = client.write, list[bool]()

    def write(*parts: Data) -> None:
        was_closed.append(upstream.is_dropped)
        written(*parts)

    client.write = write  # type: ignore[method-assign]
    rig.timers[-1].pass_()
    assert client.end == "finished"
    assert was_closed
    assert all(was_closed)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_request_that_is_aborted_between_two_engines_has_its_tokens_so_far(
    is_streamed: bool, is_lost: bool
) -> None:
    rig = rig_of("a", "b")
    _, client = rig.begin(rid="mine", stream=is_streamed)
    rig.gate.set_state(GateState.HOLDING)
    (upstream,) = rig.engines.sent
    upstream.reply(STREAM, event(1, 2), is_end=False)
    if is_lost:
        upstream.lose()
    else:
        upstream.more(event(1, 2, finish="abort"), is_end=True)
    assert rig.gate.abort(ABORT).num_held == 1
    reply = payload_of(client)
    assert reply["output_ids"] == [1, 2]
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert (client.status, client.end, rig.is_empty()) == (200, "finished", True)


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_aborted_request_whose_engine_is_lost_goes_to_no_other(is_lost: bool) -> None:
    rig = rig_of("a", "b")
    _, client = rig.begin(rid="mine")
    (upstream,) = rig.engines.sent
    upstream.reply(STREAM, event(1, 2), is_end=False)
    rig.gate.abort(ABORT)
    if is_lost:
        upstream.lose()
    else:
        rig.gate.set_members(2, [Backend("b", Endpoint("h", 9001))])
    assert len(rig.engines.sent) == 1
    assert payload_of(client)["output_ids"] == [1, 2]
    assert (client.end, rig.is_empty()) == ("finished", True)


def test_an_aborted_request_keeps_the_tokens_of_an_engine_before() -> None:
    rig = rig_of("a", "b")
    _, client = rig.begin(rid="mine")
    rig.engines.sent[0].reply(STREAM, event(1, 2), is_end=False)
    rig.engines.sent[0].lose()
    rig.gate.abort(ABORT)
    rig.timers[-1].pass_()
    reply = payload_of(client)
    assert (reply["output_ids"], reply["meta_info"]["id"]) == ([1, 2], "mine")
    assert reply["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
    assert rig.is_empty()


@pytest.mark.parametrize("failover", [True, False])
def test_an_aborted_request_without_a_token_is_a_499(failover: bool) -> None:
    rig = rig_of("a", failover=failover)
    _, client = rig.begin(rid="mine")
    rig.gate.abort(ABORT)
    rig.timers[-1].pass_()
    assert (client.status, client.end) == (499, "finished")
    assert rig.is_empty()


def test_an_abort_behind_the_last_token_leaves_the_engines_finish_reason() -> None:
    rig = rig_of("a")
    _, client = rig.begin(rid="mine")
    rig.engines.sent[0].reply(STREAM, event(1, 2, finish="length"), is_end=False)
    rig.gate.abort(ABORT)
    rig.timers[-1].pass_()
    reply = payload_of(client)
    assert (reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]) == ([1, 2], "length")
    assert rig.is_empty()


def test_a_second_abort_gives_an_engine_no_more_time() -> None:
    rig = rig_of("a")
    rig.begin(rid="mine")
    for _ in range(3):
        rig.gate.abort(ABORT)
    assert len(rig.timers) == 1
    rig.timers[0].pass_()
    assert rig.is_empty()


def named_event(upstream: Upstream, *ids: int, finish: str = "") -> bytes:
    """An event that has the id which the engine got, as engines do."""
    return event(*ids, finish=finish).replace(b'"id": "r"', b'"id": "%s"' % upstream.id.encode())


@pytest.mark.parametrize("own", [{}, {"rid": "r\u00e9-1"}])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_sees_one_id_over_all_engines(own: dict[str, str], is_streamed: bool) -> None:
    rig = rig_of("a", "b")
    _, client = rig.begin(stream=is_streamed, **own)
    first = rig.engines.sent[0]
    first.reply(STREAM, named_event(first, 1, finish="abort"))
    second = rig.engines.sent[1]
    second.reply(STREAM, named_event(second, 2, finish="length"))
    assert first.id != second.id
    assert payload_of(client)["meta_info"]["id"] == own.get("rid", first.id)
    assert second.id not in client.data.decode()


def test_a_reply_that_is_passed_on_as_it_came_has_its_clients_id() -> None:
    rig = rig_of("a")
    _, client = rig.begin(rid="r-1")
    (upstream,) = rig.engines.sent
    upstream.reply(STREAM, named_event(upstream, 1, 2, finish="length"))
    reply = payload_of(client)
    assert (reply["meta_info"]["id"], reply["output_ids"]) == ("r-1", [1, 2])
    assert upstream.id not in client.data.decode()


@pytest.mark.parametrize("num", [1, 8])
def test_an_engine_that_aborts_without_end_is_seen_by_the_client(
    num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_of("a")
    monkeypatch.setattr(exchange, "MAX_FAILOVERS", num)
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
