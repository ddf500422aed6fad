"""Sampling parameters: every one that SGLang has is sent, and a wrong one is named."""

from __future__ import annotations

import ast
import pickle
from dataclasses import fields
from typing import Any

import pytest

import rollout
from engines.embedded.core.errors import Invalid
from engines.embedded.generation.sampling_params import parse
from engines.protocol import SamplingParams
from rollout.driver.client.sampling_check import check_sampling
from rollout.driver.stream.options import BatchPlan
from tests.support.cpu_engines import installed

# ``sglang/srt/sampling/sampling_params.py`` of SGLang 0.5.23, without what is set inside of it.
OF_SGLANG = {
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "logit_bias",
    "sampling_seed",
    "custom_params",
}
ALL = SamplingParams(
    max_new_tokens=9,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_new_tokens=2,
    stop=("a",),
    stop_token_ids=(7,),
    ignore_eos=True,
    n=2,
    sampling_seed=3,
    min_p=0.1,
    frequency_penalty=-1.0,
    presence_penalty=1.0,
    repetition_penalty=1.5,
    json_schema="{}",
    stop_regex=("b+",),
    logit_bias={5: -1.5},
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    no_stop_trim=True,
    custom_params={"k": 1},
)
# What the embedded engine has no code for; it says so.
NOT_EMBEDDED = {
    "min_p": 0.1,
    "frequency_penalty": 1.0,
    "presence_penalty": 1.0,
    "repetition_penalty": 1.5,
    "regex": "a+",
    "json_schema": "{}",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
    "stop_regex": ("a+",),
    "logit_bias": {5: 1.0},
    "custom_params": {"k": 1},
    "spaces_between_special_tokens": False,
}


def test_there_is_a_field_for_every_parameter_of_sglang() -> None:
    assert {field.name for field in fields(SamplingParams)} == OF_SGLANG


# What SGLang sets itself, and what ours leave out on purpose.
SET_INSIDE = {
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
    "ebnf_full_assistant",
}
LEFT_OUT = {"beam_width", "watermark", "stream_interval"}


@pytest.mark.sglang
def test_the_installed_sglang_has_no_other_parameter() -> None:
    """By its source: an import of it takes a minute."""
    source = installed("sglang", "sglang/srt/sampling/sampling_params.py")
    (found,) = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
    ]
    names = {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert names == OF_SGLANG | LEFT_OUT | SET_INSIDE


def test_what_differs_from_the_default_is_sent_with_sglangs_names() -> None:
    check_sampling(ALL)
    wire = ALL.to_wire()
    assert wire.keys() == OF_SGLANG - {"regex", "ebnf", "structural_tag"}
    assert wire["logit_bias"] == {"5": -1.5}
    assert SamplingParams().to_wire() == {"max_new_tokens": 128}


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"min_p": 1.5}, ValueError, "min_p = 1.5: must be at most 1"),
    ({"min_p": -0.1}, ValueError, "min_p = -0.1"),
    ({"frequency_penalty": 3}, ValueError, "frequency_penalty = 3: must be at most 2"),
    ({"presence_penalty": -2.5}, ValueError, "presence_penalty = -2.5: must be at least -2"),
    ({"repetition_penalty": 0}, ValueError, "repetition_penalty = 0: must be more than 0"),
    ({"repetition_penalty": 2.5}, ValueError, "repetition_penalty = 2.5: must be at most 2"),
    ({"regex": ""}, ValueError, "regex = '': must have at least 1 character"),
    ({"json_schema": {"type": "object"}}, TypeError, "json_schema = .*: must be a text"),
    ({"regex": "a", "ebnf": "b"}, ValueError, "ebnf = 'b': must be None, because regex is given"),
    ({"stop": "a"}, TypeError, "stop = 'a': must be a tuple or list"),
    ({"stop": ("",)}, ValueError, r"stop\[0\] = '': must have at least 1"),
    ({"stop_regex": "a+"}, TypeError, "stop_regex = 'a.': must be a tuple"),
    ({"stop_token_ids": ("a",)}, TypeError, r"stop_token_ids\[0\] = 'a'"),
    ({"logit_bias": [5]}, TypeError, "logit_bias = .*: must be a mapping"),
    ({"logit_bias": {"5": 1.0}}, TypeError, r"logit_bias\['5'\] = '5': must be a whole number"),
    ({"logit_bias": {5: "high"}}, TypeError, r"logit_bias\[5\] = 'high'"),
    ({"ignore_eos": 1}, TypeError, "ignore_eos = 1: must be True or False"),
    ({"sampling_seed": 1 << 63}, ValueError, "sampling_seed = .*: must be less than"),
    ({"custom_params": "x"}, TypeError, "custom_params = 'x'"),
    ({"n": 0}, ValueError, "n = 0"),
]


@pytest.mark.parametrize(("change", "kind", "said"), WRONG)
def test_a_wrong_parameter_is_named(
    change: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        check_sampling(SamplingParams(**change))
    if "n" not in change:
        with pytest.raises(kind, match=said):
            BatchPlan(1, 1, SamplingParams(**change))


@pytest.mark.parametrize(("change", "kind", "said"), WRONG)
def test_the_parameters_of_users_are_checked_when_they_are_made(
    change: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        rollout.SamplingParams(**change)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("max_tokens", "max_new_tokens"), ("seed", "sampling_seed"), ("temprature", "temperature")],
)
def test_a_name_of_vllm_or_openai_gets_the_name_that_is_meant(theirs: str, ours: str) -> None:
    with pytest.raises(TypeError, match=f"argument '{theirs}'; did you mean '{ours}'"):
        rollout.SamplingParams(**{theirs: 1})


def test_checked_parameters_are_sent_as_the_plain_ones() -> None:
    values = {name: getattr(ALL, name) for name in SamplingParams.__slots__}
    made = rollout.SamplingParams(**values)
    assert made.to_wire() == ALL.to_wire()
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(("name", "value"), NOT_EMBEDDED.items())
def test_the_embedded_engine_refuses_what_it_cannot_do(name: str, value: Any) -> None:
    sampling = SamplingParams(**{name: value})
    check_sampling(sampling)
    with pytest.raises(Invalid, match=f"{name} is not supported by the embedded engine"):
        parse(sampling.to_wire())


def test_the_embedded_engine_takes_or_refuses_every_parameter() -> None:
    taken = ALL.to_wire() | {"regex": "a+", "ebnf": "b", "structural_tag": "{}"}
    for name in NOT_EMBEDDED:
        taken.pop(name)
    assert parse(taken).top_k == 5
    assert taken.keys() | NOT_EMBEDDED.keys() == OF_SGLANG
