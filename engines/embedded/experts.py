"""Experts that the model keeps in one tensor, under the names its checkpoint has for each.

Always true: what is given out are views: writing to one writes to the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Models whose checkpoints have ``experts.<n>.gate_proj``, ``up_proj`` and ``down_proj``, which
# transformers joins, gate before up.
_JOINED = frozenset({"qwen2_moe", "qwen3_moe"})


def checkpoint_tensors(
    model_type: str, name: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter as its checkpoint has it: by itself, or one tensor for each expert and part."""
    layer, _, part = name.rpartition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part, ())
    if model_type not in _JOINED or not layer or not parts or tensor.dim() != 3:
        yield name, tensor
        return
    for expert, joined in enumerate(tensor):
        for its_part, piece in zip(parts, joined.chunk(len(parts)), strict=True):
            yield f"{layer}.experts.{expert}.{its_part}.weight", piece
