"""One rank's part in one push: it prepares, makes its share of each bucket, and frees all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from types import MappingProxyType
from typing import Any

from engines.protocol.plain_text import describe
from engines.tensors.torch_fingerprint import device_fingerprints
from rollout.config import WeightsConfig, WeightUpdate
from rollout.core.errors import RankFailure, WeightMismatch, WeightsUnavailable
from rollout.weights.format.encoding import BegunPush
from rollout.weights.format.lora_check import warn_of_base
from rollout.weights.format.manifest import Manifest, TensorSpec, check_contents
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import WITH_KV, WITHOUT_KV
from rollout.weights.ranks.device_copies import DeviceCopies
from rollout.weights.ranks.figures import PushFigures
from rollout.weights.ranks.messages import PushPlan, Ready, Share
from rollout.weights.ranks.trainer_rank import ServerPort, TrainerRank
from rollout.weights.routes.buffers import PushBuffers
from rollout.weights.routes.choice import ROUTES
from rollout.weights.routes.cuda_ipc import gpu_with
from rollout.weights.routes.rank_end import Encoder, OwnGpu, RankEnd, ShareBuilder
from rollout.weights.routes.route import Chosen
from rollout.weights.routes.shared_memory import BufferWriter, naming_path
from rollout.weights.tensors.adapters import AdapterSource
from rollout.weights.tensors.bucket_bytes import check_values, fingerprints_of
from rollout.weights.tensors.sources import (
    Pairs,
    PlannedSource,
    StreamedSource,
    TensorList,
    cast_to,
)

Made = Mapping[str, Mapping[str, Any]]
"""Payload -> this rank's share of a bucket for it."""
Encoders = Mapping[str, Encoder]
"""The encoders of one push, by the name of the encoding."""
_UNKNOWN: Mapping[str, TensorSpec] = MappingProxyType({})


class Follower:
    """One rank in one push; rank 0 is one, too.

    Args:
        timeout_s: for each gather with other ranks, or None for a single process,
            which has no shards.

    Attributes:
        resources: what the push holds in this process; the caller closes it.
    """

    def __init__(
        self,
        rank: TrainerRank,
        server: ServerPort,
        request: PushRequest,
        timeout_s: float | None = None,
    ) -> None:
        self.check: BucketCheck | None = None
        self.rank = rank
        self.figures = PushFigures(rank.num_ranks)
        self.resources = ExitStack()
        self._server = server
        self._request = request
        self._timeout_s = timeout_s
        self._buckets: Iterator[tuple[Pairs, bool]] = iter(())
        self._shares: RankShares | None = None
        self._checks_buckets = False

    @cached_property
    def source(self) -> PlannedSource | StreamedSource:
        """The source of this rank's tensors; ranks other than 0 open it when they have the plan."""
        rank, request, expected = self.rank, self._request, self._server.expected
        shared: Any = {
            "name_map": request.name_map,
            "dtype": request.dtype,
            "gather_timeout_s": self._timeout_s,
            "ties": rank.ties,
        }
        if request.adapter is None and isinstance(request.named_tensors, Iterator):
            return StreamedSource(request.named_tensors, expected=expected, **shared)
        shared |= {
            "tensors": rank.tensors if rank.rank else None,
            "plans": rank.plans,
            "is_on_all_ranks": rank.num_ranks > 1,
        }
        if request.adapter is None:
            return PlannedSource(request.named_tensors, expected=expected, **shared)
        base = request.adapter.get("base_model_name_or_path")
        warn_of_base(str(base or ""), rank.config.model_path)
        kinds = {group.engine.kind for group in rank.config.groups.values()}
        return AdapterSource(
            request.named_tensors, request.adapter, base=expected, kinds=kinds, **shared
        )

    @property
    def model(self) -> Mapping[str, TensorSpec]:
        """The model's tensors, by name, or empty if they are not known."""
        expected = self._server.expected
        return _UNKNOWN if expected is None else expected.tensors

    @property
    def adapter(self) -> str:
        """Name of the adapter that is pushed.

        Raises:
            WeightMismatch: it is none of ``weights.adapters``.
        """
        return self._request.adapter_of(self.rank.config.weights.adapters)

    @cached_property
    def gpu(self) -> OwnGpu | None:
        """The GPU with its tensors, or None if they are in host memory."""
        return gpu_with(self._request.named_tensors)

    def ready(self, *, has_before_kv: bool = False) -> Ready:
        """The message with which a push begins."""
        rank = self.rank
        knows = digest_of(rank.tensors) if rank.num_ranks > 1 else ""
        version, node, room_bytes = self._request.version, self._server.own_node, rank.room_bytes()
        gpu = "" if self.gpu is None else self.gpu.uuid
        return Ready(knows, version, has_before_kv, node, gpu, room_bytes)

    def prepare(self, plan: PushPlan) -> None:
        """Check this rank's tensors against the plan; nothing is gathered.

        Raises:
            WeightMismatch: they do not fit.
        """
        self.check = BucketCheck(self.rank.config.weights, self._server.expected, plan.contents)
        if plan.tensors is not None:
            self.rank.tensors = plan.tensors
        if isinstance(self.source, StreamedSource) is not plan.from_iterator:
            raise WeightMismatch("it pushes an iterator and rank 0 does not, or the reverse")
        self._checks_buckets = self._check_values(plan)
        self._buckets = self.source.buckets(plan.bucket_bytes)
        with naming_path(self.rank.config.weights):
            self._shares = RankShares(
                self.rank,
                plan,
                self.resources,
                gpu=self.gpu,
                model=self.model,
            )

    def _check_values(self, plan: PushPlan) -> bool:
        """Check the values that are known before the first bucket is sent; returns whether those of
        each bucket are to be checked when it is made.

        They are if no engine is called before all buckets are made, or if they are not known
        before.

        Raises:
            WeightMismatch: one is no number in the type of the model.
        """
        rank, source = self.rank, self.source
        if rank.config.weights.allow_nonfinite or plan.terms.checks_values:
            return False
        if plan.is_copied or isinstance(source, StreamedSource):
            return True
        source.check_values(self.model, rank.rank, rank.num_ranks, plan.bucket_bytes)
        return source.is_known_after_gathers

    def digests_of(self, names: Sequence[str]) -> dict[str, str]:
        """Digests of the named tensors, to compare with ranks that may hold them too."""
        source = self.source
        return source.digests_of(names) if names and isinstance(source, PlannedSource) else {}

    @property
    def shares(self) -> RankShares:
        """What is made of each bucket, since it was prepared."""
        assert self._shares is not None
        return self._shares

    def make(self, index: int) -> tuple[Share, Pairs]:
        """Gather the next bucket, with all ranks, and make this rank's share of it."""
        plan = self.shares.plan
        self.figures.begin()
        pairs, is_last = next(self._buckets)
        if isinstance(self.source, StreamedSource):
            pairs = self._checked(pairs, is_last)
        if self._checks_buckets:
            check_values(pairs[self.rank.rank :: self.rank.num_ranks], self.model)
        self.figures.gathered()
        with naming_path(self.rank.config.weights):
            made, changes, copy = self.shares.make(index, pairs, is_last)
        if changes is not pairs:
            self.figures.density = self.shares.density
        fingerprints: dict[str, str] = {}
        for share in made.values():
            fingerprints |= share.get("fingerprints", {})
        if plan.is_hashed_by_rank_0 and self.rank.rank == 0:
            fingerprints = fingerprints_of(pairs, plan.terms.fingerprints)
        content = content_of(pairs) if self.rank.num_ranks > 1 else ""
        figures = self.figures.measured(pairs, changes)
        digests: dict[str, str] = {}
        if isinstance(self.source, StreamedSource) and self.rank.num_ranks > 1:
            digests = device_fingerprints([pairs[(plan.terms.version + index) % len(pairs)]])
        return Share(content, is_last, made, fingerprints, copy, *figures, digests), pairs

    def _checked(self, pairs: Pairs, is_last: bool) -> Pairs:
        """A bucket of an iterator, in the model's dtypes."""
        assert self.check is not None
        self.check(pairs, is_last)
        # The push announces the model's dtypes, because these are known only now.
        return cast_to(pairs, self._server.expected)

    def run(self, before_kv: Callable[[], object] | None) -> None:
        """Free the trainer's memory that the KV caches need.

        Raises:
            RankFailure: the function raised.
        """
        try:
            if before_kv is not None:
                before_kv()
        except Exception as error:
            state = WITH_KV if self.shares.plan.is_serving else WITHOUT_KV
            raise RankFailure(f"{describe(error, with_type=True)}; {state}") from error


class BucketCheck:
    """Checks the buckets of an iterator one by one against the model's tensors.

    Its tensors are known only when they come.  The last bucket makes the engines publish the
    version, so it is sent only if the push is complete.
    """

    def __init__(
        self, config: WeightsConfig, expected: Manifest | None, contents: WeightUpdate
    ) -> None:
        self._expected = expected
        self._config = config
        self._contents = contents
        self.seen: dict[str, TensorSpec] = {}

    def __call__(self, pairs: Pairs, is_last: bool) -> None:
        """Check a bucket.

        Raises:
            WeightMismatch: a tensor does not fit, comes twice, or is missing at the end.
        """
        for spec in pairs.specs:
            if spec.name in self.seen:
                raise WeightMismatch(f"tensor {spec.name!r} is pushed twice", tensor=spec.name)
            self.seen[spec.name] = spec
        if is_last:
            checked, contents = Manifest(self.seen), self._contents
        else:
            checked, contents = Manifest.of(pairs.specs), WeightUpdate.PARTIAL
        check_contents(checked, self._expected, self._config, contents)


class RankShares:
    """One rank's ends of the routes of a push.

    Args:
        resources: what it opens is closed with them.
        gpu: the one with the tensors, or None if they are in host memory.
        model: its tensors, by name, or empty if they are not known.

    Attributes:
        buffers: files that stay until the push has ended, or None if it needs none.
        encoders: those that have a part in the push.
    """

    def __init__(
        self,
        rank: TrainerRank,
        plan: PushPlan,
        resources: ExitStack,
        *,
        gpu: OwnGpu | None,
        model: Mapping[str, TensorSpec],
    ) -> None:
        self.plan = plan
        self.buffers = _buffers(rank, plan, resources)
        self._rank = rank
        end = RankEnd(
            rank.rank,
            rank.writers,
            gpu,
            plan.terms,
            self.buffers or rank.pool,
            rank.config,
            model,
        )
        self._builders = _open_builders(end, plan.routes, resources)
        self._copies = self._store_copies(end, resources)
        self.encoders: Encoders = dict(self._begun(model))

    def builder(self, payload: str) -> ShareBuilder:
        """The builder of the route with this payload."""
        return self._builders[payload]

    def make(
        self, index: int, pairs: Pairs, is_last: bool
    ) -> tuple[Made, Pairs, Mapping[str, Any]]:
        """This rank's shares of a bucket, what was sent in its place, and its share of the copies.

        What was sent is the bucket itself if it goes whole.
        """
        written = {name: encoder.encode(pairs) for name, encoder in self.encoders.items()}
        sent = next((bucket for bucket in written.values() if bucket is not pairs), pairs)
        made: dict[str, Mapping[str, Any]] = {}
        for chosen in self._own_routes:
            builder = self._builders[chosen.payload]
            share = builder.make(index, pairs if chosen.is_full else written[chosen.encoding])
            if share is not None:
                made[chosen.payload] = share
        del written
        return made, sent, self._copy(index, pairs, is_last)

    def succeed(self) -> None:
        """After a push that succeeded: the encoders know it."""
        for encoder in self.encoders.values():
            encoder.succeed()

    def _store_copies(
        self, end: RankEnd, resources: ExitStack
    ) -> BufferWriter | DeviceCopies | None:
        """Writes copies for the store, or None if it reads the files of the push, or has no
        part."""
        plan = self.plan
        if plan.store is None or not plan.store.is_offered or end.own_host != 0:
            return None
        whole = [self._builders.get(chosen.payload) for chosen in plan.routes if chosen.is_full]
        if any(isinstance(writer, BufferWriter) for writer in whole):
            return None
        copies: BufferWriter | DeviceCopies
        if end.gpu is not None:
            copies = DeviceCopies(end, end.gpu.uuid)
        else:
            copies = BufferWriter.of(end, plan.terms.fingerprints)
        resources.callback(copies.close)
        return copies

    @property
    def density(self) -> float | None:
        """The share of the elements that the push has changed so far, or None if unknown."""
        found = (encoder.density for encoder in self.encoders.values())
        return next((share for share in found if share is not None), None)

    @property
    def _own_routes(self) -> Iterator[Chosen]:
        """The routes that this rank has an end of."""
        return (chosen for chosen in self.plan.routes if chosen.payload in self._builders)

    def _begun(self, model: Mapping[str, TensorSpec]) -> Iterator[tuple[str, Encoder]]:
        """The encodings that have a part in the push; the others free what they kept."""
        version, is_stored = self.plan.terms.version, self.plan.store is not None
        for name, encoding in self._rank.encodings.items():
            read = [chosen for chosen in self._own_routes if chosen.encoding == name]
            is_whole = all(chosen.is_full for chosen in read)
            push = BegunPush(version, model, is_whole, is_stored) if read else None
            if (encoder := encoding.begin(push)) is not None:
                yield name, encoder

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
    """Files that stay until the push has ended, or None if it needs none."""
    store = plan.store if rank.hosts[rank.rank] == 0 else None
    if store is None and not plan.is_copied:
        return None
    if store is not None:
        rank.copies.free(store.reads)
    buffers = PushBuffers(rank.pool)
    if store is not None:
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


def digest_of(tensors: TensorList) -> str:
    """Equal for the same list."""
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()


def content_of(pairs: Pairs) -> str:
    """Equal on two ranks that have the same names, dtypes and shapes in a bucket."""
    content = json.dumps([(spec.name, spec.dtype, spec.shape) for spec in pairs.specs]).encode()
    return hashlib.sha256(content).hexdigest()[:16]
