"""Checks whether the store fits on a node, before any allocation.

Always true: a refusal names the limit, the available bytes and the needed bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.protocol.plain_text import size_text


@dataclass(frozen=True, slots=True)
class Room:
    """Free space and memory of a node.

    Attributes:
        free_bytes: of the file system of the segments.
        available_bytes: of memory, as the kernel reports it.
        cgroup_bytes: available under the limit of the control group; None without a limit.
    """

    path: str
    free_bytes: int
    available_bytes: int
    cgroup_bytes: int | None = None


def why_no_room(needed_bytes: int, room: Room, *, spare_bytes: int) -> str:
    """Why ``needed_bytes`` more cannot be allocated; empty if they can.

    Args:
        spare_bytes: memory that stays free for everything else on the node.
    """
    if needed_bytes > room.free_bytes:
        return (
            f"{room.path} has {size_text(room.free_bytes)} free and {size_text(needed_bytes)} are "
            "needed (in Docker, raise --shm-size)"
        )
    limits = {"the node": room.available_bytes}
    if room.cgroup_bytes is not None:
        limits["the control group"] = room.cgroup_bytes
    for owner, available in limits.items():
        if needed_bytes + spare_bytes > available:
            return (
                f"memory of {owner}: {size_text(available)} available, "
                f"{size_text(needed_bytes)} are needed "
                f"and {size_text(spare_bytes)} must stay free"
            )
    return ""
