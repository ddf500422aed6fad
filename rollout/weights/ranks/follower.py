"""One rank's part in one push: it prepares, makes its share of each bucket, and frees all of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from engines.protocol.plain_text import describe
from engines.tensors.torch_fingerprint import device_fingerprints
from rollout.config import WeightsConfig, WeightUpdate
from rollout.core.errors import RankFailure, WeightMismatch
from rollout.weights.format.lora_check import warn_of_base
from rollout.weights.format.manifest import Manifest, TensorSpec, check_contents
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import WITH_KV, WITHOUT_KV
from rollout.weights.ranks.figures import PushFigures
from rollout.weights.ranks.messages import PushPlan, Ready, Share
from rollout.weights.ranks.rank_shares import RankShares
from rollout.weights.ranks.trainer_rank import ServerPort, TrainerRank
from rollout.weights.routes.cuda_ipc import gpu_with
from rollout.weights.routes.shared_memory import naming_path
from rollout.weights.tensors.adapters import AdapterSource
from rollout.weights.tensors.bucket_bytes import fingerprints_of
from rollout.weights.tensors.finite_check import check_finite
from rollout.weights.tensors.sources import (
    Pairs,
    PlannedSource,
    StreamedSource,
    TensorList,
    cast_to,
)


class Follower:
    """One rank in one push; rank 0 is one, too.

    Args:
        timeout_s: for each gather and broadcast with other ranks; None for a single process,
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

    @cached_property
    def source(self) -> PlannedSource | StreamedSource:
        """Of this rank's tensors; other ranks than 0 open it when they have the plan."""
        rank, request, expected = self.rank, self._request, self._server.expected
        shared: Any = {
            "name_map": request.name_map,
            "dtype": request.dtype,
            "gather_timeout_s": self._timeout_s,
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
    def adapter(self) -> str:
        """Name of the adapter that is pushed.

        Raises:
            WeightMismatch: it is none of ``weights.adapters``.
        """
        return self._request.adapter_of(self.rank.config.weights.adapters)

    @cached_property
    def gpu(self) -> str:
        """UUID of the GPU with its tensors; empty if they are in host memory."""
        return gpu_with(self._request.named_tensors)

    def ready(self, *, has_before_kv: bool = False) -> Ready:
        """The message with which a push begins."""
        rank = self.rank
        knows = digest_of(rank.tensors) if rank.num_ranks > 1 else ""
        node, group = self._server.own_node, rank.idle_group.name
        version, room_bytes = self._request.version, rank.room_bytes()
        return Ready(knows, version, has_before_kv, node, self.gpu, group, room_bytes)

    def prepare(self, plan: PushPlan) -> None:
        """Check this rank's tensors against the plan; nothing is gathered.

        Raises:
            WeightMismatch: they do not fit.
        """
        self.check = BucketCheck(self.rank.config.weights, self._server.expected, plan.contents)
        if plan.tensors is not None:
            self.rank.tensors = plan.tensors
        if isinstance(self.source, StreamedSource) is not plan.is_streamed:
            raise WeightMismatch("it pushes an iterator and rank 0 does not, or the reverse")
        if isinstance(self.source, PlannedSource) and not self.rank.config.weights.allow_nonfinite:
            self.source.check_finite(self.rank.rank, self.rank.num_ranks)
        self._buckets = self.source.buckets(plan.bucket_bytes)
        with naming_path(self.rank.config.weights):
            self._shares = RankShares(
                self.rank,
                plan,
                self.resources,
                gpu=self.gpu,
                expected=self._server.expected,
                timeout_s=self._timeout_s,
            )

    def digests_of(self, names: Sequence[str]) -> dict[str, str]:
        """Of those tensors that other ranks may have too."""
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
        self.figures.gathered()
        with naming_path(self.rank.config.weights):
            made, changes, copy = self.shares.make(index, pairs, is_last)
        if changes is not pairs:
            self.figures.density = self.rank.delta_base.density
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
        pairs = cast_to(pairs, self._server.expected)
        if not self.rank.config.weights.allow_nonfinite:
            own = pairs[self.rank.rank :: self.rank.num_ranks]
            check_finite((name, tensor, math.inf) for name, tensor in own)
        return pairs

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


def digest_of(tensors: TensorList) -> str:
    """Equal for the same list."""
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()


def content_of(pairs: Pairs) -> str:
    """Equal on two ranks that have the same names, dtypes and shapes in a bucket."""
    content = json.dumps([(spec.name, spec.dtype, spec.shape) for spec in pairs.specs]).encode()
    return hashlib.sha256(content).hexdigest()[:16]
