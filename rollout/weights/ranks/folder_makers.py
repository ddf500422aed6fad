"""Makers of a push that the engines load in one call, from one folder, when all is written.

Always true: ``joined`` returns the folder with the last bucket, and None before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.weights.push.held_buffers import HeldBuffers
from rollout.weights.push.stream_server import StreamedBucket
from rollout.weights.ranks.bucket_makers import SharedMemoryMaker, Word
from rollout.weights.tensors import CheckpointWriter
from rollout.weights.tensors.tensor_sources import Pairs


class JoinedMaker:
    """The ranks of a host write the buckets in turn; rank 0 joins their folders.

    Args:
        held: what ``maker`` writes into.
        releases: whether nothing reads the buffers after the push.
    """

    def __init__(self, maker: SharedMemoryMaker, held: HeldBuffers, *, releases: bool) -> None:
        self._maker = maker
        self._held = held
        self._releases = releases
        self._folders: list[Path] = []
        self._fingerprints: dict[str, str] = {}

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        return self._maker.make(index, pairs)

    def joined(self, words: Sequence[Word], is_last: bool) -> StreamedBucket | None:
        bucket = self._maker.joined(words, is_last)
        self._folders.append(Path(path_of(bucket)))
        self._fingerprints |= bucket.fingerprints
        if not is_last:
            return None
        folder = self._held.joined(self._folders)
        return StreamedBucket({"path": str(folder)}, True, self._fingerprints)

    def close(self) -> None:
        if self._releases:
            self._held.release()


class CheckpointMaker:
    """Rank 0 writes the checkpoint of this version; the others only gather.

    Args:
        writer: None on the other ranks.
    """

    def __init__(self, writer: CheckpointWriter | None) -> None:
        self._writer = writer

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.add(pairs)
        return {}

    def joined(self, words: Sequence[Word], is_last: bool) -> StreamedBucket | None:
        assert self._writer is not None
        if not is_last:
            return None
        path = self._writer.finish()
        return StreamedBucket({"path": str(path)}, True, self._writer.fingerprints)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.drop()


def path_of(bucket: StreamedBucket) -> str:
    """The folder of a bucket that engines load by its path."""
    assert not isinstance(bucket.payload, bytes)
    return str(bucket.payload["path"])
