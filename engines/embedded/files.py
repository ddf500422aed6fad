"""Weights out of safetensors files (https://huggingface.co/docs/safetensors), into the model.

Always true: every header is checked before the first byte of the model changes.

The bytes are read straight into the parameters.  Mapping a file for one load would cost a page
fault for every few pages, more than the copy; those that come again and again stay (``mapped``).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch

from engines.embedded.errors import Invalid
from engines.embedded.mapped import Copy, MappedFiles
from engines.embedded.reading import read_copies
from engines.protocol import STAYS

if TYPE_CHECKING:
    from engines.embedded.weights import Weights

MAX_HEADER_BYTES = 100_000_000
# One keeps a core busy with copying out of the page cache.
_MOST_READERS = 4
_BATCH_BYTES = 16 << 20
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
    """One tensor in an open file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    descriptor: int
    offset: int
    num_bytes: int


def checkpoint_files(path: str) -> list[Path]:
    """The safetensors files of a checkpoint directory, or the one file."""
    place_on_disk = Path(path)
    if place_on_disk.is_file():
        return [place_on_disk]
    files = sorted(place_on_disk.glob("*.safetensors")) if place_on_disk.is_dir() else []
    if not files:
        raise Invalid(f"no safetensors at {path}")
    return files


def update_from_disk(weights: Weights, path: str, mapped: MappedFiles | None = None) -> None:
    """Overwrite the model from a checkpoint, or a part of one; headers are checked first.

    Args:
        mapped: where files are kept that stay; None reads them like any other.
    """
    has_begun = False
    try:
        with ExitStack() as stack:
            jobs: list[Callable[[], None]] = []
            for file in checkpoint_files(path):
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                jobs += _jobs(weights, file, descriptor, mapped)
            has_begun = True
            _do_all(jobs)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        state = "the weights are now a mixture" if has_begun else "nothing was updated"
        raise Invalid(f"cannot read {path}: {error}; {state}") from error


def _jobs(
    weights: Weights, file: Path, descriptor: int, mapped: MappedFiles | None
) -> list[Callable[[], None]]:
    """What there is to do for one file, which has been checked."""
    header = _read_header(descriptor)
    kept = mapped.find(file, descriptor) if mapped else None
    if kept is None or kept.header != header:
        pieces, stays = read_pieces(header, descriptor, os.fstat(descriptor).st_size)
        weights.check((one.name, one.shape, one.dtype) for one in pieces)
        copies, others = _places(weights, pieces)
        if mapped is None or not stays or others:
            jobs: list[Callable[[], None]] = [
                partial(read_copies, descriptor, batch) for batch in copies
            ]
            return jobs + [partial(_convert, weights, one) for one in others]
        kept = kept or mapped.keep(file, descriptor)
        kept.header, kept.copies = header, copies
    return [partial(kept.copy, batch) for batch in kept.copies]


def _read_header(descriptor: int) -> bytes:
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"header of {length} bytes")
    return os.pread(descriptor, length, 8)


def read_pieces(header: bytes, descriptor: int, num_bytes: int) -> tuple[list[Piece], bool]:
    """What is in a file of this length, and whether the file stays.

    Raises:
        ValueError, KeyError, TypeError: the header is none.
    """
    entries: dict[str, Any] = orjson.loads(header)
    start = 8 + len(header)
    room = num_bytes - start
    stays = STAYS in entries.pop("__metadata__", {})
    pieces = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= room:
            raise ValueError(f"{name} ends at byte {end} of {room}")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} is {entry['dtype']}, which is not read here")
        shape = tuple(entry["shape"])
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise ValueError(f"{name} of shape {list(shape)} has {end - begin} bytes")
        pieces.append(Piece(name, dtype, shape, descriptor, start + begin, end - begin))
    return pieces, stays


def _places(weights: Weights, pieces: Sequence[Piece]) -> tuple[list[list[Copy]], list[Piece]]:
    """Where the bytes of a file go, in batches; and what cannot simply be copied there."""
    batches: list[list[Copy]] = [[]]
    others: list[Piece] = []
    size = 0
    for piece in pieces:
        mine = weights.find(piece.name)
        if mine.dtype != piece.dtype or mine.device.type != "cpu" or not mine.is_contiguous():
            others.append(piece)
            continue
        if size >= _BATCH_BYTES:  # experts' tensors are many and small
            batches.append([])
            size = 0
        if piece.num_bytes:
            batches[-1].append((mine.data_ptr(), piece.offset, piece.num_bytes))
            size += piece.num_bytes
    return batches, others


def _do_all(jobs: Sequence[Callable[[], None]]) -> None:
    num_readers = min(_MOST_READERS, len(jobs), len(os.sched_getaffinity(0)))
    if num_readers < 2:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(num_readers, "read-weights") as readers:
        # Each takes the next when it is done with one, so that they end together.
        for _ in readers.map(lambda job: job(), jobs):
            pass


def _convert(weights: Weights, piece: Piece) -> None:
    loaded = torch.empty(piece.shape, dtype=piece.dtype)
    read_copies(piece.descriptor, [(loaded.data_ptr(), piece.offset, piece.num_bytes)])
    weights.find(piece.name).copy_(loaded)
