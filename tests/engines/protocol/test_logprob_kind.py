"""Of which distribution the log-probs of each kind of engine are, by sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engines.kinds import kind_of
from engines.protocol.logprob_kind import LogprobKind, LogprobRule, joined, read_kind

FULL, RAW, CUT, PENALISED = LogprobKind
OF_VLLM = {
    "logprobs_mode": "processed_logprobs",
    "generation_config": "auto",
    "override_generation_config": {},
    "model_path": "/models/m",
}


def rule_of(kind: str, raw: Mapping[str, Any], **env: str) -> LogprobRule:
    return kind_of(kind).logprob_rule(raw, env, lambda folder: {})


SGLANG = rule_of("sglang", {})
EMBEDDED = rule_of("embedded", {})
PROCESSED = rule_of("vllm", OF_VLLM)
AS_THEY_ARE = rule_of("vllm", {**OF_VLLM, "logprobs_mode": "raw_logprobs"})
ORIGINAL = rule_of("sglang", {}, SGLANG_RETURN_ORIGINAL_LOGPROB="1")

# Parameters, then the kind of SGLang, of vLLM's processed and of its raw log-probs.
TABLE: list[tuple[dict[str, Any], tuple[LogprobKind, LogprobKind, LogprobKind]]] = [
    ({}, (FULL, FULL, FULL)),
    ({"temperature": 0.3}, (FULL, FULL, RAW)),
    ({"temperature": 1.7}, (FULL, FULL, RAW)),
    ({"temperature": 0}, (FULL, FULL, FULL)),
    ({"top_p": 1, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}, (FULL, FULL, FULL)),
    ({"top_p": None, "top_k": None, "logit_bias": None}, (FULL, FULL, FULL)),
    ({"top_k": 0}, (FULL, FULL, FULL)),
    ({"top_p": 0.5}, (FULL, CUT, FULL)),
    ({"top_k": 5}, (FULL, CUT, FULL)),
    ({"top_k": 1}, (FULL, CUT, FULL)),
    ({"top_k": 1, "temperature": 0.3}, (RAW, CUT, RAW)),
    ({"min_p": 0.2}, (FULL, CUT, FULL)),
    ({"temperature": 0.3, "top_p": 0.5}, (FULL, CUT, RAW)),
    ({"temperature": 0, "top_p": 0.5, "top_k": 5, "min_p": 0.2}, (FULL, FULL, FULL)),
    ({"repetition_penalty": 1.2}, (PENALISED, PENALISED, FULL)),
    ({"presence_penalty": 1.5}, (PENALISED, PENALISED, FULL)),
    ({"frequency_penalty": -1.0}, (PENALISED, PENALISED, FULL)),
    ({"logit_bias": {"5": 2.0}}, (PENALISED, PENALISED, FULL)),
    ({"temperature": 0, "presence_penalty": 1.5}, (PENALISED, PENALISED, FULL)),
    ({"temperature": 0.3, "presence_penalty": 1.5}, (PENALISED, PENALISED, RAW)),
    ({"top_p": 0.5, "presence_penalty": 1.5}, (PENALISED, PENALISED, FULL)),
    ({"min_new_tokens": 2}, (PENALISED, PENALISED, FULL)),
    ({"min_tokens": 2}, (PENALISED, PENALISED, FULL)),
    ({"min_new_tokens": 0, "min_tokens": None}, (FULL, FULL, FULL)),
    ({"allowed_token_ids": [5]}, (PENALISED, PENALISED, FULL)),
    # A grammar forbids tokens before anything else is done with the logits.
    ({"regex": "a+"}, (PENALISED, PENALISED, PENALISED)),
    ({"structured_outputs": {"regex": "a+"}}, (PENALISED, PENALISED, PENALISED)),
    ({"response_format": {"type": "json_object"}}, (PENALISED, PENALISED, PENALISED)),
    ({"response_format": {"type": "text"}}, (FULL, FULL, FULL)),
    ({"tool_choice": "required"}, (PENALISED, PENALISED, PENALISED)),
    ({"tool_choice": {"type": "function"}}, (PENALISED, PENALISED, PENALISED)),
    ({"tool_choice": "auto"}, (FULL, FULL, FULL)),
    ({"tools": [{"function": {"strict": True}}]}, (PENALISED, PENALISED, PENALISED)),
    ({"tools": [{"function": {"name": "add"}}, None]}, (FULL, FULL, FULL)),
]


@pytest.mark.parametrize(("sampling", "kinds"), TABLE, ids=repr)
def test_a_kind_follows_from_engine_and_parameters(
    sampling: dict[str, Any], kinds: tuple[LogprobKind, LogprobKind, LogprobKind]
) -> None:
    assert tuple(rule.kind_of(sampling) for rule in (SGLANG, PROCESSED, AS_THEY_ARE)) == kinds
    assert EMBEDDED == SGLANG


def test_sglang_that_returns_original_log_probs_is_at_temperature_1() -> None:
    assert ORIGINAL.kind_of({}) is FULL
    assert ORIGINAL.kind_of({"temperature": 0.3, "top_p": 0.5}) is RAW
    assert ORIGINAL.kind_of({"presence_penalty": 1.5}) is PENALISED
    own = rule_of("embedded", {"returns_original_logprob": True})
    assert own.kind_of({"temperature": 0.3}) is RAW


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_openai_routes_have_the_sampling_of_the_checkpoint(kind: str) -> None:
    config = {"top_p": 0.8, "repetition_penalty": 1.05, "do_sample": True}
    raw = {**OF_VLLM, "sampling_defaults": "model"}
    rule = kind_of(kind).logprob_rule(raw, {}, {"/models/m": config}.__getitem__)
    assert rule.kind_of({}) is FULL  # /generate takes none of it
    assert rule.kind_of({}, has_defaults=True) is PENALISED
    assert rule.kind_of({"repetition_penalty": None}, has_defaults=True) is PENALISED
    neutral = {"top_p": 1.0, "repetition_penalty": 1.0}
    assert rule.kind_of(neutral, has_defaults=True) is FULL


def test_vllm_that_leaves_the_checkpoints_sampling_out_has_what_overrides_it() -> None:
    def read(folder: str) -> Mapping[str, Any]:
        raise AssertionError(folder)

    raw = {**OF_VLLM, "generation_config": "vllm"}
    assert not kind_of("vllm").logprob_rule(raw, {}, read).defaults
    overridden = {**raw, "override_generation_config": {"top_k": 20}}
    assert kind_of("vllm").logprob_rule(overridden, {}, read).defaults == (("top_k", 20),)


def test_a_mode_without_log_probs_is_refused() -> None:
    with pytest.raises(ValueError, match="raw_logits, which gives no log-probs; use processed"):
        rule_of("vllm", {**OF_VLLM, "logprobs_mode": "raw_logits"})


def test_a_sample_of_several_kinds_has_the_one_that_is_furthest_from_full() -> None:
    assert joined(None, None) is None
    assert joined(FULL, None) is FULL
    assert joined(FULL, RAW) is RAW
    assert joined(CUT, FULL) is CUT
    assert joined(CUT, PENALISED) is PENALISED
    assert (read_kind("cut"), read_kind("?"), read_kind(None)) == (CUT, None, None)


@pytest.mark.parametrize("rule", [SGLANG, PROCESSED, AS_THEY_ARE, ORIGINAL])
def test_a_parameter_that_decides_is_one_that_is_looked_for(rule: LogprobRule) -> None:
    for sampling, _ in TABLE:
        if rule.kind_of(sampling) is not FULL:
            assert set(rule.names) & keys_of(sampling)


def keys_of(value: Any) -> set[str]:
    """Of an object of JSON, and of all in it."""
    if isinstance(value, Mapping):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize(
    ("kind", "raw", "has_masks"),
    [
        ("vllm", {}, False),
        ("vllm", {"return_sampling_mask": True}, True),
        ("sglang", {"version": "0.5.22"}, False),
        ("sglang", {"version": "0.5.23"}, True),
        ("sglang", {"version": "0.0.0.dev1+main"}, True),  # unknown: a new one
        ("attached", {"version": "0.5.21.post1"}, False),
        ("embedded", {}, True),
    ],
)
def test_which_engines_return_sampling_masks(
    kind: str, raw: Mapping[str, Any], has_masks: bool
) -> None:
    of_kind = {**OF_VLLM, **raw} if kind == "vllm" else raw
    assert rule_of(kind, of_kind).has_masks is has_masks
