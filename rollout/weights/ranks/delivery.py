"""How a push is delivered: a pure function of facts that rank 0 has gathered before.

Always true: a route that reads the trainer's own tensors gets them streamed; an adapter, a
checkpoint and what is loaded in one call are complete before the server is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollout.config import Transport, WeightUpdate
from rollout.weights.routes.choice import is_only_streamed
from rollout.weights.routes.route import Chosen


class Delivery(StrEnum):
    """Who reads which bytes when.

    Attributes:
        COPIED: all buckets are made before the server is called: the trainer may change its
            tensors.
        STREAMED: each bucket is made while engines load the one before it: the tensors must not
            change until the push has ended.
        ONE_LOAD: copied, and engines load all buckets in one call.
    """

    COPIED = "copied"
    STREAMED = "streamed"
    ONE_LOAD = "one_load"


class StoreFiles(StrEnum):
    """What the ranks of rank 0's host keep for the store, which reads it after the push.

    Attributes:
        NONE: nothing.
        PUSHED: the files that engines load, as part of the push.
        OFFERED: copies of whole tensors, which rank 0 offers.
    """

    NONE = "none"
    PUSHED = "pushed"
    OFFERED = "offered"


@dataclass(frozen=True, slots=True)
class PushFacts:
    """What the delivery depends on.

    Attributes:
        routes: one for each payload of a bucket.
        contents: the part of the model that is pushed.
        streams: the tensors do not change until the push has ended, and the settings stream it.
        loads_at_once: engines that load files should load them in one call.
        is_stored: the store keeps this push.
        can_check_copies: all values are in host memory, and the code that copies them can check
            them.
    """

    routes: tuple[Chosen, ...]
    contents: WeightUpdate = WeightUpdate.FULL
    streams: bool = True
    loads_at_once: bool = False
    is_stored: bool = False
    can_check_copies: bool = False

    @property
    def hosts(self) -> list[int]:
        """Hosts, each by its lowest rank, whose ranks write whole tensors into shared memory."""
        return sorted(
            route.host
            for route in self.routes
            if route.transport == Transport.SHARED_MEMORY and route.is_full
        )

    @property
    def is_rank_0s_files(self) -> bool:
        """Whether all engines get whole tensors in files of rank 0's host, which it can join."""
        return len(self.routes) == 1 and self.hosts == [0]

    @property
    def has_checkpoint(self) -> bool:
        return any(route.transport == Transport.DISK for route in self.routes)

    @property
    def has_only_plain_files(self) -> bool:
        """Whether all routes are files in shared memory that no encoding reads."""
        return all(
            route.transport == Transport.SHARED_MEMORY and not route.is_read
            for route in self.routes
        )

    @property
    def reads_trainer(self) -> bool:
        """Whether a route reads the trainer's own tensors."""
        return any(is_only_streamed(route.transport) for route in self.routes)


@dataclass(frozen=True, slots=True)
class DeliveryPlan:
    """What follows from the facts.

    Attributes:
        hashing_host: the host whose ranks take fingerprints as they write files, or None for none.
        writes_files: whole tensors are written to files.
        checks_values: writers of files check the values as they copy them, and no rank does else.
    """

    delivery: Delivery
    hashing_host: int | None
    writes_files: bool
    checks_values: bool
    store: StoreFiles


_RULES: Sequence[tuple[Callable[[PushFacts], bool], Delivery]] = (
    (lambda facts: facts.loads_at_once and facts.is_rank_0s_files, Delivery.ONE_LOAD),
    (lambda facts: facts.reads_trainer, Delivery.STREAMED),
    (lambda facts: facts.has_checkpoint, Delivery.COPIED),
    (lambda facts: facts.contents is WeightUpdate.LORA, Delivery.COPIED),
    (lambda facts: facts.streams, Delivery.STREAMED),
    (lambda facts: True, Delivery.COPIED),
)
"""The first that holds decides."""


def plan_delivery(facts: PushFacts) -> DeliveryPlan:
    """Decide how a push is delivered."""
    delivery = next(delivery for holds, delivery in _RULES if holds(facts))
    is_copied = delivery is not Delivery.STREAMED
    is_checked = is_copied and facts.can_check_copies and facts.has_only_plain_files
    return DeliveryPlan(
        delivery=delivery,
        hashing_host=facts.hosts[0] if facts.hosts else None,
        writes_files=bool(facts.hosts) or facts.has_checkpoint,
        checks_values=is_checked,
        store=_store_files(facts, is_copied=is_copied),
    )


def _store_files(facts: PushFacts, *, is_copied: bool) -> StoreFiles:
    if not facts.is_stored:
        return StoreFiles.NONE
    if not (is_copied and len(facts.routes) == 1 and facts.routes[0].is_full):
        return StoreFiles.OFFERED
    # The store reads the push itself, whose files in shared memory stay for that.
    return StoreFiles.PUSHED if facts.hosts else StoreFiles.NONE
