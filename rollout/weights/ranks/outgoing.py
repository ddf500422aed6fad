"""On rank 0: buckets of which all ranks have made their share, on their way to the engines.

Always true: a bucket's tensors are let go of before the next bucket is taken; copies for the store
that are not complete are never offered to it, and the push goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from rollout.config import Transport, WeightUpdate
from rollout.weights.format.encoding import EncodedPush
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.ranks.messages import Share
from rollout.weights.routes.cuda_ipc import use_stream
from rollout.weights.routes.route import Payload, StreamedBucket
from rollout.weights.routes.shared_memory import ByPath
from rollout.weights.routes.trainer_groups import BroadcastPush
from rollout.weights.tensors.sources import Pairs

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfferedBucket:
    """One bucket that all ranks have made.

    Attributes:
        pairs: what rank 0 broadcasts of it.
        payloads: what the engines get one after the other, by the payload's name.
    """

    pairs: Pairs
    is_last: bool
    payloads: Sequence[Mapping[str, Payload]] = ({},)
    fingerprints: Mapping[str, str] = field(default_factory=dict)


class BucketQueue(Generic[T]):
    """An iterable for a stream's thread, filled from another thread.

    Gathers are collectives, so they run in the caller's thread; the stream sends in its own.

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
        """Wait until the stream asks for this bucket; false at the deadline, or at its end."""
        self._wait(lambda: self._num_wanted > index, timeout_s)
        with self._changed:
            return self._num_wanted > index and not self._is_over

    def await_end(self, timeout_s: float) -> None:
        """Wait until the stream has ended, at most so long."""
        self._wait(lambda: False, timeout_s)

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

    def close(self) -> None:
        """End both sides; the stream calls it too."""
        with self._changed:
            if not self._is_over:
                self._over_s = time.monotonic()
            self._is_over = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class OutgoingStream:
    """The buckets of a push, for its stream; iterated in the stream's thread.

    Attributes:
        broadcast: sends rank 0's tensors to the engines that take a broadcast.
        is_single: all engines get the same, so a bucket is that alone.
        payload: the name of what the engines get with a broadcast.
        device_stream: of the thread that pushes, see ``use_stream``.
    """

    offered: BucketQueue[OfferedBucket] | Iterable[OfferedBucket]
    broadcast: BroadcastPush | None = None
    is_single: bool = False
    payload: str = Transport.DISTRIBUTED
    device_stream: Any | None = None

    def __iter__(self) -> Iterator[StreamedBucket]:
        use_stream(self.device_stream)
        if self.broadcast is not None:
            self.broadcast.join()
        for bucket in self.offered:
            parts = self._parts(bucket)
            del bucket
            for part in parts:
                yield part if not self.is_single else _alone(part)
                del part
            del parts

    def close(self) -> None:
        """The stream has ended: let go of the last bucket."""
        close = getattr(self.offered, "close", None)
        if close is not None:
            close()

    def _parts(self, bucket: OfferedBucket) -> Iterator[StreamedBucket]:
        *before, payload = bucket.payloads
        is_last, fingerprints = bucket.is_last, bucket.fingerprints
        for early in before:
            yield StreamedBucket(early, is_last=False)
        if self.broadcast is None:
            del bucket
            yield StreamedBucket(payload, is_last, fingerprints)
            return
        parts = self.broadcast.parts(bucket.pairs)
        del bucket
        for part in parts:
            # The other engines get the whole bucket with its last part.
            ways = {**(payload if part.is_last else {}), self.payload: part.payload}
            found = {**part.fingerprints, **fingerprints}
            yield replace(part, payload=ways, is_last=part.is_last and is_last, fingerprints=found)
            del part


def _alone(part: StreamedBucket) -> StreamedBucket:
    """A bucket whose only payload is for all engines."""
    assert isinstance(part.payload, Mapping)
    (payload,) = part.payload.values()
    return replace(part, payload=payload)


class CopiedPush:
    """The copies of a push, bucket by bucket, which the store reads after the push."""

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._paths: list[str] = []
        self._fingerprints: dict[str, str] = {}
        self._why_not = ""

    def add(
        self, shares: Sequence[Share], hosts: Sequence[int], specs: Sequence[TensorSpec]
    ) -> None:
        """What the ranks of rank 0's host have written of a bucket.

        Args:
            hosts: for each rank, the lowest one on its host.
            specs: the tensors of the bucket.
        """
        self._specs += specs
        own = f"{Transport.SHARED_MEMORY} 0"
        for share, host in zip(shares, hosts, strict=True):
            # Without a copy of its own, the engines read the same files.
            copy = share.copy or share.made.get(own, {})
            if host == 0 and "why_not" in copy:
                self._why_not = copy["why_not"]
            elif host == 0 and "path" in copy:
                self._paths.append(copy["path"])
                self._fingerprints |= copy["fingerprints"]

    def push(self, version: int, encoded: EncodedPush | None = None) -> WeightPush | None:
        """The copies as a push that the store can read, or None if they are not complete."""
        if self._why_not:
            logger.warning("store: weight version %d is not kept: %s", version, self._why_not)
            return None
        manifest = Manifest(Manifest.of(self._specs).tensors, self._fingerprints)
        payloads = [{"path": path} for path in self._paths]
        full = WeightUpdate.FULL
        return WeightPush(version, manifest, payloads, ByPath(), contents=full, encoded=encoded)
