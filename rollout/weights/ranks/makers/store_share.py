"""Copies of a push for the store, on rank 0's host.

Always true: each rank of that host writes its share, and an error in that does not end the push.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.core.errors import WeightsUnavailable
from rollout.weights.push.copied_push import CopiedPush
from rollout.weights.ranks.makers.bucket_makers import SharedMemoryMaker
from rollout.weights.tensors.tensor_sources import Pairs

Word = Mapping[str, Any]


class ShareCopier:
    """Writes this rank's share of the copies, where no engine gets a file from this host."""

    def __init__(self, maker: SharedMemoryMaker) -> None:
        self._maker = maker

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        """This rank's part, as a word for rank 0."""
        try:
            return {"copy": self._maker.make(index, pairs)}
        except WeightsUnavailable as error:
            return {"copy": {"why_not": str(error)}}

    def close(self) -> None:
        self._maker.close()


def add_copies(copied: CopiedPush, words: Sequence[Word], hosts: Sequence[int]) -> None:
    """Add what the ranks of rank 0's host reported of a bucket.

    Args:
        hosts: of each rank, as ``RankLink.hosts`` returns them.
    """
    for word, host in zip(words, hosts, strict=True):
        # Without a copy of its own, the engines read the same files.
        copy = word.get("copy") or word
        if host != 0:
            continue
        if "why_not" in copy:
            copied.give_up(copy["why_not"])
        elif "path" in copy:
            copied.add(copy["path"], copy["fingerprints"])
