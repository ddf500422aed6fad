"""What one rank makes of each bucket of a push: its share for each payload, and of the copies for
the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rollout.config import Transport
from rollout.core.errors import WeightsUnavailable
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import PushDeltas
from rollout.weights.ranks.device_copies import DeviceCopies
from rollout.weights.ranks.messages import PushPlan
from rollout.weights.ranks.trainer_rank import TrainerRank
from rollout.weights.routes.buffers import PushBuffers
from rollout.weights.routes.choice import ENCODINGS, ROUTES
from rollout.weights.routes.rank_end import RankEnd, ShareBuilder
from rollout.weights.routes.route import Chosen
from rollout.weights.routes.shared_memory import BufferWriter
from rollout.weights.routes.trainer_groups import BroadcastSender
from rollout.weights.tensors.delta_base import DeltaPush, deltas_in
from rollout.weights.tensors.sources import Pairs

Made = Mapping[str, Mapping[str, Any]]
"""Payload -> this rank's share of a bucket for it."""


class RankShares:
    """One rank's ends of the routes of a push.

    Args:
        resources: what it opens is closed with them.
        gpu: UUID of the GPU with the tensors; empty if they are in host memory.
        expected: the model's tensors, if they are known.
        timeout_s: for one bucket, and for all engines to join a group; None for the configured.

    Attributes:
        buffers: files that stay until the push has ended; None if it needs none.
        delta_push: what changes the copies of the engines' weights; None if none are kept.
        deltas: what engines get as deltas, if the store gets copies.
    """

    def __init__(
        self,
        rank: TrainerRank,
        plan: PushPlan,
        resources: ExitStack,
        *,
        gpu: str,
        expected: Manifest | None,
        timeout_s: float | None,
    ) -> None:
        self.plan = plan
        self.buffers = _buffers(rank, plan, resources)
        self.delta_push: DeltaPush | None = None
        self.deltas: PushDeltas | None = None
        self._rank = rank
        end = RankEnd(
            rank.rank,
            rank.writers,
            gpu,
            plan.terms,
            self.buffers or rank.pool,
            rank.idle_group,
            rank.config,
            timeout_s or rank.config.weights.group_timeout_s,
        )
        self._builders = _open_builders(end, plan.routes, resources)
        self._copies = self._store_copies(end, resources)
        self._begin_delta(expected)

    def builder(self, payload: str) -> ShareBuilder:
        """Of the route with this payload."""
        return self._builders[payload]

    @property
    def sender(self) -> BroadcastSender | None:
        """Broadcasts in a group of this rank; None if rank 0 does, or none."""
        builder = self._builders.get(Transport.DISTRIBUTED)
        return builder if isinstance(builder, BroadcastSender) else None

    def make(
        self, index: int, pairs: Pairs, is_last: bool
    ) -> tuple[Made, Pairs, Mapping[str, Any]]:
        """This rank's shares of a bucket, what the bucket changes, and its share of the copies."""
        changes = self._changes_of(pairs)
        written = _encoded(pairs, changes, self.plan.routes)
        made: dict[str, Mapping[str, Any]] = {}
        for payload, builder in self._builders.items():
            if (share := builder.make(index, written[payload])) is not None:
                made[payload] = share
        del written
        return made, changes, self._copy(index, pairs, is_last)

    def succeed(self) -> None:
        """After a push that succeeded: stay in the group, and take the copies for its version."""
        self._rank.delta_base.succeed(self.delta_push)
        if self.sender is not None:
            self.sender.stay()

    def _store_copies(
        self, end: RankEnd, resources: ExitStack
    ) -> BufferWriter | DeviceCopies | None:
        """Writes copies for the store; None if it reads the files of the push, or has no part."""
        plan = self.plan
        if plan.store is None or not plan.store.is_offered or end.own_host != 0:
            return None
        whole = [self._builders.get(chosen.payload) for chosen in plan.routes if chosen.is_full]
        if any(isinstance(one, BufferWriter) for one in whole):
            return None
        copies = DeviceCopies(end) if end.gpu else BufferWriter.of(end, plan.terms.fingerprints)
        resources.callback(copies.close)
        return copies

    def _begin_delta(self, expected: Manifest | None) -> None:
        """Keep copies of what engines get from this rank, if the next push may be a delta."""
        copies, plan = self._rank.delta_base, self.plan
        own = [one for one in plan.routes if one.payload in self._builders]
        if not any(one.is_copied for one in own):
            copies.drop()
            return
        base = None if all(one.is_full for one in own) else copies.version
        known = {} if expected is None else expected.tensors
        self.delta_push = DeltaPush(plan.terms.version, base, known)
        copies.begin(self.delta_push)
        if base is not None and plan.store is not None:
            self.deltas = PushDeltas(base, {})

    def _changes_of(self, pairs: Pairs) -> Pairs:
        """What a bucket changes of the version that the engines hold: all of it, if no copies are
        kept or it is sent whole."""
        if self.delta_push is None:
            return pairs
        changes = self._rank.delta_base.take(self.delta_push, pairs)
        if self.deltas is not None:
            self.deltas.deltas.update(deltas_in(changes))
        return changes

    def _copy(self, index: int, pairs: Pairs, is_last: bool) -> Mapping[str, Any]:
        """This rank's share of the copies for the store; an error does not end the push."""
        copies = self._copies
        if copies is None:
            return {}
        try:
            made = copies.make(index, pairs)
        except WeightsUnavailable as error:
            return {"why_not": str(error)}
        if is_last and isinstance(copies, DeviceCopies):
            copies.finish()
        return made or {}


def _buffers(rank: TrainerRank, plan: PushPlan, resources: ExitStack) -> PushBuffers | None:
    """Files that stay until the push has ended; None if it needs none."""
    is_stored = plan.store is not None and rank.hosts[rank.rank] == 0
    if not (is_stored or plan.at_once or plan.is_copied):
        return None
    if plan.store is not None and is_stored:
        rank.copies.free(plan.store.reads)
    buffers = PushBuffers(rank.pool)
    if is_stored:
        # The store reads them after the push, so the next push frees them.
        resources.callback(rank.copies.add, plan.terms.version, buffers)
    else:
        resources.callback(buffers.release)
    return buffers


def _open_builders(
    end: RankEnd, routes: Sequence[Chosen], resources: ExitStack
) -> dict[str, ShareBuilder]:
    builders: dict[str, ShareBuilder] = {}
    for chosen in routes:
        if (builder := ROUTES[chosen.transport].open(end, chosen)) is not None:
            resources.callback(builder.close)
            builders[chosen.payload] = builder
    return builders


def _encoded(pairs: Pairs, changes: Pairs, routes: Sequence[Chosen]) -> dict[str, Pairs]:
    """A bucket as each payload gets it; one encoding is made once."""
    names = {chosen.encoding for chosen in routes}
    written = {name: ENCODINGS[name].encode(pairs, changes) for name in names}
    return {chosen.payload: written[chosen.encoding] for chosen in routes}
