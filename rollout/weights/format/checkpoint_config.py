"""What a checkpoint's ``config.json`` says about how its weights are held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The names that models give to their number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_checkpoint_config(model_path: str | Path) -> Mapping[str, Any]:
    """The ``config.json`` of a checkpoint; empty if it cannot be read."""
    try:
        found = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a checkpoint is quantised; empty if it is not."""
    for part in _parts(config):
        found = part.get("quantization_config") or part.get("compression_config")
        if isinstance(found, Mapping):
            return found
    return {}


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether it is a mixture of experts."""
    return any(part.get(name) for part in _parts(config) for name in _EXPERTS)


def head_size_of(config: Mapping[str, Any]) -> int:
    """Elements of an attention head; 0 if the config does not say, or heads are compressed."""
    for part in _parts(config):
        if part.get("kv_lora_rank"):
            return 0
        if isinstance(size := part.get("head_dim"), int):
            return size
        hidden, heads = part.get("hidden_size"), part.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            return hidden // heads
    return 0


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config itself, and that of the language model in a model of several."""
    inner = config.get("text_config")
    return [config, inner] if isinstance(inner, Mapping) else [config]
