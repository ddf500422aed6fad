"""One bucket as a safetensors file (https://huggingface.co/docs/safetensors): header and offsets.

Always true: every tensor begins at a multiple of its element's size, so a reader that maps the
file can use it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engines.protocol import STAYS
from engines.tensors.fingerprint import head_of
from engines.tensors.safetensors_header import make_header
from rollout.weights.format.manifest import TensorSpec

T = TypeVar("T")
_ALIGNMENT = 64
# An entry has some hundred bytes for each tensor.
_MOST_CACHED_TENSORS = 1 << 16


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where each tensor is in a file.

    Attributes:
        header: the first bytes of the file.
        offsets: name -> first byte in the file, and the end (exclusive).
        heads: the prefix of each tensor's hash, in the order of the specs.
        begins: first byte of each tensor in the file.
        sizes: bytes of each tensor.
    """

    header: bytes
    offsets: Mapping[str, tuple[int, int]]
    num_bytes: int
    heads: Sequence[bytes]
    begins: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def of(
        cls,
        specs: Sequence[TensorSpec],
        offsets: Mapping[str, tuple[int, int]],
        header: bytes = b"",
    ) -> FileLayout:
        """The layout of a file with the tensors at these offsets."""
        places = [offsets[spec.name] for spec in specs]
        return cls(
            header,
            offsets,
            max((end for _, end in places), default=len(header)),
            [head_of(spec.name, spec.dtype, spec.shape) for spec in specs],
            [begin for begin, _ in places],
            [end - begin for begin, end in places],
        )


def lay_out(specs: Sequence[TensorSpec], *, stays: bool = False) -> FileLayout:
    """The layout of a file that holds these tensors.

    Args:
        stays: the file will be overwritten in place and never change its length. Its metadata
            contain that.

    Raises:
        WeightMismatch: safetensors does not support a dtype.
    """
    # Wide elements first, so that all tensors are aligned.  Otherwise the order stays: trainer and
    # engine mostly have the same order, and the engine copies neighbours in one call.
    ordered = sorted(specs, key=lambda spec: -spec.element_bytes)
    header, offsets = make_header(
        ((spec.name, spec.dtype, spec.shape) for spec in ordered),
        metadata={"format": "pt", STAYS: "yes"} if stays else None,
        alignment=_ALIGNMENT,
    )
    return FileLayout.of(specs, offsets, header)


def split_by_size(sizes: Sequence[int], max_bytes: int) -> list[slice]:
    """Runs of neighbours with up to ``max_bytes`` together; one item alone may have more."""
    parts: list[slice] = []
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and total + size > max_bytes:
            parts.append(slice(first, index))
            first, total = index, 0
        total += size
    return [*parts, slice(first, len(sizes))] if sizes else []


class LayoutCache(Generic[T]):
    """Caches what ``make`` returns for a bucket. A model has the same buckets at every push."""

    def __init__(self, make: Callable[[Sequence[TensorSpec]], T]) -> None:
        self._make = make
        self._cached: dict[tuple[str, int], tuple[Sequence[TensorSpec], T]] = {}

    def of(self, specs: Sequence[TensorSpec]) -> T:
        """The cached value for these tensors; made if it is not there."""
        key = (specs[0].name if specs else "", len(specs))
        kept = self._cached.get(key)
        if kept is None or kept[0] != specs:
            if sum(size for _, size in self._cached) + len(specs) > _MOST_CACHED_TENSORS:
                self._cached.clear()  # these models are not pushed any more
            kept = self._cached[key] = list(specs), self._make(specs)
        return kept[1]
