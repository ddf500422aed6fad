"""Bytes of a file to where they belong in memory, many small tensors with one call.

Always true: it returns when all of them are there, or raises.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence

from engines.embedded.mapped import Copy

# The kernel takes so many places in one call.
_MOST_PLACES = 1024


def read_copies(descriptor: int, copies: Sequence[Copy]) -> None:
    """Read each ``(address, offset, number of bytes)``.

    Raises:
        OSError: the file ends before.
    """
    for group in _in_a_row(copies):
        begin = group[0][1]
        places = [_place(address, num_bytes) for address, _, num_bytes in group]
        end = begin + os.preadv(descriptor, places, begin)
        for address, offset, num_bytes in reversed(group):
            if offset + num_bytes <= end:
                break
            have = max(0, end - offset)  # a call may read less than it was asked for
            _read_rest(descriptor, address + have, offset + have, num_bytes - have)


def _in_a_row(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """Those that follow one another in the file."""
    first = 0
    for index, (_, offset, num_bytes) in enumerate(copies):
        following = copies[index + 1][1] if index + 1 < len(copies) else -1
        if offset + num_bytes != following or index + 1 - first == _MOST_PLACES:
            yield copies[first : index + 1]
            first = index + 1


def _read_rest(descriptor: int, address: int, offset: int, num_bytes: int) -> None:
    while num_bytes:
        count = os.preadv(descriptor, [_place(address, num_bytes)], offset)
        if not count:
            raise OSError(f"the file ends {num_bytes} bytes early")
        address, offset, num_bytes = address + count, offset + count, num_bytes - count


def _place(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * num_bytes).from_address(address)
