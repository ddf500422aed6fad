"""The table of parameters at a seam: a request with each of them is read as its cell says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.embedded.core.errors import Invalid
from engines.embedded.generation import sampling_params as embedded
from engines.protocol.sampling_params import SamplingParams
from rollout.router.continuation.parameters import BY_NAME, AtSeam, not_carried
from rollout.router.continuation.reply import Reply
from tests.rollout.router.continuation.replies import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    VLLM_GENERATE,
    read,
)

VALUES: dict[str, Any] = {
    "max_new_tokens": 9,
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "min_new_tokens": 3,
    "min_tokens": 3,
    "stop": ["X"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.2,
    "sampling_seed": 3,
    "seed": 3,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": 1.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["a b"],
    "json_schema": "{}",
    "regex": "a*",
    "ebnf": 'root ::= "a"',
    "structural_tag": "{}",
    "structured_outputs": {"regex": "a*"},
    "response_format": {"type": "json_object"},
    "stop_regex": ["a+"],
    "custom_params": {"a": 1},
    "watermark": {"key": 1},
    "n": 2,
    "best_of": 2,
    "beam_width": 2,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stream_interval": 2,
    "logprobs": 1,
    "prompt_logprobs": 0,
    "top_logprobs_num": 2,
    "top_logprobs": 2,
    "token_ids_logprob": [5],
    "logprob_start_len": 0,
    "thinking_token_budget": 0,
}
OF_SAMPLING = {*SamplingParams.__slots__, "stream_interval", "watermark", "beam_width"}
OF_BODY = {
    *("return_logprob", "top_logprobs_num", "token_ids_logprob", "logprob_start_len"),
    *("max_thinking_tokens", "return_prompt_token_ids", "return_flat_raw_output_top_logprobs"),
    *BY_NAME["session_params"].names,
}
PLAIN: dict[str, dict[str, Any]] = {
    GENERATE: {"input_ids": [1, 2], "return_logprob": True},
    VLLM_GENERATE: {"token_ids": [1, 2], "sampling_params": {}, "output_mode": "text"},
    COMPLETIONS: {"prompt": [1, 2]},
    CHAT: {"messages": [{"role": "user", "content": "q"}]},
}
KIND = {GENERATE: "sglang vllm", VLLM_GENERATE: "vllm", COMPLETIONS: "sglang vllm", CHAT: "vllm"}


def value_of(name: str) -> Any:
    return VALUES.get(name, True)


def reply_to(path: str, name: str, dialects: str) -> Reply | None:
    body, in_sampling = PLAIN[path], path == VLLM_GENERATE or name in OF_SAMPLING
    more = {name: value_of(name)}
    if path in (GENERATE, VLLM_GENERATE) and in_sampling:
        more = {"sampling_params": more}
    return read(path, json.dumps({**body, **more}).encode(), dialects=dialects)


def found_at(path: str, name: str, dialect: str) -> AtSeam:
    """What the code does there."""
    reply = reply_to(path, name, dialect)
    is_translated = (path, dialect) == (GENERATE, "vllm")
    if reply is None:
        return AtSeam.REFUSED if is_translated else AtSeam.FORWARDED
    if is_translated and reply.why_not_taken([dialect]):
        return AtSeam.REFUSED
    if reply.why_not:
        assert reply.why_not == BY_NAME[name].why
        assert reply.in_words(reply.why_not).startswith(f"{name} ")
        return AtSeam.STARTS_OVER
    first = json.loads(reply.body(1, dialect))
    reply.prompt = reply.prompt or [1, 2]  # of a chat
    reply.base.ids, reply.base.num = [5], 1
    again = json.loads(reply.body(1, dialect))
    seeds = [seed_in(body) for body in (first, again)]
    return AtSeam.CARRIED if seeds[0] == seeds[1] else AtSeam.OTHER_DRAWS


def seed_in(body: dict[str, Any]) -> int | None:
    sampling = body.get("sampling_params") or body
    seeds: list[int] = [sampling[name] for name in ("seed", "sampling_seed") if name in sampling]
    return seeds[0] if seeds else None


@pytest.mark.parametrize("name", sorted(OF_SAMPLING | OF_BODY))
@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_parameter_of_generate_fares_as_its_cell_says(name: str, dialect: str) -> None:
    assert found_at(GENERATE, name, dialect) is BY_NAME[name].at(dialect)


@pytest.mark.parametrize("name", sorted(OF_SAMPLING))
def test_the_embedded_engine_takes_what_its_column_says(name: str) -> None:
    cell = BY_NAME[name].embedded
    try:
        embedded.parse({"max_new_tokens": 9, name: value_of(name)})
    except Invalid:
        assert cell is AtSeam.REFUSED
    else:
        assert cell in (AtSeam.CARRIED, AtSeam.FORWARDED)
        assert cell is BY_NAME[name].sglang  # it has SGLang's dialect


OTHERS = sorted(set(BY_NAME) - (OF_BODY | OF_SAMPLING) | set(VALUES))
_ONLY_GENERATE = {
    *("max_new_tokens", "min_new_tokens", "sampling_seed", "top_logprobs_num"),
    *("token_ids_logprob", "logprob_start_len", "beam_width"),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, VLLM_GENERATE])
@pytest.mark.parametrize("name", [name for name in OTHERS if name not in _ONLY_GENERATE])
def test_a_parameter_of_the_other_routes_fares_as_its_cells_say(path: str, name: str) -> None:
    if (path, name) == (COMPLETIONS, "max_completion_tokens"):
        return  # engines read it differently there: test_forms
    for dialect in KIND[path].split():
        row = BY_NAME[name]
        assert found_at(path, name, dialect) is (row.others or row.at(dialect))


@pytest.mark.parametrize("name", sorted(SamplingParams.__slots__))
def test_the_driver_goes_on_where_every_kind_of_engine_does(name: str) -> None:
    starts_over = AtSeam.STARTS_OVER in (BY_NAME[name].sglang, BY_NAME[name].vllm)
    assert SamplingParams(**{name: value_of(name)}).can_continue is not starts_over


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1},
        {"presence_penalty": None, "regex": None, "stop_regex": [], "custom_params": {}, "n": 1},
    ],
)
def test_a_parameter_at_its_default_has_no_effect(sampling: dict[str, Any]) -> None:
    assert not not_carried(sampling, ["sglang", "vllm"], is_sampling=True).why


def test_where_engines_differ_the_one_that_does_not_carry_it_decides() -> None:
    given = {"repetition_penalty": 1.2}
    assert not not_carried(given, ["vllm"]).why
    for dialects in (["sglang"], ["sglang", "vllm"], ["vllm", "sglang"]):
        assert not_carried(given, dialects).why == "penalty"


def test_a_sampling_parameter_that_is_not_in_the_table_is_not_carried() -> None:
    reply = reply_to(GENERATE, "a_new_one", "sglang")
    assert reply is not None
    assert reply.why_not == ""  # it is a field of the body, which engines ignore
    body = json.dumps({**PLAIN[GENERATE], "sampling_params": {"a_new_one": 0}}).encode()
    reply = read(GENERATE, body)
    assert reply is not None
    assert reply.why_not == "unknown_parameter"
    body = json.dumps({**PLAIN[VLLM_GENERATE], "sampling_params": {"a_new_one": 0}}).encode()
    assert read(VLLM_GENERATE, body, dialects="vllm") is None


def test_a_seed_behind_each_seam_is_another_one() -> None:
    reply = reply_to(VLLM_GENERATE, "seed", "vllm")
    assert reply is not None
    seeds = []
    for num in range(50):
        reply.base.ids, reply.base.num = [5] * num, num
        seeds.append(seed_in(json.loads(reply.body(1, "vllm"))))
    assert seeds[0] == 3
    assert len(set(seeds)) == 50
