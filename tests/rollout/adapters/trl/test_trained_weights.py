"""Adapters of PEFT are merged for a push, and the model is the same afterwards."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollout.adapters.trl.trained_weights import checkpoint_name, trained_weights
from rollout.core.errors import ConfigError

LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"base_model.model.{LAYER}.base_layer.weight", f"{LAYER}.weight"),
        (f"base_model.model.{LAYER}.lora_A.default.weight", ""),
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        ("base_model.model.lm_head.original_module.weight", ""),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.lm_head.modules_to_save.ref.weight", ""),
    ],
)
def test_names_of_peft_become_those_of_the_checkpoint(name: str, expected: str) -> None:
    assert checkpoint_name(name, "lora_", ["default"]) == expected


def fake_model(*parameters: Any, **more: Any) -> Any:
    return SimpleNamespace(parameters=lambda: list(parameters), **more)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (fake_model(SimpleNamespace(ds_id=1)), "DeepSpeed ZeRO-3 .* use ZeRO-2, or FSDP2"),
        (
            fake_model(SimpleNamespace(full_tensor=None), peft_config={}),
            "sharded by FSDP2 cannot be merged",
        ),
        (
            fake_model(peft_config={"default": SimpleNamespace()}, base_model=None),
            "adapter of SimpleNamespace cannot be merged .* use LoraConfig",
        ),
    ],
)
def test_a_model_that_cannot_be_pushed_is_refused(model: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why), trained_weights(model):
        raise AssertionError("the block was entered")


@pytest.mark.torch
def test_an_adapter_is_merged_only_within_the_block() -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        config = peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)
        model = peft.get_peft_model(base, config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora = {name.split(".")[-3]: tensor for name, tensor in before.items() if "lora_" in name}
    scale = config.lora_alpha / config.r
    with trained_weights(model) as weights:
        assert set(weights) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        merged = before["base_model.model.0.base_layer.weight"]
        merged = merged + scale * lora["lora_B"] @ lora["lora_A"]
        assert torch.allclose(weights["0.weight"], merged, atol=1e-6)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
