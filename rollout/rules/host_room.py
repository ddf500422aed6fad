"""Whether files in memory fit on this host, before any allocation.

Always true: a refusal names the limit, the available bytes and the needed bytes.
"""

from __future__ import annotations

from engines.protocol.plain_text import size_text
from rollout.core.machine import Room


def why_no_room(needed_bytes: int, room: Room, *, spare_bytes: int) -> str:
    """Why ``needed_bytes`` more cannot be allocated; empty if they can.

    Args:
        spare_bytes: memory that stays free for everything else on the host.
    """
    if needed_bytes > room.free_bytes:
        return (
            f"{room.path} has {size_text(room.free_bytes)} free and {size_text(needed_bytes)} are "
            "needed (in Docker, raise --shm-size)"
        )
    for owner, available in room.memory_bytes.items():
        if needed_bytes + spare_bytes > available:
            return (
                f"memory of {owner}: {size_text(available)} available, "
                f"{size_text(needed_bytes)} are needed "
                f"and {size_text(spare_bytes)} must stay free"
            )
    return ""
