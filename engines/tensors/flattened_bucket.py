"""Layout of a flattened bucket in memory: ``load_format="flattened_bucket"`` of a broadcast.

Always true: the same as in SGLang, or a broadcast would be of another length on one side.

Read in SGLang 0.5.23 (``FlattenedTensorBucket.empty``) and 0.5.20: one tensor of bytes is broadcast
for a request, the tensors' bytes one after the other in the order of ``names``, nothing between
them.  0.5.23 refuses, before it takes part in the broadcast, an empty bucket, lists that differ in
length, a negative dimension, and a tensor that does not begin at a multiple of its element's
size; so the sender puts wide elements first.  Without ``load_format`` every tensor is a
broadcast of its own, and so it is with one that SGLang does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from engines.tensors.dtypes import element_bytes

FLATTENED_BUCKET = "flattened_bucket"
_ALIGNMENT = 64


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up so that the next piece starts on a cache line."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def wide_first(dtypes: Iterable[str]) -> list[int]:
    """In which order tensors of these dtypes may lie in a bucket; as they are, if they may."""
    widths = [element_bytes(dtype) for dtype in dtypes]
    return sorted(range(len(widths)), key=lambda index: -widths[index])


def lay_out(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """First byte of each tensor in the bucket and the one after its last.

    Raises:
        ValueError: SGLang would refuse such a bucket.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError("names, dtypes and shapes differ in length")
    if not names:
        raise ValueError("a flattened bucket cannot be empty")
    places = []
    begin = 0
    widths = {dtype: element_bytes(dtype) for dtype in set(dtypes)}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if any(size < 0 for size in shape):
            raise ValueError(f"{name!r} has a negative dimension: {list(shape)}")
        if begin % widths[dtype]:
            raise ValueError(
                f"{name!r} begins at byte {begin}, no multiple of the {widths[dtype]} of {dtype}: "
                "put wide elements first"
            )
        end = begin + prod(shape) * widths[dtype]
        places.append((begin, end))
        begin = end
    return places
