"""Every field of PEFT's configuration is in one table, and what no engine honours is refused."""

import re
from dataclasses import fields
from typing import Any

import pytest

from engines.protocol.lora_config import (
    FIELDS,
    KEEPS_BASE,
    FieldUse,
    module_and_half,
    rank_and_scale,
    why_incomplete,
    why_unsupported,
)
from tests.support.processes import ROOT

CONFIG = {"r": 4, "lora_alpha": 8}
REFUSED = sorted(name for name, use in FIELDS.items() if use is FieldUse.REFUSED)
ON = {"bias": "lora_only", "init_lora_weights": "pissa_niter_4", "use_bdlora": {"nblocks": 2}}


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_no_engine_honours_is_refused_by_name(name: str) -> None:
    assert f"{name} = " in why_unsupported(CONFIG | {name: ON.get(name, True)})


@pytest.mark.parametrize("value", [None, False, {}, [], 0])
def test_a_field_that_is_off_is_no_reason(value: Any) -> None:
    assert why_unsupported(CONFIG | dict.fromkeys(REFUSED, value) | {"bias": "none"}) == ""


def test_a_field_of_a_newer_peft_is_refused_unless_it_is_off() -> None:
    assert why_unsupported(CONFIG | {"use_next": None}) == ""
    assert "use_next = {'a': 1} is not supported by any engine, and not known here" in (
        why_unsupported(CONFIG | {"use_next": {"a": 1}})
    )


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - set(REFUSED) - {"peft_type"}))
def test_all_other_fields_are_taken(name: str) -> None:
    assert why_unsupported(CONFIG | {name: "anything"}) == ""


@pytest.mark.parametrize("value", [True, False, None, *sorted(KEEPS_BASE), "GAUSSIAN"])
def test_first_values_of_the_adapter_alone_are_of_no_concern(value: Any) -> None:
    assert why_unsupported(CONFIG | {"init_lora_weights": value}) == ""


@pytest.mark.parametrize("value", ["pissa", "olora", "corda", "loftq", "lora_ga"])
def test_inits_that_change_the_base_name_the_way_out(value: str) -> None:
    assert "with is_base=True" in why_unsupported(CONFIG | {"init_lora_weights": value})


@pytest.mark.parametrize(
    ("more", "module", "expected"),
    [
        ({}, "layers.0.q_proj", (4, 2.0)),
        ({"use_rslora": True}, "layers.0.q_proj", (4, 4.0)),
        ({"alpha_pattern": {"q_proj": 2}}, "layers.0.q_proj", (4, 0.5)),
        ({"alpha_pattern": {"q_proj": 2}}, "layers.0.seq_proj", (4, 2.0)),
        ({"rank_pattern": {r"layers\.[0-3]\..*": 16}}, "layers.2.q_proj", (16, 0.5)),
        ({"rank_pattern": {"^layers.0.q_proj": 16}}, "model.layers.0.q_proj", (4, 2.0)),
        ({"rank_pattern": {"proj": 1, "q_proj": 16, ".*": 2}}, "a.q_proj", (16, 0.5)),
        ({"rank_pattern": {"q_proj": 16}, "use_rslora": True}, "a.q_proj", (16, 2.0)),
        ({"rank_pattern": None, "alpha_pattern": None}, "a.q_proj", (4, 2.0)),
    ],
)
def test_ranks_and_scales_follow_the_rules_of_peft(
    more: dict[str, Any], module: str, expected: tuple[int, float]
) -> None:
    assert why_incomplete(CONFIG | more) == ""
    assert rank_and_scale(CONFIG | more, module) == expected


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("adapter", ["", ".default"])
def test_names_are_those_of_a_saved_adapter_or_of_a_model_with_adapters(
    prefix: str, adapter: str
) -> None:
    assert module_and_half(f"{prefix}a.q_proj.lora_B{adapter}.weight") == ("a.q_proj", "B")
    assert module_and_half(f"{prefix}a.q_proj.lora_B{adapter}.bias") is None


def test_the_page_on_lora_has_the_table() -> None:
    page = (ROOT / "docs/how-to/lora.md").read_text()
    for use in FieldUse:
        [row] = [line for line in page.splitlines() if line.startswith(f"| {use} |")]
        names = re.findall(r"`(\w+)`", row.split("|")[2])
        assert names == [name for name in FIELDS if FIELDS[name] is use]


@pytest.mark.torch
def test_every_field_of_peft_is_in_the_table_and_its_defaults_are_taken() -> None:
    peft = pytest.importorskip("peft")
    assert {one.name for one in fields(peft.LoraConfig)} <= FIELDS.keys()
    assert why_unsupported(peft.LoraConfig().to_dict()) == ""
    assert why_incomplete(peft.LoraConfig().to_dict()) == ""
