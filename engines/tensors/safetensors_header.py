"""The header of a safetensors file: written, read and checked.

Format: https://huggingface.co/docs/safetensors/index#format

Always true: every tensor that ``Header.placed`` returns lies within the file, has as many bytes as
its shape and dtype make, and overlaps no other.  An error names the file and the tensor.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from engines.tensors.dtypes import NAMES_OF_WORDS, SAFETENSORS_WORDS, element_bytes

_LENGTH = struct.Struct("<Q")
# As in the safetensors library.
_MOST_HEADER_BYTES = 100_000_000
# Of torch.
_MOST_DIMENSIONS = 64
_KNOWN_WORDS = ", ".join(NAMES_OF_WORDS)
_OFFSET = attrgetter("offset")
_METADATA = "__metadata__"


class SafetensorsError(ValueError):
    """A file is not in safetensors format, or is damaged; the text names the file."""


class PlacedTensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: torch's name, for example ``bfloat16``.
        offset: place of its first byte, from the beginning of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of one file contains.

    Attributes:
        file: its name, for errors.
        text: the header without its length.
        metadata: the file's own.
        entries: name -> ``dtype``, ``shape`` and ``data_offsets``, as they are in the header.
    """

    file: str | Path
    text: bytes
    metadata: Mapping[str, str]
    entries: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Size of the header and its length field; the tensors begin here."""
        return _LENGTH.size + len(self.text)

    def specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor.  The dtype is torch's name, or the file's own word
        where it has no such name here.

        Raises:
            SafetensorsError: an entry lacks them.
        """
        return [(name, *self._kind(name, entry)[:2]) for name, entry in self.entries.items()]

    def placed(self, file_bytes: int) -> list[PlacedTensor]:
        """All tensors, in the order of the header.

        Args:
            file_bytes: length of the whole file.

        Raises:
            SafetensorsError: a tensor ends behind the file, overlaps another, has another length
                than its shape and dtype make, or has an unknown dtype.
        """
        start = self.num_bytes
        room = file_bytes - start
        placed = []
        for name, entry in self.entries.items():
            dtype, shape, num_bytes = self._kind(name, entry)
            begin, end = self._range(name, entry)
            if not 0 <= begin <= end <= room:
                reason = f"ends at byte {end} and begins at byte {begin}"
                raise self._error(name, f"{reason}; the file has {room} bytes of data")
            if num_bytes is None:
                raise self._error(name, f"has an unknown dtype {dtype!r}; known: {_KNOWN_WORDS}")
            if num_bytes != end - begin:
                reason = f"{dtype} of shape {list(shape)} makes {num_bytes}"
                raise self._error(name, f"has {end - begin} bytes, {reason}")
            placed.append(PlacedTensor(name, dtype, shape, start + begin, num_bytes))
        self._check_overlaps(placed)
        return placed

    def _check_overlaps(self, placed: Iterable[PlacedTensor]) -> None:
        end, before = 0, ""
        for name, _, _, offset, num_bytes in sorted(placed, key=_OFFSET):
            if num_bytes:
                if offset < end:
                    raise self._error(name, f"overlaps {before!r}")
                end, before = offset + num_bytes, name

    def _kind(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int | None]:
        try:
            return _kind_of(entry["dtype"], tuple(entry["shape"]))
        except (KeyError, TypeError):
            raise self._error(name, "has no dtype and shape") from None

    def _range(self, name: str, entry: Any) -> tuple[int, int]:
        try:
            begin, end = entry["data_offsets"]
            if type(begin) is int and type(end) is int:
                return begin, end
        except (KeyError, TypeError, ValueError):
            pass
        raise self._error(name, "has no pair of data_offsets")

    def _error(self, name: str, reason: str) -> SafetensorsError:
        return _error(self.file, f"tensor {name!r} {reason}")


@lru_cache(maxsize=1 << 12)  # models have few kinds of tensors, and many of each
def _kind_of(word: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int | None]:
    """Dtype, shape and bytes; no bytes where the dtype is unknown.

    Raises:
        TypeError: it is no word, or no shape.
    """
    if type(word) is not str or len(shape) > _MOST_DIMENSIONS:
        raise TypeError
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise TypeError
    dtype = NAMES_OF_WORDS.get(word)
    return (word, shape, None) if dtype is None else (dtype, shape, _bytes_of(dtype, shape))


def _bytes_of(dtype: str, shape: Sequence[int]) -> int:
    return prod(shape) * element_bytes(dtype)


def _error(file: str | Path, reason: str) -> SafetensorsError:
    return SafetensorsError(f"{file} is not a safetensors file: {reason}")


def read_header(file: str | Path, descriptor: int) -> Header:
    """The header of an open file.

    Args:
        file: its name, for errors.

    Raises:
        SafetensorsError: there is none, or the file ends within it.
        OSError: it cannot be read.
    """
    first = os.pread(descriptor, _LENGTH.size, 0)
    if len(first) < _LENGTH.size:
        raise _error(file, f"it has only {len(first)} bytes")
    length: int = _LENGTH.unpack(first)[0]
    if length > _MOST_HEADER_BYTES:
        raise _error(
            file, f"its header would have {length} bytes; {_MOST_HEADER_BYTES} are allowed"
        )
    # A read of more than there is would take the memory all the same.
    num_there = os.fstat(descriptor).st_size - _LENGTH.size
    text = os.pread(descriptor, min(length, num_there), _LENGTH.size)
    if len(text) < length:
        raise _error(file, f"it ends after {len(text)} of the {length} bytes of its header")
    return parse_header(file, text)


def parse_header(file: str | Path, text: bytes) -> Header:
    """A header that was read without its length.

    Raises:
        SafetensorsError: it is not JSON of the right form.
    """
    try:
        entries = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _error(file, f"its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _error(file, "its header is not a JSON object")
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise _error(file, f"its {_METADATA} is not a JSON object")
    return Header(file, text, metadata, entries)


def make_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    *,
    metadata: Mapping[str, str] | None = None,
    alignment: int = 1,
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The first bytes of a file with these tensors one after the other, without holes.

    Args:
        tensors: name, dtype by torch's name, and shape of each.
        alignment: the data begin at a multiple of so many bytes.

    Returns:
        The header with its length, and by name the first byte of each tensor in the file and the
        one after its last.

    Raises:
        ValueError: a dtype that a safetensors file cannot hold.
    """
    entries: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name, dtype, shape in tensors:
        word = word_of(name, dtype)
        begin, end = end, end + _bytes_of(dtype, shape)
        entries[name] = {"dtype": word, "shape": list(shape), "data_offsets": [begin, end]}
        ranges[name] = begin, end
    text = orjson.dumps(entries)
    text += b" " * (-(_LENGTH.size + len(text)) % alignment)
    header = _LENGTH.pack(len(text)) + text
    start = len(header)
    return header, {name: (start + begin, start + end) for name, (begin, end) in ranges.items()}


def word_of(name: str, dtype: str) -> str:
    """Safetensors' word for the dtype of the tensor ``name``.

    Raises:
        ValueError: it has none.
    """
    if dtype not in SAFETENSORS_WORDS:
        raise ValueError(
            f"tensor {name!r} is {dtype}, which a safetensors file cannot hold; it can hold "
            f"{', '.join(SAFETENSORS_WORDS)}"
        )
    return SAFETENSORS_WORDS[dtype]
