"""Whether the store fits on a node, decided before a byte is taken.

Always true: what is refused is refused with the limit, what is there, and what would be needed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What a node has.

    Attributes:
        free_bytes: of the file system the segments are on.
        available_bytes: of memory, as the kernel reckons it.
        cgroup_bytes: left under the limit of the control group; None without a limit.
    """

    path: str
    free_bytes: int
    available_bytes: int
    cgroup_bytes: int | None = None


def why_no_room(needed_bytes: int, room: Room, *, spare_bytes: int) -> str:
    """Why ``needed_bytes`` more cannot be taken; empty if they can.

    Args:
        spare_bytes: memory that must stay for everything else on the node.
    """
    if needed_bytes > room.free_bytes:
        return (
            f"{room.path} has {gib(room.free_bytes)} free and {gib(needed_bytes)} are needed "
            "(in Docker, raise --shm-size)"
        )
    limits = {"the node": room.available_bytes}
    if room.cgroup_bytes is not None:
        limits["the control group"] = room.cgroup_bytes
    for whose, left in limits.items():
        if needed_bytes + spare_bytes > left:
            return (
                f"memory of {whose}: {gib(left)} left, {gib(needed_bytes)} are needed and "
                f"{gib(spare_bytes)} must stay free"
            )
    return ""


def gib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**30:.2f} GiB"
