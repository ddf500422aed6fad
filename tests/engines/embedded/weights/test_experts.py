"""A mixture of experts has its checkpoint's names, whatever the model joins."""

from pathlib import Path

import pytest
from engines.embedded.core.model_config import read_model_config
from engines.embedded.weights.model_weights import ModelWeights
from rollout.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.embedded


def test_a_mixture_of_experts_is_known_and_written_by_the_names_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    import torch
    from engines.embedded.model.decoder import Decoder
    from safetensors.torch import load_file

    path = make_tiny_model(tmp_path / "model", "qwen3_moe", num_experts=3)
    saved = load_file(path / "model.safetensors")
    model = Decoder(read_model_config(path), torch.float32).to_empty(device="cpu")
    weights = ModelWeights(model)
    held = {one["name"]: one["shape"] for one in weights.manifest()}
    assert held == {name: list(tensor.shape) for name, tensor in saved.items()}
    for change in weights.changes(list(saved.items())):
        change()
    before, _ = weights.checksum()
    for change in weights.changes([(name, tensor * 2) for name, tensor in saved.items()]):
        change()
    after, _ = weights.checksum()
    assert not set(before.values()) & set(after.values())
    gate_up = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[2]
    experts = "model.layers.1.mlp.experts.2"
    expected = [saved[f"{experts}.{part}_proj.weight"] * 2 for part in ("gate", "up")]
    assert torch.equal(gate_up.data, torch.cat(expected))
