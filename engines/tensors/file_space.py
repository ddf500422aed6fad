"""Allocates files in tmpfs, in pages of 2 MiB where the kernel has them.

Always true: when ``take_space`` returns, all of the file's space is allocated.

tmpfs has pages of 4 KiB unless it is mounted with ``huge=``, which needs root.  Reading a file with
small pages costs three times the copy.  ``MADV_COLLAPSE`` (Linux 6.1, madvise(2)) makes large pages
of a file's small ones, whatever the mount options; it only needs write access to the file.  It is
called before the first write.
"""

from __future__ import annotations

import ctypes
import logging
import os

from engines.tensors.file_mapping import LARGE_PAGE_BYTES, FileMapping

logger = logging.getLogger(__name__)

_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def take_space(descriptor: int, num_bytes: int) -> None:
    """Make the open file this long, and allocate all its space.

    Raises:
        OSError: there is no space.
    """
    # It extends the file as its last step: so a file of full length has all its space, even if
    # the process was killed in between.
    os.posix_fallocate(descriptor, 0, num_bytes)
    if why_not := _collapse(descriptor, num_bytes):
        logger.debug("tmpfs: pages of 4 KiB for %d bytes: %s", num_bytes, why_not)


def _collapse(descriptor: int, num_bytes: int) -> str:
    """Use large pages for the file; returns why not, or an empty string."""
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
