"""Receive broadcast buckets and copy them into the parameters.

Always true: a bucket that does not fit the model is refused before its group takes part in the
broadcast, and encoded tensors that do not when they were received; it changes the model only after
all of it was received and checked.

A model of experts has ten thousands of small tensors: they are copied by address, and the plan
is made once, since a trainer pushes the same buckets again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.embedded.memory.batched_copy import Copy, copy_all, joined
from engines.embedded.weights.model_weights import ModelWeights
from engines.tensors.collective.bucket import BucketContent, Piece, parts_of, pieces_of
from engines.tensors.collective.buffers import BucketBuffers, finished
from engines.tensors.collective.groups import UpdateGroups

# Some hundred bytes each.
_MOST_KEPT_TENSORS = 1 << 16


@dataclass(frozen=True, slots=True)
class ReceivePlan:
    """Where the bytes of one bucket go.

    Attributes:
        pieces: its tensors, where they are received.
        copies: out of the buffer into the parameters.
        others: pieces that are no copies: on a device, of another dtype, or encoded.
    """

    content: BucketContent
    pieces: Sequence[Piece]
    num_bytes: int
    copies: Sequence[Copy]
    others: Sequence[Piece]


class BroadcastReceiver:
    """Receives buckets for one model.

    Attributes:
        groups: the update groups it is in.
    """

    def __init__(self, weights: ModelWeights, device: torch.device) -> None:
        self._weights = weights
        self.groups = UpdateGroups(device)
        self._buffers = BucketBuffers(device)
        self._plans: dict[tuple[str, int, bool], ReceivePlan] = {}

    def plan(self, content: BucketContent) -> ReceivePlan:
        """The plan for such a bucket.

        Raises:
            Invalid: it does not fit the model.
        """
        key = content.names[0] if content.names else "", len(content.names), content.is_flat
        known = self._plans.get(key)
        if known is not None and known.content == content:
            return known
        plan = self._planned(content)
        if sum(size for _, size, _ in self._plans) + len(content.names) > _MOST_KEPT_TENSORS:
            self._plans.clear()  # those of earlier pushes
        self._plans[key] = plan
        return plan

    def take(self, plan: ReceivePlan) -> torch.Tensor:
        """Memory for this bucket, until it is delivered."""
        return self._buffers.take(plan.num_bytes)

    def parts(self, plan: ReceivePlan, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that are broadcast, in order."""
        return parts_of(plan.pieces, buffer, is_flat=plan.content.is_flat)

    def deliver(self, plan: ReceivePlan, buffer: torch.Tensor) -> None:
        """Overwrite the parameters; the memory may be taken again.

        Raises:
            Invalid: an encoded tensor is not for these weights; nothing was updated.
        """
        changes = self._weights.changes([(piece.name, piece.of(buffer)) for piece in plan.others])
        copy_all(buffer.data_ptr(), plan.copies)
        for change in changes:
            change()
        if changes:
            finished(buffer.device)
        self._buffers.give(buffer)

    def free(self) -> None:
        """Free the memory: the push has ended."""
        self._buffers.drop()

    @property
    def num_bytes(self) -> int:
        """Memory kept for the next bucket."""
        return self._buffers.num_bytes

    def _planned(self, content: BucketContent) -> ReceivePlan:
        pieces = pieces_of(content)
        self._weights.check((piece.name, piece.shape, piece.dtype) for piece in pieces)
        copies: list[Copy] = []
        others = []
        for piece in pieces:
            location = self._weights.locations.get(piece.name)
            if location is None or location.dtype != piece.dtype:
                others.append(piece)
            else:
                copies.append((location.address, piece.begin, location.num_bytes))
        return ReceivePlan(content, pieces, pieces[-1].end, joined(copies), others)
