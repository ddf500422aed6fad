"""What TRL asks for becomes a request; a reply that it must not train on is an error."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engines.protocol import FinishReason, GenerateReply, SamplingParams
from engines.protocol.types import VersionSpan
from rollout.adapters.trl.requests import check_complete, check_versions, sampling_of
from rollout.core.errors import GenerationFailed, WeightMismatch

REPLY = GenerateReply(
    "1", "", (5, 6), (-0.5, -0.25), FinishReason("stop"), weight_versions=(VersionSpan("3", 0, 2),)
)


def settings(**changed: Any) -> SimpleNamespace:
    """With TRL's defaults."""
    default = {
        "max_completion_length": 512,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "generation_kwargs": None,
    }
    return SimpleNamespace(**default | changed)


def test_trls_defaults_are_ours_but_for_the_length() -> None:
    assert sampling_of(settings(), []) == SamplingParams(max_new_tokens=512)


def test_every_setting_of_sampling_arrives() -> None:
    asked = settings(
        max_completion_length=7,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.2,
        vllm_structured_outputs_regex="[0-9]+",
        generation_kwargs={"frequency_penalty": 0.5, "top_k": 30},
    )
    assert sampling_of(asked, [1, 2]) == SamplingParams(
        max_new_tokens=7,
        temperature=0.7,
        top_p=0.9,
        top_k=30,
        min_p=0.1,
        repetition_penalty=1.2,
        regex="[0-9]+",
        stop_token_ids=(1, 2),
        frequency_penalty=0.5,
    )


def test_a_setting_that_engines_do_not_know_is_named() -> None:
    with pytest.raises(ValueError, match="generation_kwargs has 'best_of'"):
        sampling_of(settings(generation_kwargs={"best_of": 2}), [])


def test_replies_of_the_pushed_version_pass() -> None:
    check_versions([REPLY, replace(REPLY, weight_versions=(), weight_version="3")], 3)


@pytest.mark.parametrize(
    ("old", "sampled_with"),
    [
        ({"weight_versions": (VersionSpan("2", 0, 1), VersionSpan("3", 1, 2))}, "0 to 1 .* 2"),
        ({"weight_versions": (), "weight_version": "2"}, "0 to 2 .* 2"),
        ({"weight_versions": ()}, "0 to 2 .* unknown"),
    ],
)
def test_a_token_of_other_weights_is_named(old: dict[str, Any], sampled_with: str) -> None:
    words = f"reply 1 of 2: tokens {sampled_with}, but the trainer pushed version 3"
    with pytest.raises(WeightMismatch, match=words):
        check_versions([REPLY, replace(REPLY, **old)], 3)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"finish_reason": FinishReason("abort", message="offload")}, "was aborted: offload"),
        ({"output_ids": (), "output_logprobs": ()}, "has no tokens"),
        ({"output_logprobs": None}, "does not have a log-prob for each token"),
    ],
)
def test_a_reply_that_cannot_be_trained_on_is_named(broken: dict[str, Any], why: str) -> None:
    check_complete([REPLY])
    with pytest.raises(GenerationFailed, match=f"1 of 2 .*; reply 1 {why}") as raised:
        check_complete([REPLY, replace(REPLY, **broken)])
    assert list(raised.value.failures) == [1]
