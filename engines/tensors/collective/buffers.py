"""Buffers for buckets that are sent or received, reused from one to the next.

Always true: a buffer that was taken has one user until it is given back; host memory is freed as
soon as the buffer is dropped and no tensor views it.

Touching new memory from the kernel costs more than all the rest of a push: hence the reuse, and
the large pages.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch


def host_memory(num_bytes: int) -> mmap.mmap:
    """Private zeroed memory of this process, in large pages where the machine has any."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    view = mmap.mmap(-1, max(num_bytes, 1), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with suppress(OSError):  # a kernel without them
        view.madvise(mmap.MADV_HUGEPAGE)
    return view


def finished(device: torch.device) -> None:
    """Returns when the device has finished this thread's work: others may use the memory."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class BucketBuffers:
    """Flat buffers on one device, of which the largest is kept.  Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._cached: torch.Tensor | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """A tensor of at least so many bytes; its contents are undefined."""
        with self._lock:
            kept, self._cached = self._cached, None
        if kept is not None and kept.numel() >= num_bytes:
            return kept
        del kept  # its memory may be what the new one needs
        if self._device.type == "cpu":
            return torch.frombuffer(host_memory(num_bytes), dtype=torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer, so that it may be taken again."""
        with self._lock:
            if self._cached is None or self._cached.numel() < buffer.numel():
                self._cached = buffer

    def drop(self) -> None:
        with self._lock:
            self._cached = None

    @property
    def num_bytes(self) -> int:
        kept = self._cached
        return 0 if kept is None else kept.numel()
