"""The GPU of this rank, and host memory that it copies to at full speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from rollout.core.errors import WeightMismatch
from rollout.weights.format.named import named_pairs

logger = logging.getLogger(__name__)

# For all devices of the process, not only for the current one.
_PORTABLE = 1


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


def pinned(address: int, num_bytes: int) -> Callable[[], object]:
    """Pin host memory for copies from the GPU; returns what undoes it, before it is unmapped.

    Copies to memory that is not pinned go through a buffer of the driver, at a half to a third of
    the speed.  If the process does not use CUDA, or CUDA refuses, nothing is pinned.
    """
    if not torch.cuda.is_initialized():
        return _nothing
    runtime: Any = torch.cuda.cudart()
    if error := int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)):
        logger.warning(
            "CUDA cannot pin %d bytes of shared memory (cudaHostRegister: error %d), so copies "
            "from the GPU are slower",
            num_bytes,
            error,
        )
        # The next kernel would report the error once more.
        with suppress(Exception):
            torch.ones(1, device="cuda")
        return _nothing
    return partial(runtime.cudaHostUnregister, address)


def _nothing() -> None:
    """Nothing was pinned."""
