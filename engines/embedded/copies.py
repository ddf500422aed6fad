"""Many small tensors copied by address: torch would take longer to begin than to copy.

Always true: neighbours in the source that are neighbours where they go are one copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import memmove

Copy = tuple[int, int, int]
"""Address to copy to, offset in the source, number of bytes."""


def joined(copies: Iterable[Copy]) -> list[Copy]:
    """The same, as few as they can be; those of no bytes are left out."""
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
    """Each to its place, from what begins at address ``source``."""
    for target, offset, num_bytes in copies:
        memmove(target, source + offset, num_bytes)
