"""The memory of an engine without a model, into which the embedded engine's code loads weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engines.embedded.memory.regions import Memory
from engines.protocol import MemoryTag


def allocated(layout: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, torch.Tensor]:
    """Zeroed tensors in one arena, as the embedded engine allocates its parameters."""
    memory = Memory(torch.device("cpu"), saver=False, weights_backup=False)
    tensors = memory.allocate(
        MemoryTag.WEIGHTS, [(list(shape), dtype) for shape, dtype in layout.values()]
    )
    return dict(zip(layout, tensors, strict=True))


class Holder(torch.nn.Module):
    """Parameters under the names of a checkpoint; torch forbids such names for attributes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._held = {
            name: torch.nn.Parameter(tensor, requires_grad=False)
            for name, tensor in tensors.items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._held.items())
