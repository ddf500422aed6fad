"""One bucket as a safetensors file (https://huggingface.co/docs/safetensors): header and offsets.

Always true: every tensor begins at a multiple of its element's size, so a reader that maps the
file can use it in place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Generic, TypeVar

from engines import flat
from engines.fingerprint import head_of
from engines.protocol import STAYS
from rollout.errors import WeightMismatch
from rollout.weights.manifest import SAFETENSORS_DTYPES, TensorSpec

T = TypeVar("T")
_ALIGNMENT = 64
# Some hundred bytes each.
_MOST_KEPT_TENSORS = 1 << 16


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What goes where in a file.

    Attributes:
        header: its first bytes.
        offsets: name -> first byte in the file and the one after the last.
        heads: what the hash of each tensor begins with, in the order in which they were given.
        begins: first byte of each in the file.
        sizes: bytes of each.
    """

    header: bytes
    offsets: Mapping[str, tuple[int, int]]
    num_bytes: int
    heads: Sequence[bytes]
    begins: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def of(
        cls, specs: Iterable[TensorSpec], ranges: Mapping[str, tuple[int, int]], header: bytes = b""
    ) -> FileLayout:
        """The layout of a file with the tensors in these ranges behind its header."""
        start = len(header)
        offsets = {name: (start + begin, start + end) for name, (begin, end) in ranges.items()}
        specs = list(specs)
        places = [offsets[one.name] for one in specs]
        return cls(
            header,
            offsets,
            max((end for _, end in offsets.values()), default=start),
            [head_of(one.name, one.dtype, one.shape) for one in specs],
            [begin for begin, _ in places],
            [end - begin for begin, end in places],
        )


def lay_out(specs: Sequence[TensorSpec], *, stays: bool = False) -> FileLayout:
    """The file that holds these tensors.

    Args:
        stays: it will be written again and never change its length; its metadata say so.

    Raises:
        WeightMismatch: safetensors has no word for a dtype.
    """
    entries: dict[str, dict[str, object]] = (
        {"__metadata__": {"format": "pt", STAYS: "yes"}} if stays else {}
    )
    ranges: dict[str, tuple[int, int]] = {}
    position = 0
    # Wide elements first: what follows them is then aligned whatever its own width.  Else as they
    # come: a trainer's model and an engine's mostly have them in one order, and what are neighbours
    # in both the engine copies as one.
    for spec in sorted(specs, key=lambda one: -element_bytes(one)):
        begin, position = position, position + element_bytes(spec) * prod(spec.shape)
        ranges[spec.name] = begin, position
        entries[spec.name] = {
            "dtype": _WORDS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, position],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return FileLayout.of(specs, ranges, header)


class KeptByModel(Generic[T]):
    """What is made of a bucket's tensors, kept: a model's buckets are the same at every push."""

    def __init__(self, make: Callable[[Sequence[TensorSpec]], T]) -> None:
        self._make = make
        self._kept: dict[tuple[str, int], tuple[Sequence[TensorSpec], T]] = {}

    def of(self, specs: Sequence[TensorSpec]) -> T:
        """What was made of these, or is made now."""
        key = (specs[0].name if specs else "", len(specs))
        kept = self._kept.get(key)
        if kept is None or kept[0] != specs:
            if sum(size for _, size in self._kept) + len(specs) > _MOST_KEPT_TENSORS:
                self._kept.clear()  # of models that are pushed no more
            kept = self._kept[key] = list(specs), self._make(specs)
        return kept[1]


class Layouts(KeptByModel[FileLayout]):
    """Those of files that stay.

    Raises:
        WeightMismatch: safetensors has no word for a dtype.
    """

    def __init__(self) -> None:
        super().__init__(partial(lay_out, stays=True))


def element_bytes(spec: TensorSpec) -> int:
    """Bytes of one element.

    Raises:
        WeightMismatch: the dtype is not known.
    """
    if spec.dtype not in _WORDS:
        raise WeightMismatch(
            f"tensor {spec.name!r} is {spec.dtype}, which safetensors cannot hold; known: "
            f"{', '.join(_WORDS)}",
            tensor=spec.name,
        )
    return flat.element_bytes(spec.dtype)


_WORDS = {dtype: word for word, dtype in SAFETENSORS_DTYPES.items()}
