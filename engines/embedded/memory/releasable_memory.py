"""Anonymous memory that can be given back to the machine and taken again at the same address.

Always true: the address never changes, so tensors that view it stay valid; between
``release`` and ``resume`` it holds no physical memory and touching it is a segmentation fault,
as touching released memory is on a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

from engines.tensors.flattened_bucket import aligned

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MADV_POPULATE_WRITE = 23
_COPY_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class ReleasableMemory:
    """One private anonymous mapping, filled from its start by ``take``.

    Raises:
        MemoryError: the machine refuses so much.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        # Private, not Python's default of shared: MADV_DONTNEED frees nothing of a shared one.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=flags, prot=_PROT_READ_WRITE)
        except OSError as error:
            raise MemoryError(f"{self.nbytes} bytes: {error.strerror}") from None
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._taken = 0
        self._backup: int | None = None
        self.is_released = False

    def take(self, nbytes: int) -> memoryview:
        """The next ``nbytes``, zero until written."""
        start = self._taken
        if start + nbytes > self.nbytes:
            raise MemoryError(f"{nbytes} bytes do not fit into the rest of {self.nbytes}")
        self._taken = start + aligned(nbytes)
        return memoryview(self._map)[start : start + nbytes]

    def populate(self) -> None:
        """Take the physical memory of the whole mapping now, not page by page as it is touched."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError):  # before Linux 5.14
            for offset in range(0, self.nbytes, mmap.PAGESIZE):
                self._map[offset] = self._map[offset]

    def release(self, *, backup: bool) -> None:
        """Give the memory back; with ``backup`` the contents are kept outside this process's
        resident memory, where SGLang keeps them in host memory outside the GPU's."""
        if backup:
            backup_file = os.memfd_create("rollout-weights-backup")
            try:
                self._copy(backup_file, os.pwritev)
            except BaseException:
                os.close(backup_file)  # of the model's size
                raise
            self._backup = backup_file
        self._map.madvise(mmap.MADV_DONTNEED)
        self._protect(_PROT_NONE)
        self.is_released = True

    def resume(self) -> bool:
        """Take the memory again; whether its contents came back (they are zero otherwise)."""
        self._protect(_PROT_READ_WRITE)
        self.is_released = False
        if self._backup is None:
            return False
        self._copy(self._backup, os.preadv)
        os.close(self._backup)
        self._backup = None
        return True

    def resident_bytes(self) -> int:
        """Bytes of it that are in physical memory now."""
        if self.is_released:
            return 0
        pages = (ctypes.c_ubyte * (self.nbytes // mmap.PAGESIZE))()
        if _libc.mincore(self._address, self.nbytes, ctypes.addressof(pages)) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return bytes(pages).count(1) * mmap.PAGESIZE

    def _copy(self, file: int, transfer: Callable[..., int]) -> None:
        """Move the whole memory to or from ``file``; both calls may transfer less."""
        view = memoryview(self._map)
        offset = 0
        while offset < self.nbytes:
            moved = transfer(file, [view[offset : offset + _COPY_BYTES]], offset)
            if moved <= 0:
                raise OSError(f"backup of the weights broke off at byte {offset}")
            offset += moved

    def _protect(self, protection: int) -> None:
        if _libc.mprotect(self._address, self.nbytes, protection) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
