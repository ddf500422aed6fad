"""Sampling parameters: defaults, neutral values, and refusals that name the culprit."""

from __future__ import annotations

from typing import Any

import pytest
from engines.embedded.core.errors import Invalid
from engines.embedded.generation.sampling_params import Params, parse
from engines.protocol import SamplingParams


def test_nothing_given_is_sglangs_default() -> None:
    assert parse(None) == parse({}) == Params()


def test_what_the_client_sends_is_read_back() -> None:
    sent = SamplingParams(
        max_new_tokens=5, temperature=0.5, stop=("a", "b"), stop_token_ids=(1, 2), sampling_seed=3
    )
    read = parse(sent.to_wire())
    assert (read.max_new_tokens, read.temperature, read.sampling_seed) == (5, 0.5, 3)
    assert (read.stop, read.stop_token_ids) == (("a", "b"), {1, 2})


def test_none_is_as_if_not_given_and_one_stop_string_is_a_list_of_one() -> None:
    assert parse({"stop": "x", "top_p": None}) == Params(stop=("x",))


def test_a_neutral_value_of_what_is_not_supported_is_accepted() -> None:
    assert parse({"min_p": 0.0, "repetition_penalty": 1.0, "regex": None}) == Params()


@pytest.mark.parametrize(
    "raw",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 1.5},
        {"stop": [1]},
        {"stop_token_ids": ["a"]},
        {"ignore_eos": 1},
        {"n": 0},
        {"min_p": 0.1},
        {"json_schema": "{}"},
        {"min_new_tokens": 200},
        {"surprise": 1},
    ],
)
def test_a_wrong_value_is_refused_by_name(raw: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match=next(iter(raw))):
        parse(raw)
