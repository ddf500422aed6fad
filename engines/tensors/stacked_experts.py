"""The checkpoint's tensors of stacked experts.

Transformers 5 holds all experts of a layer as one tensor, ``...experts.gate_up_proj`` (gate before
up) and ``...experts.down_proj``.  Most checkpoints have ``...experts.3.gate_proj.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_OF_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def first_expert_of(name: str) -> str:
    """The name of the first tensor that a stacked one becomes, or empty if the name is another."""
    layer, parts = _layer_and_parts(name)
    return f"{layer}.0.{parts[0]}.weight" if parts else ""


def stacked_name(name: str) -> str:
    """The name of the stacked tensor with this one of an expert, or empty if the name is
    another."""
    found = _OF_EXPERT.fullmatch(name)
    if found is None:
        return ""
    layer, part = found.groups()
    return next((f"{layer}.{member}" for member, parts in _PARTS.items() if part in parts), "")


def split_experts(name: str, stacked: Any) -> Iterator[tuple[str, Any]]:
    """One tensor for each expert and part; they are views."""
    layer, parts = _layer_and_parts(name)
    for expert, joined in enumerate(stacked):
        for part, piece in zip(parts, joined.chunk(len(parts)), strict=True):
            yield f"{layer}.{expert}.{part}.weight", piece


def _layer_and_parts(name: str) -> tuple[str, tuple[str, ...]]:
    layer, _, last = name.rpartition(".")
    return layer, _PARTS.get(last, ()) if layer.endswith(".experts") else ()
