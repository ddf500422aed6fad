"""Many small tensors copied by address: with torch each would take longer to begin than to copy.

Always true: neighbours in the source that are neighbours where they go are one copy.
"""

from __future__ import annotations

from collections.abc import Iterable

from engines import bulk

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
    copies = tuple(copies)
    bulk.copy_all(
        [target for target, _, _ in copies],
        [source + offset for _, offset, _ in copies],
        [num_bytes for _, _, num_bytes in copies],
    )
