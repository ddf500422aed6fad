"""Copies of buckets on a GPU, for the store, beside a push by another route.

Always true: the push does not wait for a copy but at its end, or for one that is two buckets old;
a bucket's tensors stay until they are copied; nothing is hashed, which the store does when it reads
the copies after the push.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from engines.tensors.torch_fingerprint import as_bytes
from rollout.weights.routes.cuda_ipc import device_of
from rollout.weights.routes.rank_end import RankEnd
from rollout.weights.routes.route import BUCKETS_AHEAD
from rollout.weights.tensors.sources import Pairs


class DeviceCopies:
    """One rank's copies in one push, of each bucket that is its own.

    The copies run on a stream of their own, into buffers that the pool has pinned.

    Args:
        gpu: UUID of the GPU with the tensors.
    """

    def __init__(self, end: RankEnd, gpu: str) -> None:
        self._pool = end.buffers
        self._first, self._num_writers = end.writers.index(end.rank), len(end.writers)
        self._device = device_of(gpu)
        self._stream = torch.cuda.Stream(self._device)
        self._under_way: list[tuple[Any, Pairs]] = []

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any] | None:
        """Begin to copy a bucket, if it is this rank's; ``path`` is complete after ``finish``."""
        if index % self._num_writers != self._first:
            return None
        self._finish(but=BUCKETS_AHEAD)
        layout = self._pool.layouts.of(pairs.specs)
        buffer = self._pool.take(layout.num_bytes)
        buffer.write_header(layout.header)
        file = torch.frombuffer(buffer.view, dtype=torch.uint8)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for begin, size, tensor in zip(layout.begins, layout.sizes, pairs.tensors, strict=True):
                file[begin : begin + size].copy_(as_bytes(tensor), non_blocking=True)
            self._under_way.append((self._stream.record_event(), pairs))
        return {"path": str(buffer.folder), "fingerprints": {}}

    def finish(self) -> None:
        """Wait for all copies: after the last bucket the trainer may change its tensors."""
        self._finish(but=0)

    def _finish(self, *, but: int) -> None:
        while len(self._under_way) > but:
            self._under_way[0][0].synchronize()
            del self._under_way[0]

    def close(self) -> None:
        """The push has ended; its buffers stay with who has given them."""
        self.finish()
