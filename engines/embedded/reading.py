"""Bytes of a file to where they belong in memory, many small tensors with one call.

Always true: it returns when all of them are there, or raises.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence

from engines.embedded.copies import Copy

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
            rest = memoryview(_place(address + have, num_bytes - have)).cast("B")
            read_all(descriptor, rest, offset + have)


def _in_a_row(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """Those that follow one another in the file."""
    first = 0
    for index, (_, offset, num_bytes) in enumerate(copies):
        following = copies[index + 1][1] if index + 1 < len(copies) else -1
        if offset + num_bytes != following or index + 1 - first == _MOST_PLACES:
            yield copies[first : index + 1]
            first = index + 1


def read_all(descriptor: int, into: memoryview, offset: int) -> None:
    """Read as many bytes as ``into`` has, in as many calls as it takes.

    Raises:
        OSError: the file ends before.
    """
    while into:
        count = os.preadv(descriptor, [into], offset)
        if not count:
            raise OSError(f"the file ends {len(into)} bytes early")
        into, offset = into[count:], offset + count


def _place(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * num_bytes).from_address(address)
