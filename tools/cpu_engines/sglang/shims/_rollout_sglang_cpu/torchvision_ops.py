"""The operators torchvision looks for at import, declared without a kernel.

SGLang serves text here; what would call them fails by name.
"""

from __future__ import annotations

_SIGNATURE = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"


def declare() -> None:
    """Declare them, unless a torchvision that fits this torch has."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
