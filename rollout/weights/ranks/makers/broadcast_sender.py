"""A rank other than 0 that broadcasts its share of the buckets, over the link of its own host.

The engines receive from rank 0 of a group, so each of these ranks has a group of its own with all
engines; the store through which it is joined runs in rank 0's process.

Always true: it joins and sends in the caller's thread, when rank 0 says that the engines wait; a
group is kept for the next push only after a push that succeeded.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.core.errors import WeightsUnavailable
from rollout.weights.push.transport_choice import NCCL_CUMEM
from rollout.weights.ranks.offered_buckets import JOIN
from rollout.weights.tensors.broadcast_root import BroadcastRoot
from rollout.weights.tensors.broadcast_sender import BroadcastPart, broadcast_parts, group_name
from rollout.weights.tensors.flat_buffers import FlatLayoutCache, Flattener
from rollout.weights.tensors.tensor_sources import Pairs

Word = Mapping[str, Any]


@dataclass(slots=True)
class SenderGroup:
    """The group of this rank, from push to push.

    Attributes:
        first: name of the first sender's group; empty if there is none.
        takes_flat: its engines accept many tensors in one broadcast.
        keeps: whether it can be used in the next push.
        layouts: of flat buckets, from earlier pushes.
    """

    first: str = ""
    root: BroadcastRoot | None = None
    takes_flat: bool = False
    keeps: bool = False
    layouts: FlatLayoutCache = field(default_factory=FlatLayoutCache)

    @property
    def kept(self) -> str:
        """``first``, if the group still is there: a trainer's ``destroy_process_group()`` ends all
        groups."""
        return self.first if self.root is not None and self.root.is_there else ""

    def close(self) -> None:
        """Leave the group."""
        root, self.root, self.first = self.root, None, ""
        if root is not None:
            root.close()


class BroadcastSender:
    """Broadcasts one bucket of ``num_senders``.

    Args:
        group: of this rank; joined again if rank 0 says so.
        turn: of this rank among the senders; rank 0 has the first.
        timeout_s: for one bucket, and for all engines to join.
        fingerprints: the method of the fingerprints that are taken; empty takes none.
    """

    def __init__(
        self,
        group: SenderGroup,
        *,
        rank: int,
        turn: int,
        num_senders: int,
        timeout_s: float,
        fingerprints: str,
    ) -> None:
        self._group = group
        self._rank = rank
        self._turn = turn
        self._num_senders = num_senders
        self._timeout_s = timeout_s
        self._fingerprints = fingerprints
        self._flatteners: list[Flattener] = []
        self._parts: list[BroadcastPart] = []

    def make(self, index: int, pairs: Pairs) -> dict[str, Any]:
        """The requests that the engines get for this rank's bucket; its tensors stay until they
        are sent."""
        if index % self._num_senders != self._turn:
            return {}
        root = self._group.root
        if root is None:
            raise WeightsUnavailable("it has no group with the engines")
        self._parts = list(
            broadcast_parts(
                pairs,
                root,
                self._each_its_own(),
                takes_flat=self._group.takes_flat,
                method=self._fingerprints,
            )
        )
        word: dict[str, Any] = {"parts": [part.payload for part in self._parts]}
        if self._fingerprints:
            word["fingerprints"] = dict(ChainMap(*(dict(one.fingerprints) for one in self._parts)))
        return word

    def carry_out(self, task: Word) -> dict[str, Any]:
        """Join the engines, or send them a part of the bucket, if the task is this rank's."""
        try:
            if task["do"] == JOIN:
                self._join(task["terms"])
            elif task["sender"] == self._rank:
                assert self._group.root is not None
                self._group.root.send(self._parts[task["part"]].tensors)
                if task["part"] == len(self._parts) - 1:
                    self._parts = []
        except WeightsUnavailable as error:
            # The engines' end of it is known to the server, which ends the push.
            return {"why_not": f"rank {self._rank}: {error}"}
        return {}

    def keep(self) -> None:
        """After a push that has succeeded."""
        if self._group.keeps:
            self._group = SenderGroup()  # ``close`` leaves the kept one alone

    def close(self) -> None:
        """End a push; without ``keep`` the group is left."""
        self._parts, self._flatteners = [], []
        self._group.close()

    def _join(self, terms: Word) -> None:
        self._group.close()
        own = os.environ.get(NCCL_CUMEM)
        if terms["backend"] == "nccl" and own != terms["cumem"]:
            raise WeightsUnavailable(f"{NCCL_CUMEM} is {own}, and {terms['cumem']} on rank 0")
        root = BroadcastRoot(
            group_name(terms["first"], self._turn),
            terms["backend"],
            join_timeout_s=self._timeout_s,
            send_timeout_s=self._timeout_s,
        )
        root.join_at(terms)
        self._group.first, self._group.root = terms["first"], root
        self._group.takes_flat, self._group.keeps = terms["takes_flat"], terms["keeps"]

    def _each_its_own(self) -> Iterator[Flattener]:
        """The parts of a bucket are in memory together."""
        yield from self._flatteners
        while True:
            self._flatteners.append(Flattener(self._group.layouts))
            yield self._flatteners[-1]
