"""The settings of a checkpoint: ``config.json`` says how its weights are held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.plain_json import read_json
from rollout.rules.gpu_memory import ModelParts

# The names that models give to their number of experts.
_NOT_COUNTED = (
    "kv_lora_rank",
    "first_k_dense_replace",
    "mlp_only_layers",
    "n_shared_experts",
    "shared_expert_intermediate_size",
)
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "intermediate_size",
)
_MOST = 1 << 31
_IMAGE_TOKENS = (
    ("vision_start_token_id", "boi_token_index", "boi_token_id"),
    ("image_token_id", "image_token_index"),
    ("vision_end_token_id", "eoi_token_index", "eoi_token_id"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_checkpoint_config(model_path: str | Path) -> Mapping[str, Any]:
    """The ``config.json`` of a checkpoint, or empty if it cannot be read."""
    return _read(Path(model_path) / "config.json")


def read_generation_config(model_path: str | Path) -> Mapping[str, Any]:
    """The ``generation_config.json`` of a checkpoint, or empty if it cannot be read."""
    return _read(Path(model_path) / "generation_config.json")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = read_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a checkpoint is quantised, or empty if it is not."""
    for part in _parts(config):
        found = part.get("quantization_config") or part.get("compression_config")
        if isinstance(found, Mapping):
            return found
    return {}


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether it is a mixture of experts."""
    return any(part.get(name) for part in _parts(config) for name in _EXPERTS)


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Whether its head is its embedding, or None if the config does not say, and transformers has a
    default for each type of model."""
    found = [part.get("tie_word_embeddings") for part in _parts(config)]
    return True if any(found) else None if found.count(None) == len(found) else False


def head_size_of(config: Mapping[str, Any]) -> int:
    """Elements of an attention head; 0 if the config does not say, or heads are compressed."""
    for part in _parts(config):
        if part.get("kv_lora_rank"):
            return 0
        if size := _count(part, "head_dim"):
            return size
        hidden, heads = _count(part, "hidden_size"), _count(part, "num_attention_heads")
        if hidden and heads:
            return hidden // heads
    return 0


def parts_of(config: Mapping[str, Any]) -> ModelParts | None:
    """The elements of a language model's parts, or None if the config does not say, or has parts
    that are not counted here."""
    part = next((inner for inner in _parts(config) if "hidden_size" in inner), {})
    hidden, layers, vocabulary, heads, inner_size = (_count(part, name) for name in _SIZES)
    if not (hidden and layers and vocabulary and heads and inner_size):
        return None
    if "text_config" in config or any(part.get(name) for name in _NOT_COUNTED):
        return None
    head, groups = head_size_of(part), _count(part, "num_key_value_heads") or heads
    experts = next((num for name in _EXPERTS if (num := _count(part, name))), 0)
    of_expert = 3 * hidden * (_count(part, "moe_intermediate_size") or inner_size)
    return ModelParts(
        num_layers=layers,
        embedding=vocabulary * hidden,
        head=0 if part.get("tie_word_embeddings") else vocabulary * hidden,
        attention=2 * hidden * head * (heads + groups) + (2 + experts) * hidden,
        dense=0 if experts else 3 * hidden * inner_size,
        experts=experts * of_expert,
        kv_heads=groups,
        head_size=head,
    )


def elements_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Elements of the model, and of a trainer's largest tensor, where the experts of a layer are
    one; zeros if the config does not say, or has parts that are not counted here."""
    parts = parts_of(config)
    if parts is None:
        return 0, 0
    last_norm = parts.embedding // vocabulary_of(config)
    stacked = 2 * parts.experts // 3  # gate and up of all experts
    return parts.num_elements + last_norm, max(parts.embedding, stacked, parts.dense // 3)


def element_bytes_of(config: Mapping[str, Any]) -> int:
    """Bytes of an element of the weights; of bfloat16 if the config does not say."""
    names = (part.get("dtype") or part.get("torch_dtype") for part in _parts(config))
    return 4 if next(filter(None, names), "") == "float32" else 2


def _count(part: Mapping[str, Any], name: str) -> int:
    """A number of the config; 0 if it is none that a model can have."""
    value = part.get(name)
    return value if type(value) is int and 0 < value < _MOST else 0


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """Tokens of the language model; 0 if the config does not say."""
    return _of_language_model(config, "vocab_size")


def context_length_of(config: Mapping[str, Any]) -> int:
    """The longest sequence of the language model, in tokens; 0 if the config does not say."""
    return _of_language_model(config, "max_position_embeddings")


def image_tokens_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Begin, placeholder and end of one image, as far as the config names them, or empty if it
    names no placeholder."""
    begin, placeholder, end = (
        next((config[name] for name in names if type(config.get(name)) is int), None)
        for names in _IMAGE_TOKENS
    )
    if placeholder is None:
        return ()
    return tuple(token for token in (begin, placeholder, end) if token is not None)


def _of_language_model(config: Mapping[str, Any], name: str) -> int:
    parts = reversed(_parts(config))
    return next((num for part in parts if (num := _count(part, name))), 0)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config itself, and that of the language model in a model of several."""
    inner = config.get("text_config")
    return [config, inner] if isinstance(inner, Mapping) else [config]
