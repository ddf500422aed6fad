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
import os

from engines.mapping import LARGE_PAGE_BYTES, FileMapping

logger = logging.getLogger(__name__)

_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
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
    try:
        mapping = FileMapping(descriptor, num_bytes, is_populated=False)
    except OSError as error:
        return str(error)
    try:
        if _libc.madvise(mapping.address, num_bytes, _MADV_COLLAPSE) != 0:
            return os.strerror(ctypes.get_errno())
    finally:
        mapping.close()
    return ""
