"""Hands buckets from the trainer's own thread to the thread of a stream.

Gathers are collectives, so they run in the caller's thread; the stream sends in its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class BucketHandover(Generic[T]):
    """An iterable for a stream's thread, filled from another thread.

    Always true: at most one bucket waits here; both sides are released when either ends.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bucket: T | None = None
        self._num_wanted = 0
        self._is_over = False
        self._over_s = 0.0

    # -- the caller's thread ----------------------------------------------------------------

    def is_wanted(self, index: int, timeout_s: float) -> bool:
        """Wait until the stream asks for this bucket; false at the deadline or at its end."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._num_wanted <= index and not self._is_over:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._changed.wait(remaining_s)
            return self._num_wanted > index and not self._is_over

    @property
    def is_over(self) -> bool:
        """Whether the stream takes no more buckets."""
        return self._is_over

    @property
    def over_s(self) -> float:
        """When it was closed, by ``time.monotonic``: engines have applied the last bucket."""
        return self._over_s

    def put(self, bucket: T) -> None:
        """Give the stream the bucket that it asked for."""
        with self._changed:
            self._bucket = bucket
            self._changed.notify_all()

    # -- the stream's thread ----------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._num_wanted += 1
            self._changed.notify_all()
            while self._bucket is None and not self._is_over:
                self._changed.wait()
            bucket, self._bucket = self._bucket, None
            if bucket is None:
                raise StopIteration
            return bucket

    def close(self) -> None:
        """End both sides; the stream calls it too."""
        with self._changed:
            if not self._is_over:
                self._over_s = time.monotonic()
            self._is_over = True
            self._changed.notify_all()
