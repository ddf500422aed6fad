"""An adapter that does not fit is found before anything is sent."""

from typing import Any

import pytest

from rollout.core.errors import WeightMismatch
from rollout.weights.format.lora_check import check_adapter, warn_of_base
from rollout.weights.format.manifest import Manifest, TensorSpec

CONFIG = {"r": 4, "lora_alpha": 8}
BASE = Manifest.of([TensorSpec("model.layers.0.q_proj.weight", "bfloat16", (6, 8))])
A = "base_model.model.model.layers.0.q_proj.lora_A.weight"
B = "base_model.model.model.layers.0.q_proj.lora_B.weight"
GOOD = {A: (4, 8), B: (6, 4)}


def of(shapes: dict[str, tuple[int, ...]]) -> Manifest:
    return Manifest.of(TensorSpec(name, "float32", shape) for name, shape in shapes.items())


def test_one_that_fits_is_accepted_also_where_the_base_is_not_known() -> None:
    for base in (BASE, None):
        check_adapter(CONFIG, of(GOOD), base)


@pytest.mark.parametrize(
    ("shapes", "config", "words"),
    [
        (GOOD, {"r": 4}, "needs r, a whole number, and lora_alpha"),
        (GOOD, {"r": "4", "lora_alpha": 1}, "needs r"),
        (GOOD, {"r": 4, "lora_alpha": float("nan")}, "needs r"),
        (GOOD, CONFIG | {"rank_pattern": [4]}, r"rank_pattern = \[4\], which is not a mapping"),
        (GOOD, CONFIG | {"rank_pattern": {"q": 0}}, "rank_pattern with 'q': 0"),
        (GOOD, CONFIG | {"alpha_pattern": {"(": 8}}, r"alpha_pattern with '\(': 8"),
        (GOOD, CONFIG | {"rank_pattern": {"q_proj": 2}}, "has not rank 2"),
        (GOOD, CONFIG | {"peft_type": "ADALORA"}, "peft_type = 'ADALORA' is not supported"),
        (GOOD | {A.replace("A.w", "A.default.w"): (4, 8)}, CONFIG, "lora_A of .* twice"),
        (GOOD | {A: (4, 8, 1)}, CONFIG, "has not rank 4"),
        ({}, CONFIG, "holds no tensors"),
        ({A: (4, 8)}, CONFIG, "only lora_A of 'model.layers.0.q_proj'"),
        (GOOD | {"x.weight": (1,)}, CONFIG, "'x.weight' is no ...lora_A.weight"),
        (GOOD | {A: (8, 8)}, CONFIG, "has not rank 4"),
        (GOOD | {B: (6, 8)}, CONFIG, "has not rank 4"),
        (GOOD | {A: (4, 6)}, CONFIG, r"shape \[4, 6\], but 'model.layers.0.q_proj' is \[6, 8\]"),
        (GOOD | {B: (8, 4)}, CONFIG, r"shape \[8, 4\], but"),
        (
            {name.replace("q_proj", "q_pro"): shape for name, shape in GOOD.items()},
            CONFIG,
            "no layer 'model.layers.0.q_pro'; did you mean 'model.layers.0.q_proj'",
        ),
    ],
)
def test_what_is_wrong_is_said(
    shapes: dict[str, tuple[int, ...]], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(WeightMismatch, match=words):
        check_adapter(config, of(shapes), BASE)


@pytest.mark.parametrize(
    ("named", "model_path", "is_other"),
    [
        ("Qwen/Qwen3-0.6B", "/models/Qwen3-0.6B/", False),
        ("/ckpt/Qwen3-0.6B", "/models/Qwen3-0.6B-Base", True),
        ("Qwen/Qwen3-0.6B", "/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899d", False),
        ("", "/models/Qwen3-0.6B", False),
    ],
)
def test_an_adapter_that_names_another_base_is_told_once(
    named: str, model_path: str, is_other: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_base.cache_clear()
    for _ in range(2):
        warn_of_base(named, model_path)
    assert len(caplog.records) == is_other
    assert not is_other or f"is {named}, and the engines' model is {model_path}" in caplog.text
