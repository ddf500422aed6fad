"""Weights out of safetensors files (https://huggingface.co/docs/safetensors), into the model.

Always true: every header is checked before the first byte of the model changes.

The bytes are read straight into the parameters.  Mapping the files instead would cost a page
fault for every few pages, more than the copy, and a mapping that is kept would keep the memory of
files that a trainer has removed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engines.embedded.errors import Invalid
from engines.embedded.fingerprint import as_bytes

if TYPE_CHECKING:
    from engines.embedded.weights import Weights

_MAX_HEADER_BYTES = 100_000_000
# Two reads at a time: one keeps a core busy with copying out of the page cache.
_NUM_READERS = 2
_BATCH_BYTES = 16 << 20
_DTYPES = {
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
class _Piece:
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


def update_from_disk(weights: Weights, path: str) -> None:
    """Overwrite the model from a checkpoint, or a part of one; headers are checked first."""
    has_begun = False
    try:
        with ExitStack() as stack:
            pieces: list[_Piece] = []
            for file in checkpoint_files(path):
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                pieces += _read_header(descriptor)
            weights.check((one.name, one.shape, one.dtype) for one in pieces)
            has_begun = True
            _read_all(weights, pieces)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        state = "the weights are now a mixture" if has_begun else "nothing was updated"
        raise Invalid(f"cannot read {path}: {error}; {state}") from error


def _read_header(descriptor: int) -> list[_Piece]:
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"header of {length} bytes")
    header = json.loads(os.pread(descriptor, length, 8))
    size = os.fstat(descriptor).st_size
    pieces = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{name} ends at byte {end} of {size - 8 - length}")
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} is {entry['dtype']}, which is not read here")
        shape = tuple(entry["shape"])
        if torch.Size(shape).numel() * dtype.itemsize != end - begin:
            raise ValueError(f"{name} of shape {list(shape)} has {end - begin} bytes")
        pieces.append(_Piece(name, dtype, shape, descriptor, 8 + length + begin, end - begin))
    return pieces


def _read_all(weights: Weights, pieces: Sequence[_Piece]) -> None:
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        # Each takes the next when it is done with one, so that they end together.
        for _ in readers.map(lambda batch: _read_batch(weights, batch), _batches(pieces)):
            pass


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Some megabytes each: experts' tensors are many and small."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.num_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_batch(weights: Weights, batch: Sequence[_Piece]) -> None:
    for piece in batch:
        _read(weights, piece)


def _read(weights: Weights, piece: _Piece) -> None:
    mine = weights.find(piece.name)
    if mine.dtype == piece.dtype and mine.device.type == "cpu" and mine.is_contiguous():
        _fill(mine, piece)
    else:
        loaded = torch.empty(piece.shape, dtype=piece.dtype)
        _fill(loaded, piece)
        mine.copy_(loaded)


def _fill(tensor: torch.Tensor, piece: _Piece) -> None:
    array: Any = as_bytes(tensor).numpy()
    view = memoryview(array)
    done = 0
    while done < piece.num_bytes:
        count = os.preadv(piece.descriptor, [view[done:]], piece.offset + done)
        if not count:
            raise OSError(f"{piece.name} ends after {done} of {piece.num_bytes} bytes")
        done += count
