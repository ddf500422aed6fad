"""Calls of torch that only make sense with CUDA, where there is none: they do nothing.

Needed by LoRA (pinned host memory), by the weights checker's ``compare`` (``Tensor.cuda``) and by
routed-expert capture (``cudaHostRegister``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_FACTORIES = ("arange", "empty", "empty_strided", "full", "ones", "tensor", "zeros")


def replace() -> None:
    """Replace them, unless there is a CUDA device after all."""
    import torch

    if torch.cuda.is_available():
        return
    module: Any = torch
    module.Tensor.cuda = _itself
    module.Tensor.pin_memory = _itself
    module.cuda.cudart = _NoRuntime
    for name in _FACTORIES:
        setattr(module, name, _unpinned(getattr(module, name)))


def _itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return made


class _NoRuntime:
    """``torch.cuda.cudart()`` where nothing has to be registered."""

    def cudaHostRegister(self, *args: Any) -> int:
        return 0

    def cudaHostUnregister(self, *args: Any) -> int:
        return 0
