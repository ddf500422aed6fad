"""PEFT's format of LoRA adapters: what each field of its ``LoraConfig`` (0.21.2) is to engines.

Always true: a field that changes what an adapter computes is sent, converted or refused by name.
A field that is not in the table is refused, unless it is off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class FieldUse(StrEnum):
    """What a push does with a field."""

    SENT = "engines get it"
    CONVERTED = "converted: engines get one rank and one alpha of the same effect"
    FROM_TENSORS = "not read: the names of the adapter's tensors say it"
    COMPARED = "compared with the server's model: another folder's name is a warning"
    TRAINING = "not read: it concerns the training alone"
    REFUSED = "refused, unless it is off"


FIELDS: Mapping[str, FieldUse] = {
    "peft_type": FieldUse.SENT,
    "r": FieldUse.SENT,
    "lora_alpha": FieldUse.SENT,
    "use_rslora": FieldUse.CONVERTED,
    "rank_pattern": FieldUse.CONVERTED,
    "alpha_pattern": FieldUse.CONVERTED,
    "target_modules": FieldUse.FROM_TENSORS,
    "exclude_modules": FieldUse.FROM_TENSORS,
    "layers_to_transform": FieldUse.FROM_TENSORS,
    "layers_pattern": FieldUse.FROM_TENSORS,
    "task_type": FieldUse.TRAINING,
    "auto_mapping": FieldUse.TRAINING,
    "peft_version": FieldUse.TRAINING,
    "base_model_name_or_path": FieldUse.COMPARED,
    "revision": FieldUse.TRAINING,
    "inference_mode": FieldUse.TRAINING,
    "lora_dropout": FieldUse.TRAINING,
    "loftq_config": FieldUse.TRAINING,
    "eva_config": FieldUse.TRAINING,
    "corda_config": FieldUse.TRAINING,
    "lora_ga_config": FieldUse.TRAINING,
    "velora_config": FieldUse.TRAINING,
    "megatron_config": FieldUse.TRAINING,
    "megatron_core": FieldUse.TRAINING,
    "runtime_config": FieldUse.TRAINING,
    # Read by PEFT only with use_qalora.
    "qalora_group_size": FieldUse.TRAINING,
    "init_lora_weights": FieldUse.REFUSED,
    "fan_in_fan_out": FieldUse.REFUSED,
    "bias": FieldUse.REFUSED,
    "modules_to_save": FieldUse.REFUSED,
    "trainable_token_indices": FieldUse.REFUSED,
    "use_dora": FieldUse.REFUSED,
    "alora_invocation_tokens": FieldUse.REFUSED,
    "use_qalora": FieldUse.REFUSED,
    "monteclora_config": FieldUse.REFUSED,
    "layer_replication": FieldUse.REFUSED,
    "lora_bias": FieldUse.REFUSED,
    "target_parameters": FieldUse.REFUSED,
    "use_bdlora": FieldUse.REFUSED,
    "arrow_config": FieldUse.REFUSED,
    "kasa_config": FieldUse.REFUSED,
    "ensure_weight_tying": FieldUse.REFUSED,
}

# Those that change the adapter's first values alone.  The others (PiSSA, OLoRA, CorDA, LoftQ,
# LoRA-GA) change the base in the trainer too.
KEEPS_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica"})


_MOST_RANK, _MOST_ALPHA = 1 << 31, 1e30
# A group within a repetition, and many repetitions or choices, can take for ever.
_REPEATED_GROUP, _REPEATS = re.compile(r"\)\s*[*+{?]"), re.compile(r"[*+{?]")
_MOST_REPEATS, _MOST_CHOICES = 3, 16

_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>A|B)(\.\w+)?\.weight$")


def module_and_half(tensor: str) -> tuple[str, str] | None:
    """The module and the half, ``A`` or ``B``, that a tensor's name has, or None for other
    names."""
    found = _NAME.match(tensor)
    return None if found is None else (found["module"], found["half"])


def why_incomplete(config: Mapping[str, Any]) -> str:
    """What is wrong with the numbers that every adapter has."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not _is_rank(rank) or not _is_alpha(alpha):
        return f"needs r, a whole number, and lora_alpha; it has r = {rank!r}, alpha = {alpha!r}"
    for name, is_right in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, Mapping):
            return f"has {name} = {pattern!r:.80}, which is not a mapping"
        for key, value in pattern.items():
            if not _is_pattern(key) or not is_right(value):
                return f"has {name} with {key!r}: {value!r}"
    return ""


def why_unsupported(config: Mapping[str, Any]) -> str:
    """The first field that no engine honours, and what would work."""
    kind = config.get("peft_type") or "LORA"
    if not isinstance(kind, str) or kind.upper() != "LORA":
        return f"peft_type = {kind!r} is not supported: only LORA is"
    for name, value in config.items():
        if name == "init_lora_weights":
            if isinstance(value, str) and value.lower() not in KEEPS_BASE:
                return (
                    f"init_lora_weights = {value!r} is not supported: it changes the base in the "
                    "trainer. Push that base once, with is_base=True, and give this as True"
                )
        elif FIELDS.get(name, FieldUse.REFUSED) is FieldUse.REFUSED and not _is_off(value):
            known = "" if name in FIELDS else ", and not known here"
            return (
                f"{name} = {value!r:.80} is not supported by any engine{known}. Push whole "
                "weights, for example those of PEFT's merge_and_unload(), with is_base=True"
            )
    return ""


def rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """The rank of one module's pair, and the factor of its ``B(A(x))``, by PEFT's rules.

    Args:
        module: its name in the model, for example ``model.layers.0.self_attn.q_proj``.
    """
    rank = _of_module(config.get("rank_pattern"), module, config["r"])
    alpha = _of_module(config.get("alpha_pattern"), module, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's ``get_pattern_key``: the first key that matches the end of the name, from a dot on."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST_RANK


def _is_alpha(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _MOST_ALPHA


def _is_pattern(key: object) -> bool:
    """A pattern that is matched in little time, whatever the name is."""
    if not isinstance(key, str) or _REPEATED_GROUP.search(key):
        return False
    if len(_REPEATS.findall(key)) > _MOST_REPEATS or key.count("|") > _MOST_CHOICES:
        return False
    try:
        return bool(re.compile(key))
    except (re.error, RecursionError, OverflowError):
        return False


def _is_off(value: Any) -> bool:
    """PEFT's fields are off as None, False, an empty collection, or ``bias="none"``."""
    return not value or value == "none"
