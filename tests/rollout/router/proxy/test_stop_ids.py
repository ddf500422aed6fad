"""Ids of tokens to stop at that no engine may get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.router.proxy.reader_choice import Wanted, read_body

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


def why_not(stop_ids: Any, path: str = "/generate", *, indent: int | None = None) -> str:
    sampling = {"stop_token_ids": stop_ids}
    body = {"input_ids": [1] * 300, "sampling_params": sampling} if "v1" not in path else sampling
    wanted = Wanted(path, is_generating=True, vocabulary=100)
    return read_body(wanted, json.dumps(body, indent=indent).encode()).why_not


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("bad", [100, -1, 1 << 40, 10**900])
def test_an_id_outside_the_vocabulary_is_refused_and_named(
    path: str, indent: int | None, bad: int
) -> None:
    why = why_not([3, bad, 99], path, indent=indent)
    assert f"stop_token_ids has {bad}"[:36] in why
    assert "send ids from 0 to 99" in why


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("good", [[], [0], [99, 0, 5], None, "100", [1.5], ["100"], [[100]]])
def test_other_values_are_left_to_the_engine(path: str, good: Any) -> None:
    assert why_not(good, path) == ""


def test_each_prompt_of_several_is_looked_at() -> None:
    several = [{"stop_token_ids": [5]}, {"stop_token_ids": [500]}]
    body = json.dumps({"input_ids": [[1], [2]], "sampling_params": several}).encode()
    wanted = Wanted("/generate", is_generating=True, vocabulary=100)
    assert "stop_token_ids has 500" in read_body(wanted, body).why_not
    unknown = Wanted("/generate", is_generating=True)
    assert read_body(unknown, body).why_not == ""
    text = json.dumps({"text": 'the "stop_token_ids": [500] of it'}).encode()
    assert read_body(wanted, text).why_not == ""
