"""What a reply has received so far, event by event: where it may go on, and what was shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.router.continuation.core import version_spans
from rollout.router.continuation.reply import Reply
from tests.rollout.router.continuation.replies import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    VLLM_GENERATE,
    read,
)

PROMPT = [1, 2, 3]
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"input_ids": PROMPT},
    COMPLETIONS: {"prompt": PROMPT},
    CHAT: {"messages": [{"role": "user", "content": "q"}]},
    VLLM_GENERATE: {"token_ids": PROMPT, "sampling_params": {}, "output_mode": "tokens"},
}


def reply_to(path: str, **more: Any) -> Reply:
    reply = read(path, json.dumps(BODIES[path] | more).encode())
    assert reply is not None
    reply.body(1, "vllm" if path == VLLM_GENERATE else "sglang")
    return reply


def completed(reply: Reply, text: str, token: int, **end: Any) -> None:
    reply.absorb({"choices": [{"text": text, "token_ids": [token], **end}]})


def said(reply: Reply, **delta: str) -> None:
    """An event of a chat without a count of tokens."""
    reply.absorb({"choices": [{"delta": delta}]})


def test_a_stop_string_before_the_least_number_of_tokens_ends_nothing() -> None:
    reply = reply_to(COMPLETIONS, stop=["X"], min_tokens=2, max_tokens=9)
    completed(reply, "aX", 5)
    completed(reply, "bX", 6, finish_reason="stop", matched_stop="X")
    assert reply.payload()["choices"][0]["text"] == "aXb"
    # Without one the first counts.
    reply = reply_to(COMPLETIONS, stop=["X"], max_tokens=9)
    completed(reply, "aXbX", 5, finish_reason="stop", matched_stop="X")
    assert reply.payload()["choices"][0]["text"] == "a"


def test_where_the_engine_trims_a_stop_string_in_the_text_is_continued_from() -> None:
    sampling = {"stop": ["X"], "min_new_tokens": 5, "max_new_tokens": 9}
    reply = reply_to(GENERATE, sampling_params=sampling)
    for text, ids in [("aX", [5]), ("aXb", [5, 6])]:
        meta = {"completion_tokens": len(ids), "finish_reason": None, "weight_version": "1"}
        reply.absorb({"text": text, "output_ids": ids, "meta_info": meta})
    assert reply.lose_engine() == ""
    assert (reply.num_kept, reply.base.text) == (2, "aXb")


@pytest.mark.parametrize("delta", [{"content": "a "}, {"reasoning_content": "hm"}])
def test_text_without_a_count_of_tokens_was_shown(delta: dict[str, str]) -> None:
    reply = reply_to(CHAT, stream=True)
    assert not reply.has_shown
    said(reply, **delta)
    assert not reply.has_shown
    reply.new_payloads()
    assert reply.has_shown


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_reply_has_the_head_and_the_ids_of_its_first_engine(path: str) -> None:
    reply = reply_to(path, stream=True, return_token_ids=path == COMPLETIONS)
    first = {"id": "a", "created": 1, "model": "m"}
    reply.absorb(first | {"choices": [{"text": "a", "delta": {"content": "a"}, "token_ids": [5]}]})
    chunk = reply.new_payloads()[-1]
    reply.absorb(first | {"id": "b", "choices": []})
    assert reply.new_payloads() == []
    for payload in (chunk, reply.payload()):
        assert {name: payload[name] for name in first} == first
        if path == COMPLETIONS:
            assert payload["choices"][0]["prompt_token_ids"] == PROMPT


def test_nothing_is_refused_where_nothing_came() -> None:
    reply = reply_to(CHAT)
    assert reply.why_not == "chat_without_ids"
    assert not reply.has_tokens_of_engine
    assert reply.lose_engine() == ""
    said(reply, content="a ")
    assert reply.has_tokens_of_engine
    assert reply.lose_engine() == "chat_without_ids"


def test_where_nothing_would_be_kept_it_matters_not_why_it_could_not() -> None:
    reply = reply_to(COMPLETIONS, prompt="its ids are not known")
    completed(reply, "", 5)  # a part of a character
    assert reply.has_tokens_of_engine
    assert reply.lose_engine() == ""
    completed(reply, "a", 5)
    assert reply.lose_engine() == "prompt_unknown"


def test_tokens_without_text_were_shown() -> None:
    reply = reply_to(VLLM_GENERATE, stream=True)
    reply.absorb({"choices": [{"token_ids": [5]}]})
    assert [one["choices"][0]["token_ids"] for one in reply.new_payloads()] == [[5]]
    assert reply.has_shown
    assert reply.new_payloads() == []


def test_text_without_ids_is_sent() -> None:
    reply = reply_to(COMPLETIONS, stream=True)
    reply.absorb({"choices": [{"text": "a"}]})
    assert [one["choices"][0]["text"] for one in reply.new_payloads()] == ["a"]


def test_without_any_log_prob_that_is_wanted_nothing_is_kept() -> None:
    reply = reply_to(COMPLETIONS, logprobs=1)
    completed(reply, "a", 5)
    assert reply.lose_engine() == "logprobs_missing"
    assert (reply.num_kept, reply.num_recomputed) == (0, 1)


@pytest.mark.parametrize(("text", "num_kept"), [("a", 1), ("a\ufffd", 0), ("", 0)])
def test_what_the_tokenizer_says_is_whole_is_kept(text: str, num_kept: int) -> None:
    reply = reply_to(COMPLETIONS)
    reply.decode = lambda ids: text
    completed(reply, "a ", 5)  # which alone could end within a character
    assert reply.lose_engine() == ""
    assert reply.num_kept == num_kept


def test_tokens_behind_the_reported_spans_are_of_their_version() -> None:
    reported = [{"version": "3", "end": 2}]
    assert [(one.version, one.end) for one in version_spans(reported, None, 4)] == [
        ("3", 2),
        ("3", 4),
    ]
    assert [(one.version, one.end) for one in version_spans(reported, "4", 4)] == [
        ("3", 2),
        ("4", 4),
    ]
    assert [one.version for one in version_spans([], None, 1)] == [None]
