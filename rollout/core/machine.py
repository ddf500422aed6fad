"""This machine: its memory and whether something fits in it, seconds since boot, disk flushes.

Always true: a refusal names the limit, the available bytes and the needed bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from engines.protocol.plain_text import size_text

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Room:
    """Free space and memory of a host.

    Attributes:
        free_bytes: of the file system of the files.
        available_bytes: of memory, as the kernel reports it.
        cgroup_bytes: available under the limit of the control group, or None without a limit.
    """

    path: str
    free_bytes: int
    available_bytes: int
    cgroup_bytes: int | None = None

    @property
    def memory_bytes(self) -> dict[str, int]:
        """What is available, by whose limit it is."""
        own = {} if self.cgroup_bytes is None else {"the control group": self.cgroup_bytes}
        return {"the node": self.available_bytes, **own}

    def usable_bytes(self, spare_bytes: int) -> int:
        """The most that ``why_no_room`` does not refuse."""
        return max(0, min(self.free_bytes, min(self.memory_bytes.values()) - spare_bytes))


def why_no_room(needed_bytes: int, room: Room, *, spare_bytes: int) -> str:
    """Why ``needed_bytes`` more cannot be allocated.

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


def room_on(path: str | Path) -> Room:
    """Space for files under ``path``, which exists."""
    stats = os.statvfs(path)
    return Room(
        path=str(path),
        free_bytes=stats.f_bavail * stats.f_frsize,
        available_bytes=psutil.virtual_memory().available,
        cgroup_bytes=_cgroup_bytes(),
    )


def _cgroup_bytes() -> int | None:
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (_CGROUP / limit).read_text().strip()
            used = int((_CGROUP / usage).read_text())
            stat = (_CGROUP / limit).with_name("memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if most == "max" or int(most) >= 1 << 60:
            return None
        # The kernel frees unused file pages before it kills a process.
        lines = dict(line.split() for line in stat.splitlines())
        return int(most) - used + int(lines.get(cache, 0))
    return None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure; the contents of its files may not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
