"""Rank 0's decisions in a push: the plan, and what the engines get of each bucket.

A single process is rank 0 alone, so ``push_of_one_rank`` makes a push of its decisions.

How a push is delivered is decided in ``delivery``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, cycle, islice
from typing import Any

from engines.http.trace_context import current_traceparent
from engines.tensors.fingerprint import BYTES
from rollout.config import Transport, WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.core.pending import Pending
from rollout.core.types import PushStage, ServerStatus
from rollout.weights.format.lora_check import prefixed_manifest
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.push import Push, PushRequest
from rollout.weights.push.stream_server import PushStreamServer
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.ranks.delivery import Delivery, PushFacts, StoreFiles, plan_delivery
from rollout.weights.ranks.figures import PushFigures
from rollout.weights.ranks.follower import Encoders, Follower, digest_of
from rollout.weights.ranks.messages import PushPlan, Ready, Share, StorePlan
from rollout.weights.ranks.outgoing import CopiedPush, OfferedBucket, OutgoingStream
from rollout.weights.ranks.push_routes import PushRoutes, choose_routes, sizes_of
from rollout.weights.ranks.trainer_rank import ServerPort, TrainerRank
from rollout.weights.routes.adapter import ADAPTER
from rollout.weights.routes.broadcast import RootBuckets
from rollout.weights.routes.choice import ROUTES
from rollout.weights.routes.cuda_ipc import stream_of_thread
from rollout.weights.routes.disk import CheckpointBuilder
from rollout.weights.routes.route import (
    Chosen,
    Payload,
    PushTerms,
)
from rollout.weights.routes.shared_memory import joined_folder
from rollout.weights.routes.trainer_groups import BroadcastPush
from rollout.weights.tensors.adapters import AdapterSource
from rollout.weights.tensors.sources import Pairs, PlannedSource, TensorList

logger = logging.getLogger(__name__)

_MOST_COMPARED = 8
_COMPARED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PushEnd:
    """The steps that follow when the engines hold a push; it has none of the push's tensors.

    Attributes:
        routes: as the figures name them.
        copies: those of all ranks for the store, or None if it reads the push itself, or nothing.
        traceparent: the trainer's trace, in which the push was made.
    """

    version: int
    routes: str
    encoders: Encoders
    figures: PushFigures
    copies: CopiedPush | None
    server: ServerPort
    traceparent: str = field(default_factory=current_traceparent)

    def offer_copies(self) -> Pending[None] | None:
        """Offer the copies to the store, or None without copies."""
        parts = (encoder.stored for encoder in self.encoders.values())
        stored = next((part for part in parts if part is not None), None)
        push = None if self.copies is None else self.copies.push(self.version, stored)
        return None if push is None else self.server.offer_to_store(push)

    def record(self) -> Pending[None]:
        """Leave the figures to the timeline."""
        spans = self.figures.spans(self.version, self.routes)
        return self.server.record_push(
            [replace(span, traceparent=self.traceparent) for span in spans]
        )


class Leader:
    """Rank 0 in one push.

    Args:
        follower: its part as one of the ranks.
        contents: the part of the model that is pushed.
        may_stream: the tensors do not change until the push has ended.
        streams: a push that may be streamed is.
    """

    def __init__(
        self,
        server: ServerPort,
        follower: Follower,
        contents: WeightUpdate,
        *,
        may_stream: bool,
        streams: bool,
    ) -> None:
        self._server = server
        self.follower = follower
        self._contents = contents
        self._may_stream = may_stream
        self._streams = streams
        self._readies: Sequence[Ready] = ()
        self._routes = PushRoutes()
        self._plan: PushPlan | None = None
        # Of buckets that are complete before the engines are called.
        self._payloads: list[Mapping[str, Payload]] = []
        self._fingerprints: dict[str, str] = {}
        self.copies: CopiedPush | None = None

    @property
    def plan(self) -> PushPlan:
        """What was decided."""
        assert self._plan is not None
        return self._plan

    def decide(self, readies: Sequence[Ready]) -> PushPlan:
        """Decide on the push, from the messages of all ranks.

        Raises:
            WeightMismatch: the tensors do not fit the model; nothing was sent.
            ConfigError: the settings cannot be followed.
        """
        rank, weights = self.follower.rank, self.follower.rank.config.weights
        if weights.update is WeightUpdate.FROZEN:
            raise WeightMismatch("the server is frozen: its weights are never updated")
        status = self._server.status()
        self._readies = readies
        agreed = _agreed_version(readies)
        source = self.follower.source
        if isinstance(source, PlannedSource):
            rank.check(source.manifest, self._server.expected, self._contents)
        self._routes = self._choose(status)
        facts = self._facts()
        if facts.is_rank_0s_files:
            rank.loads.log()
        planned = plan_delivery(facts)
        # A route that takes less splits its own payload.
        most = max(ROUTES[route.transport].most_bytes for route in facts.routes)
        self._plan = PushPlan(
            terms=PushTerms(
                status.weight_version + 1 if agreed is None else agreed,
                self._fingerprint_method(writes_files=planned.writes_files),
                planned.hashing_host,
                checks_values=planned.checks_values,
            ),
            contents=self._contents,
            from_iterator=not isinstance(source, PlannedSource),
            delivery=planned.delivery,
            is_serving=status.gate == "open",
            has_before_kv=any(ready.has_before_kv for ready in readies),
            routes=facts.routes,
            bucket_bytes=min(weights.bucket_bytes, most),
            store=self._store_plan(planned.store),
            tensors=_unknown_to(readies, source) if isinstance(source, PlannedSource) else None,
            compared=self._choose_compared(),
        )
        return self._plan

    def _fingerprint_method(self, *, writes_files: bool) -> str:
        if self._contents is WeightUpdate.LORA:
            return BYTES  # an adapter stays with the server, for engines that restart
        return self._server.fingerprint_method(writes_files=writes_files)

    def _facts(self) -> PushFacts:
        """What the delivery depends on, when the routes are chosen."""
        rank, source = self.follower.rank, self.follower.source
        return PushFacts(
            self._routes.chosen,
            self._contents,
            self._streams,
            rank.loads.is_at_once,
            self._is_stored,
            can_check_copies=type(source) is PlannedSource
            and not rank.config.weights.allow_nonfinite
            and not any(ready.gpu for ready in self._readies)
            and source.can_check_copies(self.follower.model),
        )

    def _choose_compared(self) -> tuple[str, ...]:
        """The tensors that the ranks compare in this push."""
        rank, source = self.follower.rank, self.follower.source
        if rank.num_ranks == 1 or not isinstance(source, PlannedSource):
            return ()
        sizes = {name: own.nbytes for name, (_, own) in source.copies().items()}
        names = next_sample(sizes, rank.num_compared)
        rank.num_compared += len(names)
        return names

    def _choose(self, status: ServerStatus) -> PushRoutes:
        follower, rank = self.follower, self.follower.rank
        if isinstance(follower.source, AdapterSource):
            chosen = Chosen(ADAPTER, adapter=follower.adapter, config=follower.source.config)
            return PushRoutes((chosen,))
        return choose_routes(
            rank,
            self._readies,
            self._server.places(status),
            sizes_of(follower.source, self._server.expected),
            contents=self._contents,
            may_stream=self._may_stream,
            hosts_with_all=self._hosts_with_all(),
        )

    def _hosts_with_all(self) -> set[int]:
        """Hosts, each by its lowest rank, where the files of a push stay until its end."""
        rank = self.follower.rank
        if not self._streams:
            return set(rank.hosts)
        is_read = self._is_stored or rank.loads.is_at_once
        return {0} if is_read else set()  # by rank 0, which joins them, or by the store

    @property
    def _is_stored(self) -> bool:
        """Whether rank 0's host keeps a copy for the store."""
        stores = self.follower.rank.config.weights.store is not None
        return stores and self._contents is WeightUpdate.FULL

    def _store_plan(self, files: StoreFiles) -> StorePlan | None:
        """How rank 0's host keeps the push for the store, or None if it need not."""
        if files is StoreFiles.NONE:
            return None
        is_offered = files is StoreFiles.OFFERED
        if is_offered:
            self.copies = CopiedPush()
        reads = self._server.make_way_in_store(str(self.follower.rank.pool.made_folder()))
        return StorePlan(reads, is_offered=is_offered)

    # -- buckets ------------------------------------------------------------------------------

    def join(self, shares: Sequence[Share], pairs: Pairs) -> OfferedBucket:
        """A bucket from what the ranks have made of it.

        Raises:
            WeightMismatch: they have gathered different tensors.
        """
        _check_same(shares)
        self.follower.figures.offered(shares, rank_0_sends=self.plan.broadcast is not None)
        payloads: dict[str, Sequence[Payload]] = {}
        for route in self.plan.routes:
            made = {
                rank: share.made[route.payload]
                for rank, share in enumerate(shares)
                if route.payload in share.made
            }
            if made:
                row = ROUTES[route.transport]
                payloads[route.payload] = row.join(route, made, self._routes.ranks, pairs)
        fingerprints: dict[str, str] = {}
        for share in shares:
            fingerprints |= share.fingerprints
        if self.copies is not None:
            self.copies.add(shares, self.follower.rank.hosts, pairs.specs)
        in_order, sent = _in_order(payloads), self._take_broadcast(pairs)
        return OfferedBucket(sent, shares[0].is_last, in_order, fingerprints)

    def _take_broadcast(self, pairs: Pairs) -> Pairs:
        """What rank 0 broadcasts of a bucket, on the device of its tensors."""
        if (route := self.plan.broadcast) is None or not route.is_read:
            return pairs
        buckets, device = self.follower.shares.builder(route.payload), pairs.tensors[0].device
        assert isinstance(buckets, RootBuckets)
        sent = buckets.take()
        # They are encoded on the host, and NCCL sends from the GPU.
        return Pairs(sent.specs, [tensor.to(device) for tensor in sent.tensors])

    def copy(self, shares: Sequence[Share], pairs: Pairs) -> None:
        """Keep a bucket until all are made."""
        self.follower.figures.wanted(time.monotonic())
        bucket = self.join(shares, pairs)
        self._payloads += bucket.payloads
        self._fingerprints |= bucket.fingerprints

    # -- the push -----------------------------------------------------------------------------

    def copied_push(self) -> WeightPush:
        """The push of all buckets that were copied."""
        payloads: list[Any] = self._payloads
        builder = self.follower.shares.builder(Transport.DISK) if self._has_checkpoint else None
        if isinstance(builder, CheckpointBuilder):
            # Engines with another route have the buckets before the last, too.
            last = {**payloads[-1], Transport.DISK: builder.finish()}
            payloads = [last[Transport.DISK]] if self.is_single else [*payloads[:-1], last]
        elif self.plan.delivery is Delivery.ONE_LOAD and len(payloads) > 1:
            buffers = self.follower.shares.buffers
            assert buffers is not None
            (name,) = (route.payload for route in self.plan.routes)
            payloads = [joined_folder(buffers, [payload[name]["path"] for payload in payloads])]
        elif self.is_single:
            payloads = [next(iter(payload.values())) for payload in payloads]
        manifest = Manifest(self._manifest().tensors, self._fingerprints)
        if self._contents is WeightUpdate.LORA:
            manifest = prefixed_manifest(self.follower.adapter, manifest)
        return self._push(manifest, buckets=payloads)

    @property
    def end(self) -> PushEnd:
        """The steps that follow the push, which is prepared."""
        follower = self.follower
        return PushEnd(
            self.plan.terms.version,
            "+".join(sorted({route.text for route in self.plan.routes})),
            follower.shares.encoders,
            follower.figures,
            self.copies,
            self._server,
        )

    @property
    def _has_checkpoint(self) -> bool:
        return any(route.payload == Transport.DISK for route in self.plan.routes)

    def streamed_push(self, offered: Any) -> WeightPush:
        """A push whose buckets come from ``offered``, which the stream iterates in its thread.

        Args:
            offered: a ``BucketQueue``, or an iterator.
        """
        route, broadcast = self.plan.broadcast, None
        more: Any = {}
        if route is not None:
            broadcast = self._broadcast(route)
            more = {"terms": broadcast.terms, "when_ended": broadcast.ended}
        server = PushStreamServer(
            OutgoingStream(
                offered,
                broadcast,
                self.is_single,
                route.payload if route else "",
                stream_of_thread(),
            ),
            host=self._server.own_host,
            timeout_s=self.follower.rank.config.lifecycle.update_timeout_s,
            **more,
        )
        self.follower.resources.callback(server.close)
        return self._push(self._manifest(), stream=server.address)

    def _broadcast(self, route: Chosen) -> BroadcastPush:
        rank, terms = self.follower.rank, self.plan.terms
        if not route.is_full:
            # What is sent is not the tensors, so rank 0 takes the fingerprints of those.
            terms = replace(terms, fingerprints="")
        return BroadcastPush(
            rank.config,
            terms,
            self._server.own_host,
            rank.idle_group,
            is_on_cuda=self.follower.source.is_on_cuda,
        )

    @property
    def is_single(self) -> bool:
        """Whether all engines get the same whole tensors, so that a bucket is one payload."""
        return len(set(self._routes.assigned.values())) < 2 and self.plan.routes[0].is_full

    def _push(self, manifest: Manifest, **more: Any) -> WeightPush:
        first = self.plan.routes[0]
        if not self.is_single:
            more["routes"] = self._routes.assigned
        return WeightPush(
            self.plan.terms.version,
            manifest,
            route=ROUTES[first.transport].route(first),
            contents=self._contents,
            **more,
        )

    def _manifest(self) -> Manifest:
        source = self.follower.source
        if isinstance(source, PlannedSource):
            return source.manifest
        if self.plan.is_copied:
            assert self.follower.check is not None
            expected = self._server.expected or Manifest({})
            seen = self.follower.check.seen
            # It was cast to the model's dtypes.
            return Manifest({name: expected.tensors.get(name, seen[name]) for name in seen})
        return self._server.expected or Manifest({})


def next_sample(sizes: Mapping[str, int], first: int) -> tuple[str, ...]:
    """A few names, so that each has its turn: at most 8, up to 64 MiB, but one if there is any.

    Args:
        first: how many came before.
    """
    begin = first % len(sizes) if sizes else 0
    chosen: list[str] = []
    num_bytes = 0
    for name in islice(cycle(sizes), begin, begin + min(_MOST_COMPARED, len(sizes))):
        chosen.append(name)
        num_bytes += sizes[name]
        if num_bytes >= _COMPARED_BYTES:
            break
    return tuple(chosen)


def _agreed_version(readies: Sequence[Ready]) -> int | None:
    """The version that all ranks push, or None if none names one.

    Raises:
        WeightMismatch: they name different ones.
    """
    first = readies[0].version
    for rank, ready in enumerate(readies):
        if ready.version != first:
            raise WeightMismatch(
                f"rank {rank} pushes weight version {ready.version}, rank 0 version {first}"
            )
    return first


def _unknown_to(readies: Sequence[Ready], source: PlannedSource) -> TensorList | None:
    """The list of tensors, if another rank does not know it from the last push."""
    if len(readies) == 1:
        return None
    tensors = source.tensors
    digest = digest_of(tensors)
    return tensors if any(ready.knows != digest for ready in readies[1:]) else None


def _check_same(shares: Sequence[Share]) -> None:
    """Raise if the ranks made different tensors of one bucket.

    Raises:
        WeightMismatch: the ranks that differ from rank 0.
    """
    first = shares[0]
    wrong = [
        rank
        for rank, share in enumerate(shares)
        if (share.content, share.is_last) != (first.content, first.is_last)
    ]
    if wrong:
        raise WeightMismatch(
            f"rank {', '.join(map(str, wrong[:8]))} gathered other tensors than rank 0 in one "
            "bucket; all ranks must push the same names in the same order"
        )


def _in_order(payloads: Mapping[str, Sequence[Payload]]) -> list[dict[str, Payload]]:
    """What engines get of a bucket one after the other; all have it with the last."""
    requests: list[dict[str, Payload]] = [{} for _ in max(payloads.values(), key=len, default=())]
    for name, parts in payloads.items():
        for at_once, part in zip(requests[len(requests) - len(parts) :], parts, strict=True):
            at_once[name] = part
    return requests or [{}]


# -- one process ------------------------------------------------------------------------------


def push_of_one_rank(
    rank: TrainerRank, server: ServerPort, request: PushRequest, *, may_stream: bool
) -> Push:
    """A push from one process, ready to be sent.

    Args:
        may_stream: the tensors do not change until it has ended; else it is a copy of them.

    Raises:
        WeightMismatch: they do not fit the model.
    """
    weights = rank.config.weights
    contents = request.contents(weights.update)
    if isinstance(request.named_tensors, Iterator) and server.expected is None:
        # Without a list of the checkpoint, the server needs that of the push.
        request = replace(request, named_tensors=list(request.named_tensors))
    follower = Follower(rank, server, request)
    try:
        streams = may_stream and weights.stream
        leader = Leader(server, follower, contents, may_stream=may_stream, streams=streams)
        plan = leader.decide([follower.ready()])
        follower.prepare(plan)
        made = (
            _copy_buckets(leader)
            if plan.is_copied
            else leader.streamed_push(_stream_buckets(leader))
        )
        # Without the leader, which has the tensors.
        succeed = partial(_succeed, leader.end, rank.copies.offered)
        return Push(made, follower.resources, succeed)
    except BaseException:
        follower.resources.close()
        raise


def _copy_buckets(leader: Leader) -> WeightPush:
    for index in count():
        share, pairs = leader.follower.make(index)
        leader.copy([share], pairs)
        del pairs
        if share.is_last:
            break
    return leader.copied_push()


def _succeed(end: PushEnd, offered: Callable[[Pending[None] | None], None]) -> Sequence[PushStage]:
    """After the push of one process: leave its copies to the store, and figures to the timeline."""
    for encoder in end.encoders.values():
        encoder.succeed()
    offered(end.offer_copies())
    end.figures.wanted(time.monotonic())
    end.record()
    return end.figures.stages(end.routes)


def _stream_buckets(leader: Leader) -> Iterator[OfferedBucket]:
    """The buckets of one process, each made when the stream asks for it; but the first of a
    generator here: where its tensors are is known with it, and an error of it is the caller's."""
    buckets = _make_buckets(leader)
    return _prepend(next(buckets), buckets) if leader.plan.from_iterator else buckets


def _prepend(first: OfferedBucket, others: Iterator[OfferedBucket]) -> Iterator[OfferedBucket]:
    yield first
    del first
    yield from others


def _make_buckets(leader: Leader) -> Iterator[OfferedBucket]:
    for index in count():
        share, pairs = leader.follower.make(index)
        bucket = leader.join([share], pairs)
        del pairs
        try:
            yield bucket
        finally:  # also of the last bucket, after which the stream closes this
            leader.follower.figures.wanted(time.monotonic())
        del bucket
        if share.is_last:
            return
