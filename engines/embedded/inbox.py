"""What a broadcast is received into, and its way from there to the parameters.

Always true: a bucket that does not fit the model is refused before its group takes part in the
broadcast; it changes the model only when all of it is there.

A model of experts has ten thousands of small tensors: they are copied by address, and where they go
is worked out once, for a trainer pushes the same buckets again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from engines import flat
from engines.embedded.arena import aligned
from engines.embedded.buffers import Buffers, finished
from engines.embedded.copies import Copy, copy_all, joined
from engines.embedded.errors import Invalid
from engines.embedded.weights import Weights

# Some hundred bytes each.
_MOST_KEPT_TENSORS = 1 << 16


@dataclass(frozen=True, slots=True)
class Content:
    """What a request says that its bucket holds."""

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
class Plan:
    """Where the bytes of one bucket go.

    Attributes:
        pieces: its tensors, where they are received.
        copies: out of the buffer into the parameters.
        others: what cannot simply be copied: on a device, or of another dtype.
    """

    content: Content
    pieces: Sequence[_Piece]
    num_bytes: int
    copies: Sequence[Copy]
    others: Sequence[_Piece]


class Inbox:
    """Buckets on their way into one model."""

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self._weights = weights
        self._buffers = Buffers(device)
        self._plans: dict[tuple[str, int, bool], Plan] = {}

    def plan(self, content: Content) -> Plan:
        """Where such a bucket goes.

        Raises:
            Invalid: it does not fit the model.
        """
        key = content.names[0] if content.names else "", len(content.names), content.is_flat
        known = self._plans.get(key)
        if known is not None and known.content == content:
            return known
        plan = self._planned(content)
        if sum(size for _, size, _ in self._plans) + len(content.names) > _MOST_KEPT_TENSORS:
            self._plans.clear()  # of pushes that come no more
        self._plans[key] = plan
        return plan

    def take(self, plan: Plan) -> torch.Tensor:
        """Memory for this bucket, until it is delivered."""
        return self._buffers.take(plan.num_bytes)

    def parts(self, plan: Plan, buffer: torch.Tensor) -> list[torch.Tensor]:
        """What is broadcast, one after the other."""
        if plan.content.is_flat:
            return [buffer[: plan.num_bytes]]
        return [one.of(buffer) for one in plan.pieces]

    def deliver(self, plan: Plan, buffer: torch.Tensor) -> None:
        """Overwrite the parameters; the memory may be taken again."""
        copy_all(buffer.data_ptr(), plan.copies)
        if plan.others:
            targets = [self._weights.find(one.name) for one in plan.others]
            torch._foreach_copy_(targets, [one.of(buffer) for one in plan.others])
            finished(buffer.device)
        self._buffers.give(buffer)

    def rest(self) -> None:
        """Nothing more comes for now: hold no memory."""
        self._buffers.drop()

    @property
    def num_bytes(self) -> int:
        """That it holds for the next bucket."""
        return self._buffers.num_bytes

    def _planned(self, content: Content) -> Plan:
        try:
            pieces = _pieces(content)
        except (ValueError, TypeError, AttributeError) as error:
            raise Invalid(f"{error}; nothing was updated") from error
        self._weights.check((one.name, one.shape, one.dtype) for one in pieces)
        copies: list[Copy] = []
        others = []
        for piece in pieces:
            home = self._weights.homes.get(piece.name)
            if home is None or home.dtype != piece.dtype:
                others.append(piece)
            else:
                copies.append((home.address, piece.begin, home.num_bytes))
        return Plan(content, pieces, pieces[-1].end, joined(copies), others)


def content_of(raw: Mapping[str, Any]) -> Content:
    """The bucket of a request.

    Raises:
        Invalid: the request does not say.
    """
    if not all(isinstance(raw.get(key), list) for key in ("names", "dtypes", "shapes")):
        raise Invalid("names, dtypes and shapes must be given, as lists")
    if not all(isinstance(name, str) for name in raw["names"]):
        raise Invalid("names must be texts")
    return Content(
        raw["names"], raw["dtypes"], raw["shapes"], raw.get("load_format") == flat.FLATTENED_BUCKET
    )


def _pieces(content: Content) -> list[_Piece]:
    dtypes = [str(one).removeprefix("torch.") for one in content.dtypes]
    kinds = [_dtype(one) for one in dtypes]
    shapes = [tuple(int(size) for size in shape) for shape in content.shapes]
    if content.is_flat:
        places = flat.lay_out(content.names, dtypes, shapes)
    else:
        places = _apart(kinds, shapes)
    rows = zip(content.names, kinds, shapes, places, strict=True)
    return [_Piece(name, kind, shape, *place) for name, kind, shape, place in rows]


def _apart(
    dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, int]]:
    """Each tensor is broadcast by itself, so it may lie where it likes."""
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
