"""Files mapped so that the kernel can use the large pages they lie in.

Always true: a mapping begins at a multiple of a large page's size, and stays as long as anything
views it.

A file's page of 2 MiB is mapped as one only where both begin at such a multiple; Python's ``mmap``
lies anywhere, and then it is 512 small ones: copying through them takes a tenth to a third longer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress

LARGE_PAGE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class FileMapping:
    """The first ``num_bytes`` of an open file, shared with all that have it open.

    Args:
        num_bytes: at least one, and no more than the file has: touching what it does not have
            ends the process.
        is_writable: through ``view``; a mapping that is not must not be written by address either.
        is_populated: all pages at once: faulting them in one by one costs more than a copy.

    Attributes:
        address: where they are in memory.
        view: the mapped bytes.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(
        self,
        descriptor: int,
        num_bytes: int,
        *,
        is_writable: bool = True,
        is_populated: bool = True,
    ) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_populated else 0)
        self.address = _reserve(num_bytes)
        try:
            _mapped(self.address, num_bytes, protection, flags | _MAP_FIXED, descriptor)
        except OSError:
            _libc.munmap(self.address, num_bytes)
            raise
        place = (ctypes.c_char * num_bytes).from_address(self.address)
        # Views hold ``place``: with the last of them the mapping goes.
        unmap = weakref.finalize(place, _libc.munmap, self.address, num_bytes)
        unmap.atexit = False  # threads may still be at work on it then
        view = memoryview(place).cast("B")
        self.view = view if is_writable else view.toreadonly()

    def close(self) -> None:
        """Unmap it, now or when the last tensor or array that views it is gone."""
        with suppress(BufferError):
            self.view.release()


def _reserve(num_bytes: int) -> int:
    """Room for so many bytes at a multiple of a large page's size, for a mapping to replace."""
    size = num_bytes + LARGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _mapped(None, size, 0, flags, -1)
    begin = -(-reserved // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    end = begin + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((reserved, begin), (end, reserved + size)):
        if first < last:
            _libc.munmap(first, last - first)
    return begin


def _mapped(
    address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int
) -> int:
    """The address of libc's mapping from the first byte of the file; OSError if it fails."""
    place: int | None = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if place is None or place == _FAILED:
        why = ctypes.get_errno()
        raise OSError(why, os.strerror(why))
    return place
