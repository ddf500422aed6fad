"""Copy many ranges of memory with one call, hash them on the way, or check their values.

Always true: the interpreter is free while bytes are moved; a fingerprint is of the range's bytes as
they were just after they were copied, and the same whether the compiled code (``_bulk.c``) runs or
not.  Without a compiler at installation, or on a processor other than
x86-64 with AVX2 or AVX-512, Python does the same at half the speed or less.

A copy that bypasses the caches is as fast as memory, and hashing what is still in the core's first
cache then takes no extra time.  Python can do neither: one call takes as long as copying 64 KiB.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TypeVar

from engines.tensors.fingerprint import host_fingerprint_of, start_with, texts_of

R = TypeVar("R")
# For so many bytes or less, head included, the compiled code makes no digest: the library does.
_SHORT_BYTES = 240
# The bits of the exponent; all are set in a value that is NaN or infinite (IEEE 754, bfloat16).
# Without the lowest they are also set in a float32 from 2**127 on, for which bfloat16 may have no
# room.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F00_0000}
# The largest number of each type in which these bits are not all set.
_MOST_UNSEEN = {"bfloat16": 2.0**128 - 2.0**120, "float16": 65504.0, "float32": 2.0**127 - 2.0**103}
# One core reads at half of the memory bandwidth.
_MOST_THREADS = 4
_SHARE_BYTES = 16 << 20
# Fits twice into a core's own cache, as source and as copy.
PIECE_BYTES = 256 << 10
# All that has an address here: a slice of it takes a third of the time of an array at an address.
_MEMORY = memoryview((ctypes.c_char * sys.maxsize).from_address(0)).cast("B")


def _load() -> ctypes.CDLL | None:
    """The compiled code, if it was installed and runs here."""
    found = importlib.util.find_spec("engines.tensors._bulk")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    if not library.bulk_kind():
        return None
    library.bulk_copy_and_check.restype = None
    library.bulk_copy_and_check.argtypes = [ctypes.c_int, ctypes.c_size_t, *[ctypes.c_void_p] * 3]
    library.bulk_copy_and_check.argtypes += [ctypes.c_char_p, *[ctypes.c_void_p] * 4]
    library.bulk_nonfinite.restype = None
    library.bulk_nonfinite.argtypes = [ctypes.c_size_t, *[ctypes.c_void_p] * 4]
    return library


_library = _load()
_kind = _library.bulk_kind() if _library else 0


def is_compiled() -> bool:
    """Whether the compiled code does it."""
    return _library is not None


def copy_all(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy ``sizes[i]`` bytes from address ``sources[i]`` to ``targets[i]``, for each ``i``.

    All of them must be there, and targets writable: nothing is checked.
    """
    _check_lengths(targets, sources, sizes)
    if _library is None:
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        return
    _call(_library, targets, sources, sizes)


def copy_and_check(
    dtypes: Sequence[str],
    targets: Sequence[int],
    sources: Sequence[int],
    sizes: Sequence[int],
    heads: Sequence[bytes] | None = None,
) -> tuple[list[str], list[bool]]:
    """The same, and for each what ``suspects`` finds; only where ``is_compiled``.

    Args:
        dtypes: of the values; those that ``can_check`` does not know are not checked.
        sizes: bytes of whole values.
        heads: with them, the first list is the fingerprint of each; else it is empty.
    """
    assert _library is not None
    _check_lengths(dtypes, targets, sources, sizes, *([] if heads is None else [heads]))
    masks = array("Q", [_EXPONENTS.get(dtype, 0) for dtype in dtypes])
    is_bad = bytearray(len(sizes) or 1)
    digests = _call(_library, targets, sources, sizes, heads, masks, is_bad)
    fingerprints = [] if heads is None else _fingerprints(digests, heads, sources, sizes)
    return fingerprints, list(map(bool, is_bad[: len(sizes)]))


def copy_and_hash(
    heads: Sequence[bytes], targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
) -> list[str]:
    """The same, and the ``xxh3:...`` fingerprint of each.

    Args:
        heads: the bytes of ``fingerprint.head_of`` for each.
        targets: where one is its source, the bytes are hashed where they are.
    """
    _check_lengths(targets, sources, sizes, heads)
    if _library is None:
        return list(map(_copied, heads, targets, sources, sizes))
    digests = _call(_library, targets, sources, sizes, heads)
    return _fingerprints(digests, heads, sources, sizes)


def _fingerprints(
    digests: bytes, heads: Sequence[bytes], places: Sequence[int], sizes: Sequence[int]
) -> list[str]:
    found = texts_of(digests)
    for index, size in enumerate(sizes):
        if size < _SHORT_BYTES and len(heads[index]) + size <= _SHORT_BYTES:
            found[index] = _copied(heads[index], places[index], places[index], size)
    return found


def can_check(dtype: str, largest: float) -> bool:
    """Whether ``suspects`` finds each value of this type that is over ``largest``."""
    return is_compiled() and dtype in _EXPONENTS and largest >= _MOST_UNSEEN[dtype]


def suspects(dtypes: Sequence[str], places: Sequence[int], sizes: Sequence[int]) -> list[bool]:
    """Whether a value of each range is NaN or infinite, or a float32 of 2**127 or more.

    Args:
        dtypes: of the values; those that ``can_check`` does not know are not checked.
        places: its address.
        sizes: bytes of whole values.
    """
    assert _library is not None
    _check_lengths(dtypes, places, sizes)
    masks = array("Q", [_EXPONENTS.get(dtype, 0) for dtype in dtypes])
    lists = [array("Q", places), array("Q", sizes), masks]
    found = bytearray(len(sizes) or 1)
    _library.bulk_nonfinite(
        len(sizes),
        *(numbers.buffer_info()[0] for numbers in lists),
        (ctypes.c_char * len(found)).from_buffer(found),
    )
    return list(map(bool, found[: len(sizes)]))


def in_threads(work: Callable[[slice], R], sizes: Sequence[int]) -> list[R]:
    """What ``work`` gives for all ranges, or for shares of them, each read by a thread of its own.

    Args:
        work: its argument is a run of neighbours; those of all threads have about equally many
            bytes.
        sizes: bytes of each range.
    """
    num_bytes = sum(sizes)
    num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), num_bytes // _SHARE_BYTES)
    if num_threads < 2:
        return [work(slice(0, len(sizes)))]
    ends = list(accumulate(sizes))
    cuts = [bisect_left(ends, num_bytes * share // num_threads) for share in range(num_threads)]
    with ThreadPoolExecutor(num_threads, "read") as threads:
        return list(threads.map(work, map(slice, [0, *cuts[1:]], [*cuts[1:], len(sizes)])))


def _check_lengths(*lists: Sequence[object]) -> None:
    if len(set(map(len, lists))) > 1:
        raise ValueError(f"lists of {', '.join(str(len(ranges)) for ranges in lists)} ranges")


def _call(
    library: ctypes.CDLL,
    targets: Sequence[int],
    sources: Sequence[int],
    sizes: Sequence[int],
    heads: Sequence[bytes] | None = None,
    masks: array[int] | None = None,
    is_bad: bytearray | None = None,
) -> bytes:
    """Copy; with ``heads``, the digests of all in a row; with ``masks``, check into ``is_bad``."""
    lists = [array("Q", ranges) for ranges in (targets, sources, sizes)]
    digests = bytearray(16 * len(sizes) if heads is not None else 0)
    head_sizes = array("Q", map(len, heads or ()))
    library.bulk_copy_and_check(
        _kind,
        len(sizes),
        *(ranges.buffer_info()[0] for ranges in lists),
        b"".join(heads or ()),
        head_sizes.buffer_info()[0],
        (ctypes.c_char * len(digests)).from_buffer(digests) if digests else None,
        masks.buffer_info()[0] if masks is not None else None,
        (ctypes.c_char * len(is_bad)).from_buffer(is_bad) if is_bad is not None else None,
    )
    return bytes(digests)


def _copied(head: bytes, target: int, source: int, size: int) -> str:
    """Copy one range piece by piece, unless it is there already; its fingerprint."""
    hasher = start_with(head)
    for done in range(0, size, PIECE_BYTES):
        end = min(done + PIECE_BYTES, size)
        if target != source:
            ctypes.memmove(target + done, source + done, end - done)
        hasher.update(_MEMORY[source + done : source + end])
    return host_fingerprint_of(hasher)
