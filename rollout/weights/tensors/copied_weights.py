"""Copies of what one process streams, for the store."""

from __future__ import annotations

from collections.abc import Iterator

from engines.tensors.fingerprint import BYTES
from rollout.core.errors import WeightsUnavailable
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.copied_push import CopiedPush
from rollout.weights.push.held_buffers import HeldBuffers
from rollout.weights.tensors.bucket_writer import write_shm_buffer
from rollout.weights.tensors.tensor_sources import BucketsOfTensors, Pairs


class CopiedWeights:
    """The same tensors; each bucket is copied when it is gathered.

    An error of a copy does not end the push.

    Attributes:
        copied: where the copies are.
    """

    def __init__(self, weights: BucketsOfTensors, held: HeldBuffers) -> None:
        self._weights = weights
        self._held = held
        self.copied = CopiedPush()

    @property
    def is_on_cuda(self) -> bool:
        return self._weights.is_on_cuda

    @property
    def manifest(self) -> Manifest:
        return self._weights.manifest

    def gathered(self, most_bytes: int | None = None) -> Iterator[tuple[Pairs, bool]]:
        """Each bucket's whole tensors, and whether it is the last."""
        for pairs, is_last in self._weights.gathered(most_bytes):
            self._copy(pairs)
            yield pairs, is_last
            del pairs

    def _copy(self, pairs: Pairs) -> None:
        self.copied.has_tensors(pairs.specs)
        try:
            buffer, found = write_shm_buffer(pairs, self._held, method=BYTES)
        except WeightsUnavailable as error:
            self.copied.give_up(str(error))
        else:
            self.copied.add(str(buffer.folder), found)
