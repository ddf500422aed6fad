"""What another type, or another rope, on one side looks like, on a model of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from rollout.core.samples import Sample
from rollout.driver.logprobs.comparison import compare_logprobs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.embedded, pytest.mark.slow]

PROMPT_LENGTH, LENGTH, NUM = 3, 96, 12


def load(folder: Path, **rope: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    if transformers.__version__.startswith("4."):
        config.rope_theta, config.rope_scaling = rope.pop("rope_theta", config.rope_theta), rope
    else:
        config.rope_parameters = {**config.rope_parameters, **rope}
    load_model = transformers.AutoModelForCausalLM.from_pretrained
    return load_model(folder, config=config, dtype=torch.float32).eval()


def logprobs(model: Any, ids: Any) -> list[list[float]]:
    """Of the output tokens."""
    with torch.no_grad():
        values = model(ids).logits.float().log_softmax(-1)[:, :-1]
    return values.gather(-1, ids[:, 1:, None])[:, PROMPT_LENGTH - 1 :, 0].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture(scope="module")
def ids(folder: Path) -> Any:
    """Prompts, and what the model draws after them."""
    torch.manual_seed(0)
    prompts = torch.randint(0, 256, (NUM, PROMPT_LENGTH))
    return load(folder).generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        min_new_tokens=LENGTH,
        max_new_tokens=LENGTH,
    )


def samples_of(model: Any, ids: Any) -> list[Sample]:
    """What an engine with this model returns."""
    return [
        Sample(row[:PROMPT_LENGTH], row[PROMPT_LENGTH:], values)
        for row, values in zip(ids.tolist(), logprobs(model, ids), strict=True)
    ]


def test_an_engine_in_bfloat16_is_found_if_both_should_compute_in_float32(
    folder: Path, ids: Any
) -> None:
    model = load(folder)
    narrow = samples_of(copy.deepcopy(model).to(torch.bfloat16), ids)
    found = compare_logprobs(narrow, logprobs(model, ids), dtype="float32").mismatch
    assert found is not None
    assert found.gap < 0.05
    # It is what rounding costs, if both compute in bfloat16.
    assert compare_logprobs(narrow, logprobs(model, ids)).mismatch is None
    right = compare_logprobs(samples_of(model, ids), logprobs(model, ids), dtype="float32")
    assert right.mismatch is None


@pytest.mark.parametrize("base", [5e3, 1e6])
def test_another_base_of_rope_is_found(folder: Path, ids: Any, base: float) -> None:
    other = samples_of(load(folder, rope_theta=base), ids)
    report = compare_logprobs(other, logprobs(load(folder), ids))
    assert report.mismatch is not None
    assert report.by_position[1].mean < report.by_position[64].mean / 4


def test_a_small_training_step_is_found_and_does_not_grow(folder: Path, ids: Any) -> None:
    old, new = load(folder), load(folder)
    with torch.no_grad():
        for weight in new.parameters():
            weight += 0.02 * weight.std(correction=0) * torch.randn_like(weight)
    report = compare_logprobs(samples_of(old, ids), logprobs(new, ids), dtype="float32")
    assert report.mismatch is not None
    assert report.by_position[1].mean > report.by_position[64].mean / 4
