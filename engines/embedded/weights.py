"""The model's parameters: by which names, checked, overwritten in place, and digested.

Always true: a push is checked whole, every name, shape and kind of dtype, before the first byte
of the model changes; parameters keep their storage for the life of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from engines.embedded.errors import Invalid
from engines.embedded.experts import checkpoint_tensors
from engines.embedded.fingerprint import dtype_name, fingerprints
from engines.embedded.memory import Memory
from engines.fingerprint import whole_fingerprint
from engines.protocol import MemoryTag

Spec = tuple[str, Sequence[int], torch.dtype]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a parameter's bytes lie in this process's memory, one after the other."""

    address: int
    dtype: torch.dtype
    shape: list[int]
    num_bytes: int


def place(model: torch.nn.Module, memory: Memory) -> None:
    """Move all parameters into the ``weights`` region, one at a time, so that no second copy of
    the model is ever whole.  Buffers (rotary caches) stay outside and survive a release."""
    parameters = list(model.parameters())
    layout = [(parameter.shape, parameter.dtype) for parameter in parameters]
    for parameter, home in zip(parameters, memory.allocate(MemoryTag.WEIGHTS, layout), strict=True):
        home.copy_(parameter.data)
        parameter.data = home
        parameter.requires_grad_(False)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(memory.device))


class Weights:
    """Parameters of one model under the names its checkpoint has for them."""

    def __init__(
        self,
        model: torch.nn.Module,
        adapter_fingerprints: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._adapter_fingerprints = adapter_fingerprints
        # A tied tensor is listed under its first name, the one save_pretrained keeps.
        kind = getattr(getattr(model, "config", None), "model_type", "")
        self._tensors = {
            name: tensor
            for its_name, parameter in model.named_parameters()
            for name, tensor in checkpoint_tensors(kind, its_name, parameter.data)
        }
        known = {name for name, _ in model.named_parameters()}
        self._tied = {
            name: parameter.data
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in known
        }
        self._snapshot: dict[str, torch.Tensor] = {}

    @cached_property
    def homes(self) -> Mapping[str, Home]:
        """Of all parameters that are in host memory and contiguous: there they stay."""
        return {
            name: Home(tensor.data_ptr(), tensor.dtype, list(tensor.shape), tensor.nbytes)
            for name, tensor in (*self._tied.items(), *self._tensors.items())
            if tensor.device.type == "cpu" and tensor.is_contiguous()
        }

    def manifest(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "is_tied": is_tied,
            }
            for tensors, is_tied in ((self._tensors, False), (self._tied, True))
            for name, tensor in tensors.items()
        ]

    def check(self, specs: Iterable[Spec]) -> None:
        """Refuse what could not be applied; dtypes may differ within floating point."""
        is_empty = True
        for name, shape, dtype in specs:
            is_empty = False
            mine = self._find(name)
            if mine is None:
                raise Invalid(f"unknown weight {name!r}; nothing was updated")
            if list(shape) != list(mine.shape):
                raise Invalid(
                    f"weight {name!r} has shape {list(shape)}, the model's has "
                    f"{list(mine.shape)}; nothing was updated"
                )
            if dtype != mine.dtype and not (dtype.is_floating_point and mine.is_floating_point()):
                raise Invalid(
                    f"weight {name!r} is {dtype_name(dtype)}, the model's is "
                    f"{dtype_name(mine.dtype)}; nothing was updated"
                )
        if is_empty:
            raise Invalid("the update holds no tensors")

    def apply(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Overwrite parameters in place; the caller has checked them."""
        for name, tensor in named:
            self.find(name).copy_(tensor)

    def own(self) -> Mapping[str, torch.Tensor]:
        """All parameters, each under one name."""
        return self._tensors

    def find(self, name: str) -> torch.Tensor:
        """The parameter of this name, which has been checked."""
        mine = self._find(name)
        assert mine is not None
        return mine

    def _find(self, name: str) -> torch.Tensor | None:
        tensor = self._tensors.get(name)
        return self._tied.get(name) if tensor is None else tensor

    def checksum(self) -> tuple[dict[str, str], str]:
        """The fingerprint of each tensor, adapters' included, and of them all together."""
        digests = fingerprints(self._tensors)
        digests |= self._adapter_fingerprints()
        return digests, whole_fingerprint(digests)

    @property
    def num_bytes(self) -> int:
        """What ``checksum`` reads: an adapter's fingerprints are taken when it is loaded."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def snapshot(self) -> None:
        """Keep a copy to ``compare`` with: a second copy of the weights, until the next one."""
        self._snapshot = {name: tensor.cpu().clone() for name, tensor in self._tensors.items()}

    def compare(self) -> str | None:
        """The first tensor that differs from the snapshot; None if none does."""
        if not self._snapshot:
            raise Invalid("no snapshot to compare with: use action snapshot first")
        for name, tensor in self._tensors.items():
            before = self._snapshot[name].view(-1).view(torch.uint8)
            if not torch.equal(before, tensor.cpu().reshape(-1).view(torch.uint8)):
                return name
        return None

    def reset(self) -> None:
        """Fill every parameter with noise, as a release without backup would."""
        for tensor in self._tensors.values():
            tensor.normal_()
