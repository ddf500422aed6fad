"""Many small tensors gathered into one, which is broadcast in their place.

Always true: a bucket lies where the one before did, so it is sent before the next is gathered.

A broadcast over gloo costs both sides 0.14 ms together, however little it brings.  Measured on two
cores, in CPU time of both sides: tensors of 128 KiB one by one cost 2.4 times as much as together,
those of 1 MiB 1.1 times; of 4 MiB both cost the same, and what is larger is dearer to copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engines import flat
from engines.embedded.buffers import Buffers, host_memory
from engines.embedded.fingerprint import as_bytes
from rollout.weights.layout import FileLayout, KeptByModel
from rollout.weights.manifest import TensorSpec
from rollout.weights.tensors.copying import copy_tensors
from rollout.weights.tensors.sources import Pairs
from rollout.weights.tensors.writing import fingerprints_of

_MOST_MEAN_BYTES = 4 << 20
# So much at once in the host's memory: more takes longer to get from the kernel, and is no faster.
_MOST_HOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Gathered:
    """One bucket.

    Attributes:
        said: ``names``, ``dtypes`` and ``shapes`` of its tensors, in the order in which their
            bytes follow one another.
        tensor: those bytes.
    """

    said: Mapping[str, Any]
    tensor: torch.Tensor
    fingerprints: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Order:
    """How the tensors of one bucket lie."""

    indices: Sequence[int]
    specs: Sequence[TensorSpec]
    layout: FileLayout
    said: Mapping[str, Any]


def is_worth_gathering(pairs: Pairs) -> bool:
    """Whether these are cheaper to send as one."""
    num_bytes = sum(tensor.nbytes for tensor in pairs.tensors)
    return len(pairs) > 1 and num_bytes < _MOST_MEAN_BYTES * len(pairs)


def split(pairs: Pairs, device: torch.device, most_bytes: int = _MOST_HOST_BYTES) -> list[Pairs]:
    """Parts of a bucket, each as much as is gathered at once on this device."""
    if device.type != "cpu":
        return [pairs]
    parts: list[Pairs] = []
    first = size = 0
    for index, tensor in enumerate(pairs.tensors):
        if size and size + tensor.nbytes > most_bytes:
            parts.append(pairs[first:index])
            first, size = index, 0
        size += tensor.nbytes
    return [*parts, pairs[first:]]


class Orders(KeptByModel[_Order]):
    """How buckets lie, known from the pushes before."""

    def __init__(self) -> None:
        super().__init__(_ordered)


class Gatherer:
    """The buckets of one push as flat tensors, in memory that is used again."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._host: mmap.mmap | None = None
        self._on_device: dict[torch.device, Buffers] = {}

    def gather(self, pairs: Pairs, device: torch.device, *, fingerprint: bool) -> Gathered:
        """These tensors, wherever they are, as one on ``device``."""
        order = self._orders.of(pairs.specs)
        tensors = [pairs.tensors[index] for index in order.indices]
        size = order.layout.num_bytes
        if device.type == "cpu":
            view = self._host_of(size)
            found = copy_tensors(view, order.layout, order.specs, tensors, fingerprint=fingerprint)
            return Gathered(order.said, torch.frombuffer(view, dtype=torch.uint8)[:size], found)
        tensor = self._joined(tensors, size, device)
        return Gathered(order.said, tensor, fingerprints_of(pairs) if fingerprint else {})

    def rest(self) -> None:
        """Nothing more is sent for now: hold no memory."""
        self._host = None
        self._on_device.clear()

    def _joined(
        self, tensors: Sequence[torch.Tensor], size: int, device: torch.device
    ) -> torch.Tensor:
        """On a device: what is gathered next there waits for what is sent now, as all this thread
        asks of it goes one after the other."""
        buffers = self._on_device.setdefault(device, Buffers(device))
        memory = buffers.take(size)
        torch.cat([as_bytes(one).to(device) for one in tensors], out=memory[:size])
        buffers.give(memory)
        return memory[:size]

    def _host_of(self, num_bytes: int) -> mmap.mmap:
        if self._host is None or len(self._host) < num_bytes:
            self._host = None  # freed before as much again is taken
            self._host = host_memory(num_bytes)
        return self._host


def _ordered(given: Sequence[TensorSpec]) -> _Order:
    indices = flat.wide_first([one.dtype for one in given])
    specs = [given[index] for index in indices]
    said = say(specs)
    places = flat.lay_out(said["names"], said["dtypes"], said["shapes"])
    ranges = {one.name: place for one, place in zip(specs, places, strict=True)}
    return _Order(indices, specs, FileLayout.of(specs, ranges), said)


def say(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """What an engine is told of these tensors."""
    return {
        "names": [one.name for one in specs],
        "dtypes": [one.dtype for one in specs],
        "shapes": [list(one.shape) for one in specs],
    }
