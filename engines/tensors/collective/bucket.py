"""A bucket that a trainer broadcasts, as its request describes it, and its tensors in a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from engines.tensors import flattened_bucket


class BroadcastRefused(ValueError):
    """The request is wrong, or its broadcast failed: nothing was updated."""


@dataclass(frozen=True, slots=True)
class BucketContent:
    """The tensors of a bucket, as its request describes them."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.begin : self.end].view(self.dtype).view(self.shape)


def content_of(raw: Mapping[str, Any]) -> BucketContent:
    """The bucket of a request.

    Raises:
        BroadcastRefused: the request does not describe its tensors.
    """
    if not all(isinstance(raw.get(key), list) for key in ("names", "dtypes", "shapes")):
        raise BroadcastRefused("names, dtypes and shapes must be given, as lists")
    if not all(isinstance(name, str) for name in raw["names"]):
        raise BroadcastRefused("names must be texts")
    return BucketContent(
        raw["names"],
        raw["dtypes"],
        raw["shapes"],
        raw.get("load_format") == flattened_bucket.FLATTENED_BUCKET,
    )


def pieces_of(content: BucketContent) -> list[Piece]:
    """Where each tensor lies in the buffer; the last one ends where the buffer does.

    Raises:
        BroadcastRefused: no trainer sends such a bucket.
    """
    try:
        return _pieces(content)
    except (ValueError, TypeError, AttributeError) as error:
        raise BroadcastRefused(f"{error}; nothing was updated") from error


def parts_of(pieces: Sequence[Piece], buffer: torch.Tensor, *, is_flat: bool) -> list[torch.Tensor]:
    """The tensors that are broadcast, in order: one of bytes if ``is_flat``, else each piece."""
    if is_flat:
        return [buffer[: pieces[-1].end]]
    return [piece.of(buffer) for piece in pieces]


def _pieces(content: BucketContent) -> list[Piece]:
    dtypes = [str(name).removeprefix("torch.") for name in content.dtypes]
    kinds = [_dtype(name) for name in dtypes]
    shapes = [tuple(int(size) for size in shape) for shape in content.shapes]
    if content.is_flat:
        places = flattened_bucket.lay_out(content.names, dtypes, shapes)
    else:
        places = _apart(kinds, shapes)
    if len(set(content.names)) < len(content.names):
        raise ValueError("two tensors have the same name")
    rows = zip(content.names, kinds, shapes, places, strict=True)
    return [Piece(name, kind, shape, *place) for name, kind, shape, place in rows]


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
        begin = flattened_bucket.aligned(end)
    return places


@lru_cache(maxsize=64)
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
