"""Folders that the engines load in one call, when all buckets of a push are written.

Always true: ``joined`` returns a bucket with the folder for the last one, and None before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rollout.config import Transport
from rollout.weights.push.held_buffers import HeldBuffers
from rollout.weights.ranks.carrier_choice import Chosen
from rollout.weights.ranks.offered_buckets import OfferedBucket
from rollout.weights.tensors import CheckpointWriter
from rollout.weights.tensors.tensor_sources import Pairs


class OneFolder(Protocol):
    """On rank 0: collects the buckets of a push."""

    def joined(self, bucket: OfferedBucket) -> OfferedBucket | None:
        """What the engines get after this bucket; None if they wait for more."""
        ...


class JoinedFolders:
    """Joins the folders that the ranks of rank 0's host write in turn.

    Args:
        held: the buffers of rank 0.
    """

    _WAY = Chosen(Transport.SHARED_MEMORY).way

    def __init__(self, held: HeldBuffers) -> None:
        self._held = held
        self._folders: list[Path] = []
        self._fingerprints: dict[str, str] = {}

    def joined(self, bucket: OfferedBucket) -> OfferedBucket | None:
        self._folders.append(Path(bucket.payload[self._WAY]["path"]))
        self._fingerprints |= bucket.fingerprints
        if not bucket.is_last:
            return None
        folder = self._held.joined(self._folders)
        payload = {self._WAY: {"path": str(folder)}}
        return replace(bucket, payload=payload, fingerprints=self._fingerprints)


class CheckpointMaker:
    """On rank 0: writes the checkpoint of this version; the other ranks only gather."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        self._writer.add(pairs)
        return {}

    def joined(self, bucket: OfferedBucket) -> OfferedBucket | None:
        if not bucket.is_last:
            return None
        payload = {Chosen(Transport.DISK).way: {"path": str(self._writer.finish())}}
        return replace(bucket, payload=payload, fingerprints=self._writer.fingerprints)

    def close(self) -> None:
        self._writer.drop()
