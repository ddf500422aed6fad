"""One rank's part of a bucket, by transport: what it makes, and how rank 0 joins the parts.

Always true: the memory of a bucket is used again only after the engines have applied it; ``close``
frees all of it, in any state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollout.core.errors import WeightMismatch
from rollout.weights.push.held_buffers import HeldBuffers
from rollout.weights.push.shm_buffers import ShmBuffer, ShmBufferPool
from rollout.weights.push.stream_server import BUCKETS_AHEAD, StreamedBucket
from rollout.weights.ranks.rank_sources import content_of
from rollout.weights.tensors.bucket_writer import write_shm_buffer
from rollout.weights.tensors.tensor_sources import Pairs

Word = Mapping[str, Any]
GatheredBucket = tuple[Pairs, bool]
"""Whole tensors, and whether they are the last."""


class BucketMaker(Protocol):
    """Makes one rank's part of every bucket of a push."""

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        """This rank's part, as a word for rank 0."""
        ...

    def joined(
        self, words: Sequence[Word], is_last: bool
    ) -> StreamedBucket | GatheredBucket | None:
        """On rank 0: the bucket, from the words of all ranks; None if the engines wait for more."""
        ...

    def close(self) -> None: ...


class SharedMemoryMaker:
    """The ranks of a host write its buckets in turn, each one bucket of ``num_writers``.

    Args:
        turn: of this rank among the writers; None if it writes none.
        fingerprints: the method of the fingerprints that are taken; empty takes none.
    """

    def __init__(
        self,
        pool: ShmBufferPool | HeldBuffers,
        *,
        turn: int | None,
        num_writers: int,
        fingerprints: str,
    ) -> None:
        self._pool = pool
        self._turn = turn
        self._num_writers = num_writers
        self._fingerprints = fingerprints
        self._taken: dict[int, ShmBuffer] = {}

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        # The engines have asked for this bucket, so they have applied those before the last.
        for applied in [made for made in self._taken if made < index - BUCKETS_AHEAD]:
            self._pool.give(self._taken.pop(applied))
        if self._turn is None or index % self._num_writers != self._turn:
            return {}
        self._taken[index], found = write_shm_buffer(pairs, self._pool, method=self._fingerprints)
        return {
            "path": str(self._taken[index].folder),
            "fingerprints": dict(found),
            "num_bytes": self._taken[index].num_bytes,
        }

    def joined(self, words: Sequence[Word], is_last: bool) -> StreamedBucket:
        word = next(word for word in words if "path" in word)
        return StreamedBucket({"path": word["path"]}, is_last, word["fingerprints"])

    def close(self) -> None:
        while self._taken:
            self._pool.give(self._taken.popitem()[1])


class RankZeroMaker:
    """Rank 0 sends every bucket by itself; the others only gather."""

    def __init__(self) -> None:
        self._pairs: Pairs | None = None

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        self._pairs = pairs
        return {}

    def joined(self, words: Sequence[Word], is_last: bool) -> GatheredBucket:
        pairs, self._pairs = self._pairs, None
        assert pairs is not None
        return pairs, is_last

    def close(self) -> None:
        self._pairs = None


def check_same(words: Sequence[Word]) -> None:
    """Raise if the ranks made different tensors of one bucket.

    Raises:
        WeightMismatch: the ranks that differ from rank 0.
    """
    wrong = [
        rank
        for rank, word in enumerate(words)
        if (word["content"], word["is_last"]) != (words[0]["content"], words[0]["is_last"])
    ]
    if wrong:
        raise WeightMismatch(
            f"rank {', '.join(map(str, wrong[:8]))} gathered other tensors than rank 0 in one "
            "bucket; all ranks must push the same names in the same order"
        )


def with_content(word: dict[str, Any], pairs: Pairs, is_last: bool) -> dict[str, Any]:
    """A rank's word about a bucket, with what ``check_same`` compares."""
    return {**word, "content": content_of(pairs), "is_last": is_last}
