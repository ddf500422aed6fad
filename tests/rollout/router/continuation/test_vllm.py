"""Exact accounting of requests on vLLM's own route, without sockets."""

import json
from typing import Any

import pytest

from rollout.router.continuation.reply import Reply
from tests.rollout.router.continuation.replies import (
    VLLM_GENERATE,
    chat,
    completion,
    generate,
    read,
)

PROMPT = [1, 2, 3]


def request(**more: Any) -> Reply:
    sampling = {"max_tokens": 8} | more.pop("sampling_params", {})
    raw = {"token_ids": PROMPT, "sampling_params": sampling, **more}
    reply = read(VLLM_GENERATE, json.dumps(raw).encode(), dialects="vllm")
    assert reply is not None
    return reply


def event(*ids: int, text: str = "", **choice: Any) -> dict[str, Any]:
    return {
        "request_id": "generate-tokens-r",
        "choices": [{"index": 0, "token_ids": list(ids), "text": text, **choice}],
    }


def sent(reply: Reply, version: int = 3) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(reply.body(version, "vllm"))
    return body


def test_the_next_engine_gets_prompt_and_tokens_and_the_rest_of_the_budget() -> None:
    reply = request(sampling_params={"min_tokens": 4}, cache_salt="mine")
    assert sent(reply)["token_ids"] == PROMPT
    reply.absorb(event(7, 8, 9))
    reply.lose_engine()
    body = sent(reply, 4)
    assert body["token_ids"] == [*PROMPT, 7, 8, 9]
    assert body["sampling_params"] == {"max_tokens": 5, "min_tokens": 1}
    assert body["cache_salt"] == "mine"
    reply.absorb(event(5, finish_reason="stop"))
    (choice,) = reply.payload()["choices"]
    assert choice["token_ids"] == [7, 8, 9, 5]
    assert choice["weight_versions"] == [
        {"version": "3", "start": 0, "end": 3},
        {"version": "4", "start": 3, "end": 4},
    ]


def test_the_spans_of_the_engine_itself_replace_ours() -> None:
    reply = request()
    sent(reply)
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
    reply.absorb(event(7))
    reply.absorb(event(8, finish_reason="length", weight_versions=spans))
    assert reply.payload()["choices"][0]["weight_versions"] == spans


def test_the_last_token_of_the_budget_comes_from_an_engine_that_finishes() -> None:
    reply = request(sampling_params={"max_tokens": 2})
    sent(reply)
    reply.absorb(event(7))
    reply.absorb(event(8))  # its finish reason was lost with the engine
    reply.lose_engine()
    assert sent(reply)["token_ids"] == [*PROMPT, 7]


def test_text_ends_before_its_stop_string_and_a_failover_never_cuts_one() -> None:
    reply = request(output_mode="text", sampling_params={"stop": ["END"]})
    assert sent(reply)["sampling_params"]["include_stop_str_in_output"] is True
    reply.absorb(event(7, text="a"))
    reply.absorb(event(8, text="E"))
    reply.lose_engine()
    assert sent(reply)["token_ids"] == [*PROMPT, 7]
    reply.absorb(event(8, text="E"))
    reply.absorb(event(9, text="ND", finish_reason="stop", stop_reason="END"))
    (choice,) = reply.payload()["choices"]
    assert choice["text"] == "a"
    assert choice["token_ids"] == [7, 8, 9]
    assert choice["stop_reason"] == "END"


def test_without_text_a_request_with_a_stop_string_starts_over() -> None:
    reply = request(sampling_params={"stop": "END"})
    sent(reply)
    reply.absorb(event(7))
    reply.lose_engine()
    assert sent(reply)["token_ids"] == PROMPT
    assert reply.num_recomputed == 1


def test_tokens_without_their_log_probs_are_unusable() -> None:
    reply = request(sampling_params={"logprobs": 0})
    sent(reply)
    entry = {"token_id": 7, "logprob": -1.0}
    with pytest.raises(ValueError, match="1 content for 2 tokens"):
        reply.absorb(event(7, 8, logprobs={"content": [entry]}))


def test_experts_of_two_engines_are_not_joined() -> None:
    reply = request()
    sent(reply)
    reply.absorb(event(7))
    reply.lose_engine()
    sent(reply)
    with pytest.raises(ValueError, match="routed experts"):
        reply.absorb(event(8, finish_reason="stop", routed_experts="AAAA"))


@pytest.mark.parametrize(
    "more",
    [
        {"features": {"mm_hashes": {}}},
        {"sampling_params": {"n": 2}},
        {"sampling_params": {"prompt_logprobs": 0}},
        {"sampling_params": {"structured_outputs": {"regex": "a+"}}},
        {"stream_options": {"continuous_usage_stats": True}},
        {"token_ids": []},
    ],
)
def test_what_no_engine_could_continue_is_forwarded_as_it_is(more: Any) -> None:
    raw = {"token_ids": PROMPT, "sampling_params": {}, **more}
    assert read(VLLM_GENERATE, json.dumps(raw).encode(), dialects="vllm") is None


def test_the_text_of_a_translated_request_ends_before_its_stop_string_too() -> None:
    """vLLM holds back text that may be a stop string, but not its tokens."""
    sampling = {"stop": ["END"], "max_new_tokens": 8}
    raw = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    reply = generate(json.dumps(raw).encode())
    assert reply is not None
    assert sent(reply)["sampling_params"]["include_stop_str_in_output"] is True

    def entries(*values: float) -> dict[str, Any]:
        return {"content": [{"logprob": value} for value in values]}

    reply.absorb(event(7, text="aE", logprobs=entries(-1.0)))
    end = event(8, text="ND", logprobs=entries(-2.0), finish_reason="stop", stop_reason="END")
    reply.absorb(end)
    last = reply.payload()
    assert (last["text"], last["output_ids"]) == ("a", [7, 8])
    assert last["meta_info"]["output_token_logprobs"] == [[-1.0, 7, None], [-2.0, 8, None]]


def test_a_completion_continues_on_vllm_in_its_own_words() -> None:
    raw = {"prompt": PROMPT, "max_tokens": 8, "stop": ["END"], "return_token_ids": True}
    reply = completion(json.dumps(raw).encode())
    assert reply is not None
    body = json.loads(reply.body(3, "vllm"))
    assert body["include_stop_str_in_output"] is True
    assert "no_stop_trim" not in body
    for text, token in (("a", 7), ("b", 8)):
        reply.absorb({"id": "c", "choices": [{"text": text, "token_ids": [token]}]})
    reply.lose_engine()
    assert json.loads(reply.body(4, "vllm"))["prompt"] == [*PROMPT, 7, 8]
    end = {"text": "END", "token_ids": [9], "finish_reason": "stop", "stop_reason": "END"}
    reply.absorb({"id": "c", "choices": [end]})
    (choice,) = reply.payload()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("ab", [7, 8, 9])
    assert choice["matched_stop"] == "END"


def test_a_chat_that_continues_its_last_message_has_no_second_beginning_on_vllm() -> None:
    raw = {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True}
    reply = chat(json.dumps(raw).encode(), "vllm")
    assert reply is not None
    assert json.loads(reply.body(3, "vllm"))["add_generation_prompt"] is False
    plain = chat(json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode(), "vllm")
    assert plain is not None
    assert "add_generation_prompt" not in json.loads(plain.body(3, "vllm"))


def test_reasoning_of_vllm_is_not_continued_as_text() -> None:
    raw = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
    reply = chat(json.dumps(raw).encode(), "vllm")
    assert reply is not None
    reply.body(3, "vllm")
    reply.absorb({"id": "c", "choices": [{"delta": {"reasoning": "hm"}}]})
    assert reply.lose_engine() == "reasoning"


def chat_with_ids() -> Reply:
    """A chat that has lost its engine after one token of eight."""
    raw = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    raw |= {"return_token_ids": True}
    reply = chat(json.dumps(raw).encode(), "vllm")
    assert reply is not None
    reply.body(3, "vllm")
    reply.absorb(chunk("", prompt_token_ids=PROMPT))
    reply.absorb(chunk("a", token_ids=[7], num=1))
    reply.lose_engine()
    reply.body(3, "vllm")
    return reply


def chunk(text: str, *, num: int = 0, prompt_token_ids: Any = None, **choice: Any) -> Any:
    whole = {"choices": [{"delta": {"content": text}, **choice}]}
    return whole | {"usage": {"completion_tokens": num}, "prompt_token_ids": prompt_token_ids}


def test_the_ids_of_a_chat_are_joined_only_behind_the_same_prompt() -> None:
    good = chat_with_ids()
    good.absorb(chunk("", prompt_token_ids=[*PROMPT, 7]))
    good.absorb(chunk("b", token_ids=[8], num=1, finish_reason="stop"))
    reply = good.payload()
    assert reply["choices"][0]["token_ids"] == [7, 8]
    assert reply["prompt_token_ids"] == PROMPT
    bad = chat_with_ids()
    with pytest.raises(ValueError, match="other token ids than prompt and answer so far"):
        bad.absorb(chunk("", prompt_token_ids=[*PROMPT, 5, 2]))
    hidden = chat_with_ids()
    hidden.absorb(chunk("", prompt_token_ids=[*PROMPT, 7]))
    with pytest.raises(ValueError, match="0 token ids for 1 tokens"):
        hidden.absorb(chunk("b", num=1, finish_reason="stop"))


def test_the_ids_of_a_chat_are_read_only_where_all_engines_are_vllms() -> None:
    raw = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
    assert chat(json.dumps(raw).encode()) is None
