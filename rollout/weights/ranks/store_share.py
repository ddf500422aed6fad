"""Copies of a push for the store, beside a transport that leaves none on the host.

Always true: each rank of rank 0's host writes its share, and an error in that does not end the
push.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.core.errors import WeightsUnavailable
from rollout.weights.push.copied_push import CopiedPush
from rollout.weights.push.stream_server import StreamedBucket
from rollout.weights.ranks.bucket_makers import GatheredBucket, SharedMemoryMaker, Word
from rollout.weights.ranks.folder_makers import path_of
from rollout.weights.tensors.tensor_sources import Pairs


class ShareCopier:
    """Writes this rank's share of the copies."""

    def __init__(self, maker: SharedMemoryMaker) -> None:
        self._maker = maker

    def copied(self, index: int, pairs: Pairs) -> dict[str, Any]:
        """This rank's part, as a word for rank 0."""
        try:
            return {"copy": self._maker.make(index, pairs)}
        except WeightsUnavailable as error:
            return {"copy": {"why_not": str(error)}}


def add_bucket(
    copied: CopiedPush, words: Sequence[Word], bucket: StreamedBucket | GatheredBucket | None
) -> None:
    """Add a bucket, as the engines get it, and what the ranks reported of it."""
    for copy in (word["copy"] for word in words if word.get("copy")):
        if "why_not" in copy:
            copied.give_up(copy["why_not"])
        else:
            copied.add(copy["path"], copy["fingerprints"])
    if isinstance(bucket, StreamedBucket):  # the engines read the same files
        copied.add(path_of(bucket), bucket.fingerprints)
