"""The GPU of this rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rollout.core.errors import WeightMismatch
from rollout.weights.format.named import named_pairs


def gpu_with(named_tensors: Any) -> str:
    """UUID of this rank's GPU; empty if its tensors are in host memory.

    An iterator's tensors are not known yet: they are copied to the GPU if they are not there.
    """
    if not torch.cuda.is_initialized():
        return ""
    if not isinstance(named_tensors, Iterator):
        try:
            _, first = next(named_pairs(named_tensors))
        except (StopIteration, WeightMismatch):  # the plan reports what is wrong
            return ""
        if getattr(first, "device", torch.device("cpu")).type != "cuda":
            return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
