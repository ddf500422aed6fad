"""What ``config.json`` says about a model, in one form; imports neither torch nor transformers.

Always true: what the decoder would compute otherwise than transformers does is refused here, before
anything is loaded.

Both forms are read: that of transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and
that of 5 (``rope_parameters``, ``dtype``).  A missing value is what transformers takes for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from engines.plain_json import WRONG_FORM, object_in

_TITLES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
}
# Of transformers' classes, where a file lacks the key.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
}
_MOST_LAYERS = 4096
_ANY_SIZES = ConfigDict(extra="ignore")


@dataclass(frozen=True, slots=True, config=_ANY_SIZES)
class Rope:
    """Rotary position embeddings and their scaling; names and defaults are transformers'."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: PositiveFloat = 10000.0
    factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt = 1
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    attention_factor: PositiveFloat | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True, config=_ANY_SIZES)
class ModelConfig:
    """One model; names of the fields up to ``moe_intermediate_size`` are transformers'.

    Attributes:
        rope: its position embeddings.
        windows: of each layer, how many keys up to its own a token sees, or None for all of them.
        sparse_layers: the layers that have experts.
        qkv_bias: whether the projections to queries, keys and values add a bias.
        out_bias: whether that of the attention's output does.
        eos_ids: ends of a sequence by ``config.json`` and ``generation_config.json``.
    """

    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 32768
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    architectures: list[str] | None = None
    num_experts: int = 128
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = False
    moe_intermediate_size: PositiveInt = 768
    rope: Rope = field(default_factory=Rope)
    windows: tuple[int | None, ...] = ()
    sparse_layers: frozenset[int] = frozenset()
    qkv_bias: bool = False
    out_bias: bool = False
    has_qk_norm: bool = False
    eos_ids: frozenset[int] = Field(default_factory=frozenset)


def refuse_architecture(raw: Mapping[str, Any]) -> None:
    """Raises ValueError where the decoder does not know the model of this ``config.json``."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in _TITLES:
        names = raw.get("architectures")
        named = f" ({names[0]})" if isinstance(names, list) and names else ""
        raise ValueError(
            f"the embedded engine cannot run a model of type {kind!r}{named}: it runs "
            f"{', '.join(_TITLES.values())}; SGLang and vLLM run others"
        )


def read_model_config(path: str | Path) -> ModelConfig:
    """The model in this folder.

    Raises:
        OSError: there is no ``config.json``.
        ValueError: the decoder does not run such a model; one sentence.
    """
    folder = Path(path)
    raw = object_in(folder / "config.json")
    generation = folder / "generation_config.json"
    return model_config(raw, object_in(generation) if generation.is_file() else {})


def model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """The model of a ``config.json`` and a ``generation_config.json``; ValueError as above."""
    refuse_architecture(raw)
    if raw.get("quantization_config"):
        raise ValueError("the embedded engine runs no quantized checkpoints; SGLang and vLLM do")
    kind = raw["model_type"]
    # A key that is null is one without a value, and not one that is missing.
    values = {
        name: value for name, value in {**_DEFAULTS[kind], **raw}.items() if value is not None
    }
    has_bias = kind == "qwen2" or (kind != "mistral" and bool(values.get("attention_bias")))
    try:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
        values.setdefault("dtype", values.get("torch_dtype"))
        values["num_experts"] = values.get("num_local_experts", values.get("num_experts", 128))
        return ModelConfig(
            **values
            | {
                "mlp_bias": kind == "llama" and bool(values.get("mlp_bias")),
                "rope": _rope(values),
                "windows": _windows(kind, values),
                "sparse_layers": _sparse_layers(kind, values),
                "qkv_bias": has_bias,
                "out_bias": has_bias and kind != "qwen2",
                "has_qk_norm": kind in ("qwen3", "qwen3_moe"),
                "eos_ids": _ids(values) | _ids(generation),
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"config.json: {name}: {first['msg']}") from None
    except WRONG_FORM as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else f": {error}"
        raise ValueError(f"config.json {why}".replace(" :", ":")) from None


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", values.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json: a partial_rotary_factor is not supported")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError("config.json: rope_parameters of each kind of layer are not supported")
    longest = values.get("max_position_embeddings", 32768)
    rope.setdefault("original_max_position_embeddings", longest)
    if "original_max_position_embeddings" in values:
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    if rope["rope_type"] == "yarn" and rope.get("factor") is None:
        rope["factor"] = longest / rope["original_max_position_embeddings"]
    if rope["rope_type"] != "default" and rope.get("factor") is None:
        raise ValueError("config.json: the scaling of its rope has no factor")
    return {name: value for name, value in rope.items() if value is not None}


def _windows(kind: str, values: Mapping[str, Any]) -> list[int | None]:
    count = _num_layers(values)
    window = values.get("sliding_window")
    if kind == "llama" or (kind != "mistral" and not values.get("use_sliding_window")):
        window = None
    if kind in ("mistral", "qwen3_moe"):
        return [window] * count
    first = values.get("max_window_layers", 28)
    types = values.get("layer_types") or [
        "full_attention" if index < first else "sliding_attention" for index in range(count)
    ]
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"config.json: layer type {min(unknown)!r} is not supported")
    return [window if layer_type == "sliding_attention" else None for layer_type in types]


def _sparse_layers(kind: str, values: Mapping[str, Any]) -> set[int]:
    if kind != "qwen3_moe" or not values["num_experts"]:
        return set()
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers", [])
    layers = range(_num_layers(values))
    return {index for index in layers if index not in dense and (index + 1) % step == 0}


def _num_layers(values: Mapping[str, Any]) -> int:
    count = int(values["num_hidden_layers"])
    if not 0 < count <= _MOST_LAYERS:
        raise ValueError(f"config.json: {count} layers, and not 1 to {_MOST_LAYERS}")
    return count


def _ids(values: Mapping[str, Any]) -> frozenset[int]:
    value = values.get("eos_token_id")
    return frozenset(value if isinstance(value, list) else [] if value is None else [value])
