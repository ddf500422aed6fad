"""The model's parameters: named as in the checkpoint, checked, overwritten in place, digested.

Always true: a push is checked whole, every name, shape and kind of dtype, before the first byte
of the model changes; parameters keep their storage for the life of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from engines.embedded.core.errors import Invalid
from engines.embedded.memory.regions import Memory
from engines.protocol import MemoryTag
from engines.tensors.fingerprint import BYTES, SUMS, whole_fingerprint
from engines.tensors.payload.encodings import decoded, is_encoded, why_not_for
from engines.tensors.stacked_experts import first_expert_of, split_experts
from engines.tensors.torch_fingerprint import (
    device_fingerprints,
    dtype_name,
    fingerprints,
)

Spec = tuple[str, Sequence[int], torch.dtype]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a parameter's contiguous bytes are in this process's memory."""

    address: int
    dtype: torch.dtype
    shape: list[int]
    num_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Location:
        return cls(tensor.data_ptr(), tensor.dtype, list(tensor.shape), tensor.nbytes)


def place(model: torch.nn.Module, memory: Memory) -> None:
    """Move all parameters into the ``weights`` region; one on ``meta`` has no value to move.
    Buffers (of position embeddings) stay outside and survive a release."""
    parameters = list(model.parameters())
    layout = [(parameter.shape, parameter.dtype) for parameter in parameters]
    placed: dict[int, torch.nn.Parameter] = {}
    for parameter, home in zip(parameters, memory.allocate(MemoryTag.WEIGHTS, layout), strict=True):
        if not parameter.is_meta:
            home.copy_(parameter.data)
        placed[id(parameter)] = torch.nn.Parameter(home, requires_grad=False)
    for module in model.modules():
        for name, held in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, placed[id(held)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(memory.device))


class ModelWeights:
    """Parameters of one model under the names its checkpoint has for them.

    Args:
        is_on_gpu: whether fingerprints are made where the parameters are: to copy them to the
            host takes longer than a push.

    Attributes:
        version: returns the weight version of these weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        adapter_fingerprints: Callable[[], dict[str, str]] = dict,
        *,
        is_on_gpu: bool = False,
    ) -> None:
        self.version: Callable[[], str] = str
        self._is_on_gpu = is_on_gpu
        self._adapter_fingerprints = adapter_fingerprints
        # A tied tensor is listed under its first name, the one save_pretrained keeps.
        self._tensors = {
            name: tensor
            for its_name, parameter in model.named_parameters()
            for name, tensor in checkpoint_tensors(its_name, parameter.data)
        }
        known = {name for name, _ in model.named_parameters()}
        self._tied = {
            name: parameter.data
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name not in known
        }
        self._by_name = self._tied | self._tensors
        self._snapshot: dict[str, torch.Tensor] = {}

    @cached_property
    def locations(self) -> Mapping[str, Location]:
        """Where the parameters are that lie contiguous in host memory; they never move."""
        return {
            name: Location.of(tensor)
            for name, tensor in self._by_name.items()
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
        """Refuse what could not be applied; dtypes may differ within floating point.

        Encoded tensors are checked by ``changes``, which reads them.
        """
        is_empty = True
        for name, shape, dtype in specs:
            is_empty = False
            if is_encoded(name):
                continue
            mine = self._by_name.get(name)
            if mine is None:
                raise Invalid(f"unknown weight {name!r}; nothing was updated")
            problem = None
            if list(shape) != list(mine.shape):
                problem = f"has shape {list(shape)}, the model's has {list(mine.shape)}"
            elif dtype != mine.dtype and not (dtype.is_floating_point and mine.is_floating_point()):
                problem = f"is {dtype_name(dtype)}, the model's is {dtype_name(mine.dtype)}"
            if problem:
                raise Invalid(f"weight {name!r} {problem}; nothing was updated")
        if is_empty:
            raise Invalid("the update holds no tensors")

    def check_whole(self, names: Iterable[str]) -> None:
        """Check that every parameter is among these; one of a tied pair is enough."""
        given = {self._by_name[name].data_ptr() for name in names if name in self._by_name}
        for name, tensor in self._tensors.items():
            if tensor.data_ptr() not in given:
                raise Invalid(f"there is no {name!r}; nothing was updated")

    def changes(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[Callable[[], object]]:
        """What overwrites parameters with these tensors, which have been checked.

        Raises:
            Invalid: an encoded one is damaged, or not for these weights.
        """
        whole = [(name, tensor) for name, tensor in named if not is_encoded(name)]
        try:
            others = [decoded(name, tensor) for name, tensor in named if is_encoded(name)]
        except ValueError as error:
            raise Invalid(f"{error}; nothing was updated") from None
        if others:
            self.check((read.name, read.shape, getattr(torch, read.dtype)) for read in others)
        for read in others:
            if why := why_not_for(read, self.find(read.name), self.version()):
                raise Invalid(f"{why}; nothing was updated: push whole tensors")
        changes: list[Callable[[], object]] = []
        if whole:
            targets = [self.find(name) for name, _ in whole]
            sources = [tensor for _, tensor in whole]
            changes.append(partial(torch._foreach_copy_, targets, sources))
        return changes + [partial(read.apply, self.find(read.name)) for read in others]

    def find(self, name: str) -> torch.Tensor:
        """The parameter of this name, which has been checked."""
        return self._by_name[name]

    def checksum(self) -> tuple[dict[str, str], str]:
        """The fingerprint of each tensor, adapters' included, and of the model's together."""
        if self._is_on_gpu:
            digests = device_fingerprints(self._tensors.items())
        else:
            digests = fingerprints(self._tensors)
        return digests | self._adapter_fingerprints(), whole_fingerprint(digests)

    @property
    def fingerprint_method(self) -> str:
        """How ``checksum`` makes fingerprints."""
        return SUMS if self._is_on_gpu else BYTES

    @property
    def num_bytes(self) -> int:
        """What ``checksum`` reads: an adapter's fingerprints are taken when it is loaded."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def snapshot(self) -> None:
        """Keep a copy to ``compare`` with: a second copy of the weights, until the next one."""
        self._snapshot = {name: tensor.cpu().clone() for name, tensor in self._tensors.items()}

    def compare(self) -> list[str]:
        """The tensors that differ from the snapshot, which is dropped if none does."""
        if not self._snapshot:
            raise Invalid("no snapshot to compare with: use action snapshot first")
        different = []
        for name, tensor in self._tensors.items():
            before = self._snapshot[name].view(-1).view(torch.uint8)
            if not torch.equal(before, tensor.cpu().reshape(-1).view(torch.uint8)):
                different.append(name)
        if not different:
            self._snapshot = {}
        return different

    def reset(self) -> None:
        """Fill every parameter with noise, as a release without backup would."""
        for tensor in self._tensors.values():
            tensor.normal_()


def checkpoint_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter as its checkpoint has it: by itself, or one tensor for each expert and part."""
    if first_expert_of(name) and tensor.dim() == 3:
        yield from split_experts(name, tensor)
    else:
        yield name, tensor
