"""Routed experts of a request over several engines: each row from the engine that computed it."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.http.reply_check import UnusableReply
from tests.rollout.router.continuation.replies import generate

PROMPT = [5, 6, 7]


def begin(budget):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": budget, "ignore_eos": True},
        "return_routed_experts": True,
        "stream": True,
    }
    return generate(json.dumps(body).encode(), 2)


def event(engine, prompt, num, finish=None):
    """An engine reports its name for each token that it has computed: all but the last."""
    rows = bytes([engine] * 2) * (len(prompt) + num - 1)
    meta = {"finish_reason": finish, "routed_experts": base64.b64encode(rows).decode()}
    meta["weight_version"] = "1"
    return {"output_ids": [9] * num, "text": "x" * num, "meta_info": meta}


def rows_of(payload):
    data = base64.b64decode(payload["meta_info"]["routed_experts"])
    assert data[::2] == data[1::2]
    return list(data[::2])


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 6))
def test_each_row_is_from_the_engine_that_computed_its_token_first(runs, last):
    budget = sum(runs) + last
    reply = begin(budget)
    expected = []
    for engine, num in enumerate([*runs, last]):
        prompt = json.loads(reply.body())["input_ids"]
        is_last = engine == len(runs)
        for count in range(1, num + 1):
            ends = is_last and count == num
            reply.absorb(event(engine, prompt, count, {"type": "length"} if ends else None))
            so_far = len(prompt) + count - 1
            seen = expected + [engine] * (so_far - len(expected))
            assert rows_of(reply.payload()) == seen
        if num:
            expected += [engine] * (len(prompt) + num - 1 - len(expected))
        if not is_last:
            reply.lose_engine()
    payload = reply.payload()
    assert len(payload["output_ids"]) == budget
    assert rows_of(payload) == expected
    assert reply.num_recomputed == 0


def test_experts_that_do_not_fit_are_not_joined():
    reply = begin(9)
    reply.absorb(event(1, PROMPT, 2))
    reply.lose_engine()
    with pytest.raises(UnusableReply, match="do not fit 5 tokens"):
        reply.absorb(event(2, [*PROMPT, 9], 1, {"type": "stop"}))  # a row too few


@pytest.mark.parametrize("experts", ["AAA", 7, "AAAA" * 7])
def test_routed_experts_of_another_form_are_refused(experts):
    one = event(1, PROMPT, 2)
    one["meta_info"]["routed_experts"] = experts
    with pytest.raises(UnusableReply, match="routed experts"):
        begin(9).absorb(one)


def test_a_stream_whose_lost_engine_reported_no_experts_cannot_continue():
    reply = begin(9)
    one = event(1, PROMPT, 2)
    del one["meta_info"]["routed_experts"]
    reply.absorb(one)
    assert reply.lose_engine() == "experts_missing"
    assert json.loads(reply.body())["input_ids"] == PROMPT
    assert reply.num_recomputed == 2
