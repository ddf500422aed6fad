"""Buffers that are still read after the next ones are written.

Always true: a held buffer is written again only after its release; ``StoreCopies`` holds buffers of
at most two pushes: of the one that the store reads, and of the latest.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rollout.weights.push.shm_buffers import ShmBuffer, ShmBufferPool


class HeldBuffers:
    """Buffers taken from a pool, until all are released together."""

    def __init__(self, pool: ShmBufferPool) -> None:
        self._pool = pool
        self.layouts = pool.layouts
        self._taken: list[ShmBuffer] = []
        self._joined: list[Path] = []

    def take(self, num_bytes: int) -> ShmBuffer:
        """See ``ShmBufferPool.take``."""
        self._taken.append(self._pool.take(num_bytes))
        return self._taken[-1]

    def give(self, buffer: ShmBuffer) -> None:
        """It is held until the release of all."""

    def joined(self, folders: Sequence[Path] = ()) -> Path:
        """A folder with links to the files in these, or in all that are held, until the release."""
        own = [buffer.folder for buffer in self._taken]
        self._joined.append(self._pool.join(folders or own))
        return self._joined[-1]

    def release(self, *, but: int = 0) -> None:
        """Give all to the pool, but so many that were taken last."""
        while self._joined:
            shutil.rmtree(self._joined.pop(), ignore_errors=True)
        while len(self._taken) > but:
            self._pool.give(self._taken.pop(0))


class StoreCopies:
    """The buffers of this process that the store may still read."""

    def __init__(self, pool: ShmBufferPool) -> None:
        self._pool = pool
        self._held: list[tuple[int, HeldBuffers]] = []

    def begin(self, version: int, reads: int | None) -> HeldBuffers:
        """Buffers for the next push.

        Args:
            reads: the version that the store reads now; the buffers of all others are released.
        """
        for held_version, held in self._held:
            if held_version != reads:
                held.release()
        self._held = [entry for entry in self._held if entry[0] == reads]
        self._held.append((version, HeldBuffers(self._pool)))
        return self._held[-1][1]
