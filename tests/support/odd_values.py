"""Odd values of ``/generate``: those that end SGLang's scheduler, and those that none ends of."""

from __future__ import annotations

import math
from typing import Any

_BIG = 1 << 20


def _sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling_params": fields}


FATAL: list[dict[str, Any]] = [
    *(_sampling(stop_token_ids=ids, min_new_tokens=2) for ids in ([_BIG], [5, -1])),
    *(_sampling(top_k=value) for value in (1 << 31, 1 << 62)),
    *({"top_logprobs_num": value, "return_logprob": True} for value in (_BIG, 500)),
    {"logprob_start_len": -5, "return_logprob": True},
    _sampling(n=1 << 31),  # it does not end, and answers nothing for minutes
]
FATAL_PROMPTS: list[dict[str, Any]] = [
    {"input_ids": [60, _BIG]},
    {"input_ids": [-1]},
]
"""A request loses an engine to one before it is looked at; so does ``[[1], []]`` or an empty text,
which vLLM takes."""
_NUMBERS = (-1, 0, 1e-30, 1e38, math.nan, math.inf, 1 << 31, 1 << 70, "a", [1], True, {"a": 1})
_OF_NUMBERS = (
    *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "min_new_tokens", "stream_interval", "sampling_seed"),
)
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_k": (0, 1e38, "a", [1], True),
    "n": (-1, 0, 1e38, "a", [1]),
    "max_new_tokens": (0, -1, 1 << 40, "a", 1.5, [1], None),
    "stop": ("", [""], [5], {"a": 1}, "x" * 100_000, ["a"] * 5000),
    "stop_regex": ("(", "", ["("], [5], "(a+)+$", "\\", "["),
    "stop_token_ids": ([], "a", ["a"], [1.5], {"a": 1}, 5, [None], [True], [5] * 100_000),
    "logit_bias": ({"999999": 1}, {"-1": 1}, {"x": 1}, {"5": 1e39}, {"5": "a"}, {"5": None}, [1]),
    "regex": ("(", "[", 5, "a{100000}", "(?=a)b", "\\p{L}+", ""),
    "json_schema": ("{", 5, "null", '{"type":"nope"}', '{"$ref":"#/x"}', '{"allOf":[]}'),
    "ebnf": ("root ::=", "x", 5, "root ::= root", ""),
    "structural_tag": ("{", 5, '{"type":"x"}'),
    "custom_params": ("a", 5, [1], {"a": {"b": 1}}),
    "ignore_eos": ("x",),
    "skip_special_tokens": (3,),
    "thinking_token_budget": (-1, 5),
    "unknown": (1,),
}
_FIELDS: dict[str, tuple[Any, ...]] = {
    "top_logprobs_num": (-1, "a", 1.5),
    "token_ids_logprob": ([_BIG], [-1], ["a"], 5, [[1], [2]], [1.5], []),
    "logprob_start_len": (3, _BIG, "a", 1.5),
    "input_ids": ([], ["a"], [1.5], [None], [[1], [2]], "a", 5),
    "rid": (5, [1], ["a", "b"], {}, "", "a" * 5000, None),
    "priority": ("x", 1 << 70, -1, 1.5),
    "lora_path": ("x", 5, ["x"]),
    "session_params": ("x", {"id": "a"}, {"id": 5, "rid": "x", "offset": -1}, [1]),
    "image_data": ("x", ["x"], 5),
    "custom_logit_processor": ("garbage", 5),
    "data_parallel_rank": (99, -1, "a"),
    "bootstrap_room": (-1, 1 << 70),
    "return_hidden_states": (True, "x"),
    "input_embeds": ([[1.0]], "x"),
    "text": (5, "\ud800"),
    "sampling_params": ([{}], 5, "a"),
    "stream": ("x",),
    "extra_key": (5, [1]),
    "token_type_ids": ([_BIG],),
}
ODD: list[dict[str, Any]] = [
    *(_sampling(**{name: value}) for name in _OF_NUMBERS for value in _NUMBERS),
    *(_sampling(**{name: value}) for name, values in _SAMPLING.items() for value in values),
    *({name: value} for name, values in _FIELDS.items() for value in values),
]
