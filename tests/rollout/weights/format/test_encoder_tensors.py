"""Which pushes change what computes the embeddings of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import fake
from engines.protocol import TensorInfo
from rollout.config import WeightUpdate
from rollout.weights.format.encoder_tensors import pushed_encoder

LANGUAGE = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "model.language_model.layers.0.mlp.up_proj.weight",
    "language_model.model.layers.0.mlp.up_proj.weight",
    "language_model.lm_head.weight",
    "llm.model.layers.0.mlp.up_proj.weight",
    "thinker.model.layers.0.mlp.up_proj.weight",
    "mtp.layers.0.mlp.up_proj.weight",
)
ENCODERS = (
    "visual.patch_embed.proj.weight",
    "visual.merger.mlp.0.weight",
    "model.visual.blocks.0.norm1.weight",
    "model.vision_tower.layers.0.weight",
    "vision_model.encoder.layers.0.weight",
    "multi_modal_projector.linear_1.weight",
    "mlp1.0.weight",
    "thinker.audio_tower.layers.0.weight",
    "model.embed_tokens_extend.image_embed.weight",
    "vision_language_adapter.w_in.weight",
)


def checkpoint(folder: Path, *names: str) -> str:
    tensors = [TensorInfo(name, "float32", (2,)) for name in names]
    return str(fake.write_checkpoint(folder, tensors))


def test_a_language_model_alone_has_no_encoder(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, *LANGUAGE)
    for update in WeightUpdate:
        assert pushed_encoder(path, update, ()) == ""


@pytest.mark.parametrize("name", ENCODERS)
def test_every_other_tensor_counts_as_one_unless_it_is_not_pushed(
    tmp_path: Path, name: str
) -> None:
    path = checkpoint(tmp_path, LANGUAGE[0], name)
    for update in WeightUpdate:
        is_pushed = update is not WeightUpdate.FROZEN
        assert pushed_encoder(path, update, ()) == (f"tensor {name!r}" if is_pushed else "")
    assert pushed_encoder(path, WeightUpdate.FULL, [name]) == ""


def test_an_encoder_is_pushed_if_one_of_its_tensors_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, LANGUAGE[0], *ENCODERS[:3])
    partly = ["visual.patch_embed.*", "model.visual.*"]
    assert pushed_encoder(path, WeightUpdate.FULL, partly) == f"tensor {ENCODERS[1]!r}"
    assert pushed_encoder(path, WeightUpdate.FULL, [*partly, "visual.merger.*"]) == ""


def test_a_checkpoint_whose_tensors_are_not_known_may_have_one(tmp_path: Path) -> None:
    assert pushed_encoder(str(tmp_path), WeightUpdate.FULL, ()) == "tensors that are not known"
    assert pushed_encoder(str(tmp_path), WeightUpdate.FROZEN, ()) == ""
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert pushed_encoder(str(tmp_path), WeightUpdate.FULL, ()) == "tensors that are not known"
