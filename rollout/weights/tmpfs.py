"""Space for files in tmpfs, in pages of 2 MiB where the kernel has them to give.

Always true: all of a file's space is taken when ``take_space`` returns, in large pages or small.

tmpfs gives pages of 4 KiB unless it is mounted with ``huge=``, which takes root, and then reading a
file costs three times the copy.  ``MADV_COLLAPSE`` (Linux 6.1, madvise(2)) makes large pages of one
file's small ones whatever the mount says, and needs no right but to write the file.  It is called
before first touch, which then finds its pages there.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

logger = logging.getLogger(__name__)

LARGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def take_space(descriptor: int, num_bytes: int) -> None:
    """Make the open file this long, with all its space taken.

    Raises:
        OSError: there is no space.
    """
    # It also makes the file longer, at its end: so one of full length has all its space, also
    # after a kill in between.
    os.posix_fallocate(descriptor, 0, num_bytes)
    if why_not := _collapse(descriptor, num_bytes):
        logger.debug("tmpfs: pages of 4 KiB for %d bytes: %s", num_bytes, why_not)


def _collapse(descriptor: int, num_bytes: int) -> str:
    """Large pages for the file's space; if not all of it got them, why."""
    num_bytes -= num_bytes % LARGE_PAGE_BYTES
    if not num_bytes:
        return "smaller than a large page"
    reserved_bytes = num_bytes + LARGE_PAGE_BYTES
    reserved = _libc.mmap(None, reserved_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        return os.strerror(ctypes.get_errno())
    try:
        # A large page of the file must lie on one of memory.
        address = -(-reserved // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        flags = mmap.MAP_SHARED | _MAP_FIXED
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(address, num_bytes, protection, flags, descriptor, 0) == _FAILED:
            return os.strerror(ctypes.get_errno())
        if _libc.madvise(address, num_bytes, _MADV_COLLAPSE) != 0:
            return os.strerror(ctypes.get_errno())
    finally:
        _libc.munmap(reserved, reserved_bytes)
    return ""
