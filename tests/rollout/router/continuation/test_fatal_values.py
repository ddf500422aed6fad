"""Values that no engine may get, since one of its kind ends of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.router.continuation.fatal_values import why_fatal, why_fatal_prompt
from rollout.router.proxy.reader_choice import Wanted, read_body

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
VOCABULARY = 100
# Per name: refused values, and those that the engine decides about.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "stop_token_ids": (
        [[100], [-1], [3, 1 << 40, 99], [10**900]],
        [[], [0], [99, 0, 5], None, "100", [1.5], ["100"], [[100]]],
    ),
    "top_k": ([1 << 31, 1 << 62], [-1, 0, 1 << 30, (1 << 31) - 1, "a", None]),
    "top_logprobs_num": ([101, 1 << 20], [0, 5, 100, "a"]),
    "top_logprobs": ([101], [0, 100, None]),
    "logprobs": ([101], [0, 100, True, None]),
    "logprob_start_len": ([-2, -5], [-1, 0, 1 << 40]),
    "n": ([(1 << 14) + 1, 1 << 31], [1, 8, 1 << 14, -1]),
}
BAD = [(name, value) for name, (bad, _) in VALUES.items() for value in bad]
GOOD = [(name, value) for name, (_, good) in VALUES.items() for value in good]


def why_not(path: str, name: str, value: Any, indent: int | None = None) -> str:
    body = {"input_ids": [1] * 300, "sampling_params": {name: value}}
    wanted = Wanted(path, is_generating=True, vocabulary=VOCABULARY)
    content = json.dumps(body if path == "/generate" else {name: value}, indent=indent)
    return read_body(wanted, content.encode()).why_not


def in_short(value: Any) -> str:
    return str(value)[:24]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(("name", "value"), BAD, ids=in_short)
def test_what_ends_an_engine_is_refused_and_named(
    path: str, indent: int | None, name: str, value: Any
) -> None:
    why = why_not(path, name, value, indent)
    assert why.startswith(f"{name} has ")
    assert "; send at " in why
    assert len(why) < 120


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), GOOD, ids=in_short)
def test_other_values_are_left_to_the_engine(path: str, name: str, value: Any) -> None:
    assert why_not(path, name, value) == ""


def test_each_prompt_of_several_is_looked_at() -> None:
    several = [{"stop_token_ids": [5]}, {"stop_token_ids": [500]}]
    body = json.dumps({"input_ids": [[1], [2]], "sampling_params": several}).encode()
    assert why_fatal(body, VOCABULARY).startswith("stop_token_ids has 500; send at least 0 and")
    text = json.dumps({"text": 'the "stop_token_ids": [500] of it'}).encode()
    assert why_fatal(text, VOCABULARY) == ""


def test_many_stop_ids_before_the_prompt_are_looked_at() -> None:
    stops = [*[5] * 300, 500]
    body = json.dumps({"sampling_params": {"stop_token_ids": stops}, "input_ids": [1]}).encode()
    wanted = Wanted("/generate", is_generating=True, vocabulary=VOCABULARY)
    assert "stop_token_ids has 500" in read_body(wanted, body).why_not


@pytest.mark.parametrize("text", [b"[-]", b"[5, -, 7]", b"[,]", b"[5 6]", b"[--7]", b"-"])
def test_what_is_no_json_is_left_to_the_engine_or_refused(text: bytes) -> None:
    assert why_fatal(b'{"stop_token_ids": %s}' % text, VOCABULARY) in (
        "",
        "stop_token_ids has -7; send at least 0 and at most 99",
    )


def test_of_an_unknown_vocabulary_only_other_bounds_count() -> None:
    assert why_fatal(b'{"stop_token_ids": [500], "top_logprobs_num": 1000}', 0) == ""
    assert "top_k has" in why_fatal(b'{"top_k": 99999999999}', 0)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"input_ids": [5, 100]}, "input_ids has the id 100, and the model has 100 tokens"),
        ({"input_ids": [-1]}, "input_ids has the id -1"),
        ({"input_ids": [[5], [1 << 60]]}, "input_ids has the id 1152921504606846976"),
        ({"prompt": [[5], []]}, "prompt has an empty prompt"),
        ({"token_ids": [100]}, "token_ids has the id 100"),
        ({"text": ""}, "text has an empty prompt"),
        ({"text": ["a", ""]}, "text has an empty prompt"),
        ({"input_ids": [0, 99]}, ""),
        ({"input_ids": "a", "prompt": ["a", "b"], "token_ids": None}, ""),
        ({"input_ids": [1.5, "a", None, [["a"]]]}, ""),
        ({"input_ids": [[["a"], [[[500]]]]]}, ""),
        ([1], ""),
    ],
    ids=in_short,
)
def test_a_prompt_that_may_have_ended_an_engine_is_named(body: Any, why: str) -> None:
    found = why_fatal_prompt(json.dumps(body).encode(), VOCABULARY)
    assert why_fatal_prompt(b'{"input_ids": %s}' % (b"[" * 900 + b"]" * 900), VOCABULARY) == ""
    assert found.startswith(why)
    assert bool(found) == bool(why)
