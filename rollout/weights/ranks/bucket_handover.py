"""Hands buckets from the trainer's own thread to the thread of a stream, and tasks the other way.

Gathers are collectives, so they run in the caller's thread; the stream sends in its own.  What
other ranks broadcast is a task for the caller's thread, which exchanges the ranks' words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rollout.core.errors import WeightsUnavailable

Word = Mapping[str, Any]
T = TypeVar("T")


class BucketHandover(Generic[T]):
    """An iterable for a stream's thread, filled from another thread.

    Always true: at most one bucket waits here; both sides are released when either ends.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bucket: T | None = None
        self._num_wanted = 0
        self._task: Word | None = None
        self._answer: Sequence[Word] | None = None
        self._is_over = False
        self._over_s = 0.0

    # -- the caller's thread ----------------------------------------------------------------

    def is_wanted(self, index: int, timeout_s: float) -> bool:
        """Wait until the stream asks for this bucket; false at the deadline, at its end, or if it
        has a task."""
        self._wait(lambda: self._num_wanted > index or self._task is not None, timeout_s)
        with self._changed:
            return self._num_wanted > index and not self._is_over

    def await_end(self, timeout_s: float) -> None:
        """Wait until the stream has ended or has a task, at most so long."""
        self._wait(lambda: self._task is not None, timeout_s)

    def take_task(self) -> Word | None:
        """What the stream waits for, to be answered; None for nothing."""
        with self._changed:
            task, self._task = self._task, None
            return task

    def answer(self, words: Sequence[Word]) -> None:
        """What all ranks reported of the task."""
        with self._changed:
            self._answer = words
            self._changed.notify_all()

    def _wait(self, holds: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._is_over, timeout_s)

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

    def ask(self, task: Word) -> Sequence[Word]:
        """Have all ranks do this; returns what they report, in their order.

        Raises:
            WeightsUnavailable: the push has ended.
        """
        with self._changed:
            self._task = task
            self._changed.notify_all()
            while self._answer is None and not self._is_over:
                self._changed.wait()
            words, self._answer = self._answer, None
            if words is None:
                raise WeightsUnavailable("the push has ended")
            return words

    def close(self) -> None:
        """End both sides; the stream calls it too."""
        with self._changed:
            if not self._is_over:
                self._over_s = time.monotonic()
            self._is_over = True
            self._changed.notify_all()
