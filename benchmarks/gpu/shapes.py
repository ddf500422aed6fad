"""Checkpoints of real shapes from their config alone: nothing is downloaded, and no disk is taken.

The weights are a hole in the file, so they are zeros: an engine starts from them, and the trainer
pushes others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from engines.embedded.weights.model_weights import ModelWeights
from engines.tensors.safetensors_header import make_header
from rollout.testing.tiny_model import make_byte_tokenizer

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
}
_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | _EXPERTS
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
# Of ``--smoke``: the same model with few and small layers.
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def checkpoint_bytes(name: str) -> int:
    """Of all tensors of a shape."""
    header, ranges = make_header(_tensors(_model(name, is_tiny=False)))
    return max(end for _, end in ranges.values()) - len(header)


def make_checkpoint(folder: Path, name: str, *, is_tiny: bool = False) -> tuple[int, int]:
    """Write a directory that an embedded engine can serve; tensors in it, and their bytes.

    Args:
        name: of ``SHAPES``.
    """
    model = _model(name, is_tiny=is_tiny)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    tensors = _tensors(model)
    header, ranges = make_header(tensors, metadata={"format": "pt"}, alignment=8)
    file = folder / "model.safetensors"
    file.write_bytes(header)
    os.truncate(file, max(end for _, end in ranges.values()))
    return len(tensors), file.stat().st_size - len(header)


def _model(name: str, *, is_tiny: bool) -> Any:
    """Without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(SHAPES[name])
    kind = values.pop("model_type", "qwen3")
    if is_tiny:
        values |= _TINY | (_TINY_EXPERTS if kind == "qwen3_moe" else {})
    tokenizer = make_byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(kind, **values, **ends, bos_token_id=None, dtype="bfloat16")
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config, dtype=torch.bfloat16)


def _tensors(model: Any) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each tensor of its checkpoint."""
    manifest = [one for one in ModelWeights(model).manifest() if not one["is_tied"]]
    return [(one["name"], one["dtype"], one["shape"]) for one in manifest]
