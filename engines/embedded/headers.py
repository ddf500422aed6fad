"""What a safetensors file says is in it (https://huggingface.co/docs/safetensors).

Always true: what is told of a file lies within the file and has the length its shape makes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from engines.protocol import STAYS

_MOST_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a file; ``offset`` counts from the file's beginning."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(read: Callable[[int, int], bytes]) -> bytes:
    """The header, without its length.

    Args:
        read: gives so many bytes from so far into the file.

    Raises:
        ValueError, struct.error: there is none.
    """
    (length,) = struct.unpack("<Q", read(8, 0))
    if length > _MOST_BYTES:
        raise ValueError(f"header of {length} bytes")
    return read(length, 8)


class Contents:
    """The tensors of one file.

    Args:
        header: without its length.
        num_bytes: of the file.

    Attributes:
        entries: name -> ``dtype``, ``shape`` and ``data_offsets``, as they stand in the header.
        start: where those offsets count from.
        room: bytes behind that.
        stays: the file's writer promises that it keeps its length.

    Raises:
        ValueError: the header is none.
    """

    def __init__(self, header: bytes, num_bytes: int) -> None:
        self.entries: dict[str, Any] = orjson.loads(header)
        self.start = 8 + len(header)
        self.room = num_bytes - self.start
        self.stays = STAYS in self.entries.pop("__metadata__", {})

    def pieces(self) -> Iterator[Piece]:
        """All tensors.

        Raises:
            ValueError, KeyError, TypeError: one cannot be read.
        """
        return map(self.piece, self.entries)

    def piece(self, name: str) -> Piece:
        """One tensor.

        Raises:
            ValueError, KeyError, TypeError: it cannot be read.
        """
        entry = self.entries[name]
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= self.room:
            raise ValueError(f"{name} ends at byte {end} of {self.room}")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} is {entry['dtype']}, which is not read here")
        shape = tuple(entry["shape"])
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{name} of shape {list(shape)} has {end - begin} bytes")
        return Piece(name, dtype, shape, self.start + begin, end - begin)
