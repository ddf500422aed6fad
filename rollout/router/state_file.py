"""The state of a server's routers that outlives each of them, in shared memory.

Always true: one process at a time has its lock, which the kernel takes back when that process ends.
The memory is that of the process which made the file and of those that have opened it; when all
have ended, nothing is left.
"""

from __future__ import annotations

import fcntl
import os
import struct

_PORT = struct.Struct("<I")


class StateFile:
    """A file in memory, which other processes of this machine open by its path.

    Args:
        path: ``path`` of another one, of which this is the same.

    Attributes:
        path: as long as the process that made the file has it open.

    Raises:
        OSError: from all of its methods, if that process has ended, or is hidden from this one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._opened = -1

    def __reduce__(self) -> tuple[type[StateFile], tuple[str]]:
        return StateFile, (self.path,)

    @classmethod
    def make(cls) -> StateFile:
        """A new one; its memory is used as soon as something is written."""
        file = os.memfd_create("rollout-router")
        made = cls(f"/proc/{os.getpid()}/fd/{file}")
        made._opened = file
        return made

    def lock(self) -> None:
        """Wait until no other process has the lock, and keep it as long as this process lives."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    @property
    def port(self) -> int:
        """The port of the router; 0 before the first one has one."""
        data = os.pread(self._file, _PORT.size, 0)
        return int(_PORT.unpack(data)[0]) if data else 0

    @port.setter
    def port(self, port: int) -> None:
        os.pwrite(self._file, _PORT.pack(port), 0)

    def close(self) -> None:
        if self._opened >= 0:
            os.close(self._opened)
            self._opened = -1

    @property
    def _file(self) -> int:
        if self._opened < 0:
            self._opened = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._opened
