"""The memory of an engine without a model: what the embedded engine's code loads weights into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Holder(torch.nn.Module):
    """Parameters under the names of a checkpoint, which torch lets no module's attribute bear."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._held = {
            name: torch.nn.Parameter(tensor, requires_grad=False)
            for name, tensor in tensors.items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._held.items())
