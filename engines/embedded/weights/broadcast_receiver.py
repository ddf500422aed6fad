"""Receive broadcast buckets and copy them into the parameters.

Always true: a bucket that does not fit the model is refused before its group takes part in the
broadcast; it changes the model only after all of it was received.

A model of experts has ten thousands of small tensors: they are copied by address, and the plan
is made once, since a trainer pushes the same buckets again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from engines.embedded.core.errors import Invalid
from engines.embedded.memory.batched_copy import Copy, copy_all, joined
from engines.embedded.memory.bucket_buffers import BucketBuffers, finished
from engines.embedded.memory.releasable_memory import aligned
from engines.embedded.weights.model_weights import ModelWeights
from engines.tensors import flattened_bucket

# Some hundred bytes each.
_MOST_KEPT_TENSORS = 1 << 16


@dataclass(frozen=True, slots=True)
class BucketContent:
    """The tensors of a bucket, as its request describes them."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class ReceivePlan:
    """Where the bytes of one bucket go.

    Attributes:
        pieces: its tensors, where they are received.
        copies: out of the buffer into the parameters.
        others: pieces that need a conversion: on a device, or of another dtype.
    """

    content: BucketContent
    pieces: Sequence[_Piece]
    num_bytes: int
    copies: Sequence[Copy]
    others: Sequence[_Piece]


class BroadcastReceiver:
    """Receives buckets for one model."""

    def __init__(self, weights: ModelWeights, device: torch.device) -> None:
        self._weights = weights
        self._buffers = BucketBuffers(device)
        self._plans: dict[tuple[str, int, bool], ReceivePlan] = {}

    def plan(self, content: BucketContent) -> ReceivePlan:
        """The plan for such a bucket.

        Raises:
            Invalid: it does not fit the model.
        """
        key = content.names[0] if content.names else "", len(content.names), content.is_flat
        known = self._plans.get(key)
        if known is not None and known.content == content:
            return known
        plan = self._planned(content)
        if sum(size for _, size, _ in self._plans) + len(content.names) > _MOST_KEPT_TENSORS:
            self._plans.clear()  # those of earlier pushes
        self._plans[key] = plan
        return plan

    def take(self, plan: ReceivePlan) -> torch.Tensor:
        """Memory for this bucket, until it is delivered."""
        return self._buffers.take(plan.num_bytes)

    def parts(self, plan: ReceivePlan, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that are broadcast, in order."""
        if plan.content.is_flat:
            return [buffer[: plan.num_bytes]]
        return [piece.of(buffer) for piece in plan.pieces]

    def deliver(self, plan: ReceivePlan, buffer: torch.Tensor) -> None:
        """Overwrite the parameters; the memory may be taken again."""
        copy_all(buffer.data_ptr(), plan.copies)
        if plan.others:
            targets = [self._weights.find(piece.name) for piece in plan.others]
            torch._foreach_copy_(targets, [piece.of(buffer) for piece in plan.others])
            finished(buffer.device)
        self._buffers.give(buffer)

    def free(self) -> None:
        """Free the memory: the push has ended."""
        self._buffers.drop()

    @property
    def num_bytes(self) -> int:
        """Memory kept for the next bucket."""
        return self._buffers.num_bytes

    def _planned(self, content: BucketContent) -> ReceivePlan:
        try:
            pieces = _pieces(content)
        except (ValueError, TypeError, AttributeError) as error:
            raise Invalid(f"{error}; nothing was updated") from error
        self._weights.check((piece.name, piece.shape, piece.dtype) for piece in pieces)
        copies: list[Copy] = []
        others = []
        for piece in pieces:
            location = self._weights.locations.get(piece.name)
            if location is None or location.dtype != piece.dtype:
                others.append(piece)
            else:
                copies.append((location.address, piece.begin, location.num_bytes))
        return ReceivePlan(content, pieces, pieces[-1].end, joined(copies), others)


def content_of(raw: Mapping[str, Any]) -> BucketContent:
    """The bucket of a request.

    Raises:
        Invalid: the request does not describe its tensors.
    """
    if not all(isinstance(raw.get(key), list) for key in ("names", "dtypes", "shapes")):
        raise Invalid("names, dtypes and shapes must be given, as lists")
    if not all(isinstance(name, str) for name in raw["names"]):
        raise Invalid("names must be texts")
    return BucketContent(
        raw["names"],
        raw["dtypes"],
        raw["shapes"],
        raw.get("load_format") == flattened_bucket.FLATTENED_BUCKET,
    )


def _pieces(content: BucketContent) -> list[_Piece]:
    dtypes = [str(name).removeprefix("torch.") for name in content.dtypes]
    kinds = [_dtype(name) for name in dtypes]
    shapes = [tuple(int(size) for size in shape) for shape in content.shapes]
    if content.is_flat:
        places = flattened_bucket.lay_out(content.names, dtypes, shapes)
    else:
        places = _apart(kinds, shapes)
    rows = zip(content.names, kinds, shapes, places, strict=True)
    return [_Piece(name, kind, shape, *place) for name, kind, shape, place in rows]


def _apart(
    dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, int]]:
    """Positions of tensors that are broadcast one by one, aligned."""
    if len(dtypes) != len(shapes):
        raise ValueError("names, dtypes and shapes differ in length")
    if not dtypes:
        raise ValueError("the update holds no tensors")
    places, begin = [], 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        end = begin + prod(shape) * dtype.itemsize
        places.append((begin, end))
        begin = aligned(end)
    return places


@lru_cache(maxsize=64)
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
