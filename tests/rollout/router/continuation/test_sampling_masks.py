"""What tokens were drawn from, over several engines: one entry for each token, or no reply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.http.reply_check import SAMPLING_MASK, UnusableReply
from engines.http.sglang_json import read_checked
from rollout.router.continuation.fast_path import FastReply
from rollout.router.continuation.reply import Reply
from tests.rollout.router.continuation.replies import GENERATE, generate, read

PROMPT = [5, 6, 7]
LENGTH = "output_token_sampling_mask_length"
LOGPROBS = "output_token_sampling_logprobs"


def begin(budget: int, *, is_streamed: bool = True, **more: Any) -> FastReply:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": budget, "ignore_eos": True, "top_k": 4},
        "return_sampling_mask": True,
        "stream": is_streamed,
        **more,
    }
    reply = generate(json.dumps(body).encode(), 2)
    assert reply is not None
    assert json.loads(reply.body())["return_sampling_mask"] is True
    return reply


def mask_of(engine: int) -> list[int]:
    return [9, 100 + engine]


def event(engine: int, num: int, finish: Any = None, **meta: Any) -> dict[str, Any]:
    """As SGLang 0.5.23 writes it: with all tokens so far."""
    of_masks = {SAMPLING_MASK: [mask_of(engine)] * num, LOGPROBS: [-0.5] * num, LENGTH: num}
    found = {"id": "r", "finish_reason": finish, "weight_version": "1", **of_masks, **meta}
    found = {name: value for name, value in found.items() if value is not ...}
    return {"output_ids": [9] * num, "text": "x" * num, "meta_info": found}


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 6), st.booleans())
def test_each_mask_is_from_the_engine_that_drew_its_token(
    runs: list[int], last: int, is_streamed: bool
) -> None:
    budget = sum(runs) + last
    reply, expected = begin(budget, is_streamed=is_streamed), list[list[int]]()
    for engine, num in enumerate([*runs, last]):
        for count in range(1, num + 1):
            ends = engine == len(runs) and count == num
            data = json.dumps(event(engine, count, {"type": "length"} if ends else None))
            assert reply.take(data.encode()) is None
        expected += [mask_of(engine)] * num
        if engine < len(runs):
            assert reply.lose_engine() == ""
            reply.body()
    payload = json.loads(b"".join(map(bytes, reply.written())))
    meta = payload["meta_info"]
    assert meta[SAMPLING_MASK] == expected
    assert meta[LENGTH] == len(meta[LOGPROBS]) == len(payload["output_ids"]) == budget
    assert reply.num_recomputed == 0
    assert read_checked(payload).sampling_mask == tuple(map(tuple, expected))


def test_an_abort_without_masks_keeps_those_of_its_tokens() -> None:
    """SGLang 0.5.23 aborts a request in its queue with its tokens, and without their masks."""
    reply, without = begin(9), {SAMPLING_MASK: ..., LOGPROBS: ..., LENGTH: ...}
    reply.absorb(event(1, 2))
    reply.absorb(event(1, 2, {"type": "abort", "message": ""}, **without))
    assert reply.payload()["meta_info"][SAMPLING_MASK] == [mask_of(1)] * 2
    assert reply.lose_engine() == ""
    reply.body()
    reply.absorb(event(2, 1, {"type": "stop"}))
    assert reply.payload()["meta_info"][SAMPLING_MASK] == [mask_of(1)] * 2 + [mask_of(2)]


def test_tokens_without_masks_are_not_continued() -> None:
    reply = begin(9)
    reply.absorb(event(1, 2, **{SAMPLING_MASK: ..., LOGPROBS: ...}))
    assert reply.lose_engine() == "mask_missing"
    assert json.loads(reply.body())["input_ids"] == PROMPT
    assert reply.num_recomputed == 2


@pytest.mark.parametrize("masks", [..., None, [[9]], [[9], [8]], [[9], [9, "x"]], [[9], 9], "ab"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_reply_with_other_masks_is_refused(masks: Any, is_streamed: bool) -> None:
    data = json.dumps(event(1, 2, {"type": "stop"}, **{SAMPLING_MASK: masks, LOGPROBS: ...}))
    with pytest.raises(UnusableReply):
        begin(9, is_streamed=is_streamed).take(data.encode())


def test_a_token_may_be_drawn_from_all() -> None:
    reply = begin(9)
    reply.absorb(event(1, 2, {"type": "stop"}, **{SAMPLING_MASK: [None, [9]]}))
    assert read_checked(reply.payload()).sampling_mask == (None, (9,))


# -- vLLM -------------------------------------------------------------------------------------


def on_vllm(**more: Any) -> Reply:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 8, "top_k": 4},
        "return_sampling_mask": True,
        **more,
    }
    reply = read(GENERATE, json.dumps(body).encode(), dialects="vllm")
    assert reply is not None
    assert not reply.why_not_taken(["vllm"])
    sent = json.loads(reply.body(3, "vllm"))
    assert "return_sampling_mask" not in sent  # vLLM's server has them for all or for none
    return reply


def of_vllm(*ids: int, **choice: Any) -> dict[str, Any]:
    """As vLLM 0.32 writes it: with what is new."""
    masks = {"sampling_mask": [[token, 50] for token in ids]}
    choices = [{"index": 0, "token_ids": [*ids], "text": "x" * len(ids), **masks, **choice}]
    return {"request_id": "generate-tokens-r", "choices": choices}


def test_vllms_masks_get_sglangs_name() -> None:
    reply = on_vllm()
    reply.absorb(of_vllm(7))
    reply.absorb(of_vllm(8))
    reply.lose_engine()
    reply.body(4, "vllm")
    reply.absorb(of_vllm(9, finish_reason="stop"))
    assert reply.payload()["meta_info"][SAMPLING_MASK] == [[7, 50], [8, 50], [9, 50]]


def test_vllms_tokens_without_masks_are_refused() -> None:
    with pytest.raises(UnusableReply, match="not those of 1 tokens"):
        on_vllm().absorb(of_vllm(7, sampling_mask=None))
