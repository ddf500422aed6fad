"""Exact accounting over random deaths, without sockets."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.http.reply_check import UnusableReply
from rollout.router.continuation.dialects.sglang import may_be_ahead
from rollout.router.continuation.fast_path import FastReply
from rollout.router.http.fast_json import dumps, loads
from tests.rollout.router.continuation.replies import generate

PIECES = [b"a", b"\xe2\x82", b"\xac", b"ST", b"OP", b" ", b"S", b"T", b"O", b"P"]


@dataclass
class Engine:
    """Its token at a place in the sequence depends on the place alone, so any run continues any."""

    tokens: list[int]
    version: int
    sends_deltas: bool = False
    interval: int = 1

    def events(self, body: bytes, prompt: list[int]):
        raw = json.loads(body)
        ids, sampling = raw["input_ids"], raw["sampling_params"]
        start = len(ids) - len(prompt)
        assert ids == prompt + self.tokens[:start], "the continuation is not what was generated"
        budget = sampling["max_new_tokens"]
        assert budget > 0
        out: list[int] = []
        sent = sent_text = 0
        while True:
            out.append(self.tokens[start + len(out)])
            text = b"".join(PIECES[entry] for entry in out).decode(errors="replace")
            finish = None
            matched = next((stop for stop in sampling.get("stop", []) if stop in text), None)
            if matched is not None:
                text = text[: text.index(matched)]
                finish = {"type": "stop", "matched": matched}
            elif len(out) >= budget:
                finish = {"type": "length", "length": len(out)}
            if finish is None and len(out) % self.interval:
                continue
            first, first_text = (sent, sent_text) if self.sends_deltas else (0, 0)
            logprobs = [[-float(start + n), entry, None] for n, entry in enumerate(out)]
            yield {
                "text": text[first_text:],
                "output_ids": out[first:],
                "meta_info": {
                    "prompt_tokens": len(ids),
                    "completion_tokens": len(out),
                    "finish_reason": finish,
                    "weight_version": str(self.version),
                    "output_token_logprobs": logprobs[first:],
                },
            }
            if finish is not None:
                return
            sent, sent_text = len(out), len(text)


def finished(tokens, budget, stops, deaths, *, prompt=(1, 2, 3), sends_deltas=False, aborts=False):
    sampling = {"max_new_tokens": budget, "stop": stops}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
    reply = generate(json.dumps(body).encode(), 2)
    assert reply is not None
    shown = 0
    for number, (death, interval) in enumerate([*deaths, (None, 1)]):
        engine = Engine(tokens, number, sends_deltas, interval)
        for count, event in enumerate(engine.events(reply.body(), list(prompt))):
            if count == death:
                if aborts and event["meta_info"]["finish_reason"] is None:
                    event["meta_info"]["finish_reason"] = {"type": "abort", "message": "paused"}
                    reply.absorb(event)
                    check(reply, budget)
                break
            reply.absorb(event)
            check(reply, budget)
            if reply.is_safe:
                num = len(reply.payload()["output_ids"])
                assert num >= shown, "what was shown was taken back"
                shown = num
        if reply.is_finished and not reply.is_aborted:
            return reply
        reply.lose_engine()
    raise AssertionError("never finished")


def check(reply: FastReply, budget: int) -> None:
    payload = reply.payload()
    meta, ids = payload["meta_info"], payload["output_ids"]
    assert len(ids) == meta["completion_tokens"] <= budget
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    assert [entry[0] for entry in meta["output_token_logprobs"]] == [
        -float(n) for n in range(len(ids))
    ]
    at = 0
    for span in meta["weight_versions"]:
        assert span["start"] == at < span["end"]
        at = span["end"]
    assert at == len(ids)


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=60, max_size=60)
DEATHS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=6)


@pytest.mark.parametrize("aborts", [False, True])
@given(TOKENS, st.integers(1, 50), st.sampled_from([[], ["STOP"], ["STOP", "a a"]]), DEATHS)
def test_lost_engines_change_only_the_versions_of_a_response(aborts, tokens, budget, stops, deaths):
    whole = finished(tokens, budget, stops, []).payload()
    pieced = finished(tokens, budget, stops, deaths, aborts=aborts).payload()
    assert pieced["output_ids"] == whole["output_ids"]
    assert pieced["text"] == whole["text"]
    for name in ("finish_reason", "completion_tokens", "prompt_tokens"):
        assert pieced["meta_info"][name] == whole["meta_info"][name]


@given(st.lists(st.sampled_from([0, 5]), min_size=60, max_size=60), st.integers(1, 50), DEATHS)
def test_engines_that_send_only_what_is_new_are_understood(tokens, budget, deaths):
    whole = finished(tokens, budget, [], []).payload()
    pieced = finished(tokens, budget, [], deaths, sends_deltas=True).payload()
    assert (pieced["text"], pieced["output_ids"]) == (whole["text"], whole["output_ids"])


def test_tokens_of_a_lost_engine_are_kept_and_counted():
    reply = finished([0] * 60, 10, [], [(4, 1)])
    assert (reply.num_kept, reply.num_recomputed, reply.num_failovers) == (4, 0, 1)
    spans = reply.payload()["meta_info"]["weight_versions"]
    assert spans == [
        {"version": "0", "start": 0, "end": 4},
        {"version": "1", "start": 4, "end": 10},
    ]


def test_the_last_token_of_the_budget_is_generated_again_for_its_finish_reason():
    reply = generate(b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}', 1)
    for ids in ([5], [5, 6]):
        reply.absorb({"output_ids": ids, "text": "ab", "meta_info": {"weight_version": "1"}})
    reply.lose_engine()
    body = json.loads(reply.body())
    assert (body["input_ids"], body["sampling_params"]["max_new_tokens"]) == ([1, 5], 1)
    assert reply.num_recomputed == 1


@pytest.mark.parametrize(
    "event",
    [
        {"output_ids": [1, 2], "meta_info": {"output_token_logprobs": [[0.0, 1, None]]}},
        {"output_ids": [1] * 9, "meta_info": {"weight_version": "1"}},
    ],
)
def test_an_event_that_does_not_add_up_is_refused(event):
    reply = generate(b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 8}}', 1)
    with pytest.raises(ValueError, match=r"for 2 tokens|at most"):
        reply.absorb(event)


WRITTEN = {
    "dense": (b"", b""),
    "ids apart": (b'"output_ids":', b'"output_ids": '),
    "pairs apart": (b'"output_token_logprobs":', b'"output_token_logprobs": '),
}


@pytest.mark.parametrize("num", [4, 900])
@pytest.mark.parametrize(
    "wrong", [None, (1 << 40, -1.0, 1 << 40), (5, 3.0, 5), (5, -1.0, 6), (6, -1.0, 5)]
)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("has_logprobs", [True, False])
def test_a_token_that_changes_in_a_later_event_is_checked_again(num, wrong, written, has_logprobs):
    """However the event is written: what stands as before is not parsed, or not checked."""
    body = {"input_ids": [1], "return_logprob": has_logprobs, "stream": True}
    reply = generate(dumps({**body, "sampling_params": {"max_new_tokens": 2000}}))
    tokens = [(5, -1.0, 5)] * num
    for changed in (tokens, [*tokens, tokens[0]], [wrong or tokens[0], *tokens, tokens[0]]):
        meta = {"weight_version": "1", "completion_tokens": len(changed), "finish_reason": None}
        if has_logprobs:
            meta["output_token_logprobs"] = [[value, named, None] for _, value, named in changed]
        event = {"text": "", "output_ids": [token for token, _, _ in changed], "meta_info": meta}
        data = dumps(event).replace(*WRITTEN[written])
        if changed[0] == wrong and (has_logprobs or wrong[0] == 1 << 40):
            with pytest.raises(UnusableReply):
                reply.take(data)
        else:
            assert reply.take(data) is None
            assert reply.num == len(changed)


def test_what_one_engine_alone_can_report_or_continue_starts_over():
    for body in (
        {"text": "x"},
        {"input_ids": [1], "sampling_params": {"json_schema": "{}"}},
        {"input_ids": [1], "return_routed_experts": True},
        {"input_ids": [1], "return_routed_experts": True, "routed_experts_start_len": 1},
        {"input_ids": [1], "return_hidden_states": "last"},
        {"input_ids": [1], "session_params": {"id": "s"}},
    ):
        reply = generate(json.dumps(body).encode(), 1)
        reply.absorb({"output_ids": [1, 2], "text": "ab", "meta_info": {"weight_version": "1"}})
        reply.lose_engine()
        again = json.loads(reply.body())
        assert again.get("input_ids") == body.get("input_ids")
        assert reply.num_recomputed == 2


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b'{"input_ids": [[1], [2]]}',
        b'{"text": ["a", "b"]}',
        b'{"input_ids": [1], "sampling_params": {"n": 2}}',
        b'{"input_ids": [1], "sampling_params": [{}]}',
        b"{}",
    ],
)
def test_a_request_for_several_completions_has_no_reply(body):
    assert generate(body, 1) is None


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_body_breaks_its_reading(body):
    generate(b'{"input_ids": ' + body + b"}", 1)
    generate(body, 1)


@pytest.mark.parametrize(
    ("budget", "stream", "interval"), [(128, 0, 32), (6400, 0, 100), (6400, 1, 32)]
)
def test_a_long_request_is_read_a_bounded_number_of_times(budget, stream, interval):
    body = {"input_ids": [1], "stream": stream, "sampling_params": {"max_new_tokens": budget}}
    reply = generate(json.dumps(body).encode(), 32)
    assert reply is not None
    assert json.loads(reply.body())["sampling_params"]["stream_interval"] == interval


def test_json_that_orjson_refuses_is_read_and_written_too():
    assert loads(b"[NaN, 1]")[1] == 1
    assert dumps({"a": 1 << 70}) == b'{"a": 1180591620717411303424}'
    with pytest.raises(ValueError, match="Expecting"):
        loads(b"{")
    with pytest.raises(ValueError, match="nested too deep"):
        loads(b"[" * 50_000 + b"]" * 50_000)
    deep = []
    for _ in range(50_000):  # Python 3.13 takes 5000
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deep"):
        dumps(deep)


def test_an_unlimited_request_is_read_a_bounded_number_of_times_too():
    body = b'{"input_ids": [1], "sampling_params": {"max_new_tokens": null}}'
    reply = generate(body, 32)
    assert reply is not None
    assert json.loads(reply.body())["sampling_params"]["stream_interval"] == 1024


def test_other_fields_of_a_reply_are_passed_on():
    reply = generate(b'{"input_ids": [1], "return_prompt_token_ids": true}', 1)
    meta = {"routed": "x", "weight_version": "1"}
    reply.absorb({"output_ids": [1], "prompt_token_ids": [1], "meta_info": meta})
    payload = reply.payload()
    assert (payload["prompt_token_ids"], payload["meta_info"]["routed"]) == ([1], "x")


@pytest.mark.parametrize(
    "event",
    [
        5,
        {"text": 5},
        {"output_ids": 7},
        {"meta_info": [1]},
        {"meta_info": {"finish_reason": "length"}},
        {"meta_info": {"finish_reason": {"type": None}}},
        {"output_ids": [1], "meta_info": {"weight_versions": [{"version": 1}]}},
        {"output_ids": [1], "meta_info": {"weight_versions": [{"version": 1, "end": "x"}]}},
    ],
)
def test_an_event_of_another_form_is_refused(event):
    reply = generate(b'{"input_ids": [1]}', 1)
    with pytest.raises((ValueError, TypeError, AttributeError, KeyError)):
        reply.absorb(event)


@pytest.mark.parametrize(("text", "num_kept"), [("", 0), ("\ufffd", 0), (None, 3), ("a", 3)])
def test_tokens_are_kept_if_their_text_is_there_or_the_engine_sends_none(text, num_kept):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 50}}
    reply = generate(json.dumps(body).encode(), 3)
    assert reply is not None
    for num in (1, 2, 3):
        event = {"output_ids": [1, 1, 1], "meta_info": {"weight_version": "1"}}
        reply.absorb(event if text is None else event | {"text": text})
        reply.lose_engine()
        assert reply.num_kept == num * num_kept


def test_only_the_tokenizer_shows_that_the_last_of_several_tokens_has_no_text_so_far():
    text_of = {1: "a", 2: "\ufffd", 3: "b"}
    for decode, num_kept in ((None, 2), (lambda ids: "".join(map(text_of.get, ids)), 0)):
        reply = generate(b'{"input_ids": [1]}', 1)
        assert reply is not None
        reply.decode = decode
        reply.absorb({"output_ids": [1, 2], "text": "a", "meta_info": {"weight_version": "1"}})
        reply.lose_engine()
        assert reply.num_kept == num_kept


@pytest.mark.parametrize(
    ("character", "is_chinese"),
    [
        *(("\u33ff", False), ("\u3400", True), ("\u4dbf", True), ("\u4dc0", False)),
        *(("\u4e00", True), ("\u9fff", True), ("\U00020000", True), ("a", False)),
    ],
)
def test_a_text_may_be_ahead_behind_each_chinese_character(
    character: str, is_chinese: bool
) -> None:
    assert may_be_ahead(f"a{character}") is is_chinese
    assert not may_be_ahead(f"{character}a")
    assert not may_be_ahead("")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_request_that_the_scheduler_refuses_is_an_error_and_no_abort(is_streamed):
    body = {"input_ids": [1], "stream": is_streamed}
    reason = {"type": "abort", "message": "top_k is needed", "status_code": 400}
    meta = {"id": "r", "finish_reason": reason, "weight_version": "1"}
    data = json.dumps({"text": "", "output_ids": [], "meta_info": meta}).encode()
    reply = generate(json.dumps(body).encode())
    error = reply.take(data)["error"]
    assert (error["message"], error["code"]) == ("top_k is needed", 400)
    assert not reply.is_finished


@pytest.mark.parametrize(("status", "ids"), [(None, []), (503, []), (400, [7])])
def test_another_abort_ends_the_reply(status, ids):
    reason = {"type": "abort", "message": "", "status_code": status}
    meta = {"id": "r", "finish_reason": reason, "weight_version": "1"}
    data = json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()
    reply = generate(json.dumps({"input_ids": [1], "stream": True}).encode())
    assert reply.take(data) is None
    assert reply.is_aborted
