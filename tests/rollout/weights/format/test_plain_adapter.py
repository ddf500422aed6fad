"""What engines get of an adapter: one rank, one alpha, and whole stacks."""

from math import sqrt
from typing import Any

import pytest

from rollout.config import EngineKind
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.format.plain_adapter import PlainAdapter, plain_adapter

CONFIG = {"r": 4, "lora_alpha": 8}
LAYER = "model.layers.0.self_attn"
WIDTHS = {
    f"{LAYER}.q_proj": (6, 8),
    f"{LAYER}.k_proj": (2, 8),
    f"{LAYER}.v_proj": (2, 8),
    f"{LAYER}.o_proj": (8, 6),
    "model.layers.0.mlp.gate_proj": (10, 8),
    "model.layers.0.mlp.up_proj": (10, 8),
    "model.layers.1.mlp.up_proj": (10, 8),
    f"{LAYER}.q_a_proj": (3, 8),
    f"{LAYER}.kv_a_proj_with_mqa": (5, 8),
}
BASE = Manifest.of(TensorSpec(f"{name}.weight", "bfloat16", of) for name, of in WIDTHS.items())
MLP, MLP_1 = "model.layers.0.mlp", "model.layers.1.mlp"


def name(module: str, half: str) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"


def adapter(ranks: dict[str, int]) -> Manifest:
    specs = []
    for module, rank in ranks.items():
        rows, columns = WIDTHS[module]
        specs += [TensorSpec(name(module, "A"), "float32", (rank, columns))]
        specs += [TensorSpec(name(module, "B"), "float32", (rows, rank))]
    return Manifest.of(specs)


def plain(more: dict[str, Any], ranks: dict[str, int]) -> PlainAdapter:
    return plain_adapter(CONFIG | more, adapter(ranks), BASE)


Q, V, OUT = (f"{LAYER}.{leaf}_proj" for leaf in "qvo")
THREE = dict.fromkeys((Q, V, OUT), 4)


def test_engines_get_four_fields_and_no_others() -> None:
    peft = {
        "peft_type": "lora",
        "target_modules": {"q_proj", "not_there"},
        "exclude_modules": {"o_proj"},
        "lora_dropout": 0.1,
        "inference_mode": True,
        "bias": "none",
    }
    made = plain(peft, {Q: 4, V: 4})
    assert made.config == {"peft_type": "LORA", **CONFIG, "target_modules": ["q_proj", "v_proj"]}
    assert (made.factors, made.padding, made.zeros) == ({}, {}, ())


def test_rslora_becomes_an_alpha_of_the_same_scale() -> None:
    made = plain({"use_rslora": True}, THREE)
    assert made.config["lora_alpha"] / made.config["r"] == pytest.approx(8 / sqrt(4), rel=1e-15)
    assert made.factors == {}


@pytest.mark.parametrize("rank", [1, 3, 7, 49, 64])
@pytest.mark.parametrize("alpha", [1, 8, 0.1, 1000])
def test_an_alpha_that_needs_no_conversion_is_left_as_it_is(rank: int, alpha: float) -> None:
    made = plain({"r": rank, "lora_alpha": alpha}, dict.fromkeys((Q, V), rank))
    assert made.config["lora_alpha"] == alpha


def test_scales_that_differ_by_powers_of_two_are_moved_into_lora_b() -> None:
    made = plain({"alpha_pattern": {"o_proj": 32, "v_proj": 4}}, THREE | {f"{MLP}.up_proj": 4})
    assert made.config["lora_alpha"] == 4
    assert made.factors == {
        name(Q, "B"): 2.0,
        name(OUT, "B"): 8.0,
        name(f"{MLP}.up_proj", "B"): 2.0,
    }


def test_one_alpha_for_all_modules_of_a_pattern_needs_no_factor() -> None:
    made = plain({"alpha_pattern": {".*_proj": 13}}, THREE)
    assert made.factors == {}
    assert made.config["lora_alpha"] / 4 == pytest.approx(13 / 4, rel=1e-15)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"alpha_pattern": {"o_proj": 24}}, "o_proj' the scale 6, other modules 2"),
        ({"alpha_pattern": {"o_proj": 0}}, "o_proj' the scale 0, other modules 2"),
        ({"lora_alpha": 0, "alpha_pattern": {"o_proj": 8}}, "q_proj' the scale 0, other modules 2"),
    ],
)
def test_other_scales_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightMismatch, match=words):
        plain(more, THREE)


@pytest.mark.parametrize("rank", [5, 7, 11, 13, 23])
def test_one_scale_by_other_numbers_is_one_scale(rank: int) -> None:
    """As PEFT's EVA writes it: ``alpha * (rank / r)``."""
    patterns = {"rank_pattern": {"o_proj": rank}, "alpha_pattern": {"o_proj": 8 * (rank / 3)}}
    assert plain({"r": 3} | patterns, {Q: 3, V: 3, OUT: rank}).factors == {}


def test_an_adapter_that_is_switched_off_stays_off() -> None:
    assert plain({"lora_alpha": 0}, THREE).config["lora_alpha"] == 0


def test_smaller_ranks_are_filled_up_with_zeros() -> None:
    made = plain({"rank_pattern": {"o_proj": 16}}, THREE | {OUT: 16})
    assert (made.config["r"], made.config["lora_alpha"]) == (16, 8)
    assert made.padding == {
        name(Q, "A"): (12, 0),
        name(Q, "B"): (0, 12),
        name(V, "A"): (12, 0),
        name(V, "B"): (0, 12),
    }
    assert made.factors == {name(Q, "B"): 4.0, name(V, "B"): 4.0}


def test_a_rank_that_no_module_has_is_not_the_rank() -> None:
    assert plain({"rank_pattern": {".*": 2}}, {Q: 2, V: 2}).config["r"] == 2


@pytest.mark.parametrize(
    ("modules", "added"),
    [
        ([Q], [V]),
        ([V], [Q]),
        ([f"{LAYER}.k_proj"], [Q, V]),
        ([Q, f"{LAYER}.k_proj"], [V]),
        ([Q, V], []),
        ([Q, f"{LAYER}.k_proj", V, OUT], []),
        ([f"{MLP}.up_proj"], [f"{MLP}.gate_proj"]),
        ([f"{MLP}.gate_proj"], []),
        ([f"{MLP_1}.up_proj"], []),  # the model has no gate there
        ([f"{LAYER}.q_a_proj"], [f"{LAYER}.kv_a_proj_with_mqa"]),
        ([f"{LAYER}.kv_a_proj_with_mqa"], [f"{LAYER}.q_a_proj"]),
    ],
)
def test_sglang_gets_zeros_for_what_it_needs_of_a_stack(
    modules: list[str], added: list[str]
) -> None:
    own = adapter(dict.fromkeys(modules, 4))
    made = plain_adapter(CONFIG, own, BASE, {EngineKind.SGLANG})
    assert {spec.name: spec for spec in made.zeros} == adapter(dict.fromkeys(added, 4)).tensors
    leaves = {module.rpartition(".")[2] for module in modules + added}
    assert made.config["target_modules"] == sorted(leaves)


def test_zeros_have_the_rank_that_all_have() -> None:
    own = adapter({Q: 4, OUT: 16})
    config = CONFIG | {"rank_pattern": {"o_proj": 16}}
    made = plain_adapter(config, own, BASE, {EngineKind.SGLANG})
    assert {spec.name: spec for spec in made.zeros} == adapter({V: 16}).tensors


def test_engines_that_stack_nothing_get_no_zeros() -> None:
    assert plain_adapter(CONFIG, adapter({Q: 4}), BASE, {"embedded", "vllm", "fake"}).zeros == ()


def test_an_incomplete_stack_of_an_unknown_model_is_refused() -> None:
    with pytest.raises(WeightMismatch, match=r"SGLang cannot load .*q_proj' without .*v_proj'"):
        plain_adapter(CONFIG, adapter({Q: 4}), None, {EngineKind.ATTACHED})
    assert plain_adapter(CONFIG, adapter({Q: 4, V: 4}), None, {EngineKind.ATTACHED}).zeros == ()
