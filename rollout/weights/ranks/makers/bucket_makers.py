"""One rank's part of a bucket: what it makes for each of the ways that its engines are on.

Always true: the memory of a bucket is used again only after the engines have applied it; ``close``
frees all of it, in any state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pybase64
import torch

from rollout.core.errors import WeightMismatch
from rollout.weights.push.held_buffers import HeldBuffers
from rollout.weights.push.shm_buffers import ShmBuffer, ShmBufferPool
from rollout.weights.push.stream_server import BUCKETS_AHEAD
from rollout.weights.ranks.rank_sources import content_of
from rollout.weights.tensors.bucket_writer import write_shm_buffer
from rollout.weights.tensors.payload import ipc_handle
from rollout.weights.tensors.tensor_sources import Pairs

Word = Mapping[str, Any]


class BucketMaker(Protocol):
    """Makes one rank's part of every bucket of a push."""

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        """This rank's part, as a word for rank 0."""
        ...

    def close(self) -> None: ...


class SharedMemoryMaker:
    """The ranks of a host write its buckets in turn, each one bucket of ``num_writers``.

    Args:
        turn: of this rank among the writers.
        fingerprints: the method of the fingerprints that are taken; empty takes none.
    """

    def __init__(
        self,
        pool: ShmBufferPool | HeldBuffers,
        *,
        turn: int,
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
        if index % self._num_writers != self._turn:
            return {}
        self._taken[index], found = write_shm_buffer(pairs, self._pool, method=self._fingerprints)
        return {
            "path": str(self._taken[index].folder),
            "fingerprints": dict(found),
            "num_bytes": self._taken[index].num_bytes,
        }

    def close(self) -> None:
        while self._taken:
            self._pool.give(self._taken.popitem()[1])


class HandleMaker:
    """Flattens each bucket on this process's current GPU, for the engine rank on the same GPU."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._kept: dict[int, torch.Tensor] = {}

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        # As in ``SharedMemoryMaker``: the engines have applied what is freed here.
        self._free([made for made in self._kept if made < index - BUCKETS_AHEAD])
        made = ipc_handle(pairs, self._device)
        self._kept[index] = made.flat
        return {"handle": pybase64.b64encode_as_string(made.handle)}

    def close(self) -> None:
        self._free(list(self._kept))

    def _free(self, indices: Sequence[int]) -> None:
        for index in indices:
            del self._kept[index]
        if indices:
            torch.cuda.ipc_collect()


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
