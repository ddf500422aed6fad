"""Pushed buckets that a trainer broadcasts through a group of torch's, beside vLLM's own groups.

Always true: a bucket is checked before its group takes part in the broadcast; joining and
receiving have deadlines (``update_groups``), so a trainer that is gone or late ends the request
with an error; nothing in a request is executed.  Not tested with NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from engines.tensors.collective.bucket import BroadcastRefused, content_of, parts_of, pieces_of
from engines.tensors.collective.buffers import BucketBuffers
from engines.tensors.collective.groups import UpdateGroups


class PushedBroadcasts:
    """One worker's groups, and the memory that buckets come into.

    Attributes:
        groups: those that it is in.
    """

    def __init__(self, device: torch.device) -> None:
        self.groups = UpdateGroups(device)
        self._buffers = BucketBuffers(device)
        self._filled: torch.Tensor | None = None

    def receive(
        self,
        asked: Mapping[str, Any],
        check: Callable[[Mapping[str, Sequence[int]]], None],
    ) -> dict[str, torch.Tensor]:
        """The tensors of a bucket, as views of memory that is theirs until ``done``.

        Args:
            asked: ``names``, ``dtypes``, ``shapes``, ``group_name`` and ``load_format``, as in
                SGLang's ``update_weights_from_distributed``.
            check: gets the shapes by name, and raises if the model does not take them.

        Raises:
            BroadcastRefused: no trainer sends such a bucket, the worker is not in the group, or the
                broadcast failed; the group is then left.
        """
        content = content_of(asked)
        pieces = pieces_of(content)
        check({piece.name: piece.shape for piece in pieces})
        buffer = self._buffers.take(pieces[-1].end)
        parts = parts_of(pieces, buffer, is_flat=content.is_flat)
        self.groups.receive(parts, group_name=str(asked.get("group_name")))
        self._filled = buffer
        return {piece.name: piece.of(buffer) for piece in pieces}

    def done(self) -> None:
        """Nothing refers to the last bucket any more: the next one may overwrite it."""
        buffer, self._filled = self._filled, None
        if buffer is not None:
            self._buffers.give(buffer)

    def free(self) -> None:
        """Free the memory: the push has ended."""
        self._filled = None
        self._buffers.drop()

    def leave_all(self) -> None:
        for name in self.groups.names():
            with suppress(BroadcastRefused):  # its rank 0 is gone, and it was left
                self.groups.leave(name)
