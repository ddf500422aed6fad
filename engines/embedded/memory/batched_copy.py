"""Copy or read many small tensors by address: with torch, starting a copy takes longer than it.

Always true: tensors that are adjacent in the source and in the target are one copy; a read
returns when all of its bytes are there, or raises.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence

from engines.tensors import bulk_copy

# Most ranges that the kernel takes in one call.
_MOST_PLACES = 1024

Copy = tuple[int, int, int]
"""Address to copy to, offset in the source, number of bytes."""


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """The same copies, with adjacent ones joined and empty ones left out."""
    found: list[Copy] = []
    address = offset = num_bytes = 0
    for its_address, its_offset, size in copies:
        if its_address == address + num_bytes and its_offset == offset + num_bytes:
            num_bytes += size
            continue
        if num_bytes:
            found.append((address, offset, num_bytes))
        address, offset, num_bytes = its_address, its_offset, size
    if num_bytes:
        found.append((address, offset, num_bytes))
    return found


def copy_all(source: int, copies: Iterable[Copy]) -> None:
    """Copy each range from memory that begins at address ``source``."""
    copies = tuple(copies)
    bulk_copy.copy_all(
        [target for target, _, _ in copies],
        [source + offset for _, offset, _ in copies],
        [num_bytes for _, _, num_bytes in copies],
    )


def read_copies(descriptor: int, copies: Sequence[Copy]) -> None:
    """Read each range of a file, many small ones with one call.

    Raises:
        OSError: the file is too short.
    """
    for group in _in_a_row(copies):
        begin = group[0][1]
        places = [at(address, num_bytes) for address, _, num_bytes in group]
        end = begin + os.preadv(descriptor, places, begin)
        for address, offset, num_bytes in reversed(group):
            if offset + num_bytes <= end:
                break
            have = max(0, end - offset)  # a call may read less than requested
            read_all(descriptor, at(address + have, num_bytes - have), offset + have)


def _in_a_row(copies: Sequence[Copy]) -> Iterator[Sequence[Copy]]:
    """Runs of copies that are adjacent in the file."""
    first = 0
    for index, (_, offset, num_bytes) in enumerate(copies):
        following = copies[index + 1][1] if index + 1 < len(copies) else -1
        if offset + num_bytes != following or index + 1 - first == _MOST_PLACES:
            yield copies[first : index + 1]
            first = index + 1


def read_all(descriptor: int, into: memoryview, offset: int) -> None:
    """Read as many bytes as ``into`` has, in as many calls as it takes.

    Raises:
        OSError: the file is too short.
    """
    while into:
        count = os.preadv(descriptor, [into], offset)
        if not count:
            raise OSError(f"the file ends {len(into)} bytes early")
        into, offset = into[count:], offset + count


def at(address: int, num_bytes: int) -> memoryview:
    """So many bytes of this process's memory."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
