"""One rank's tensors, bucket by bucket, in the same order on all ranks.

Always true: a source holds one bucket of whole tensors at most, and of a generator's the one that
begins the next bucket; gathers run in the caller's thread.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from engines.tensors.stacked_experts import split_experts
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest
from rollout.weights.format.named import named_pairs
from rollout.weights.format.stacked_experts import is_stacked, splitter_of
from rollout.weights.tensors.push_plan import (
    NameMap,
    PushPlanCache,
    cast_dtype,
    check_is_tensor,
)
from rollout.weights.tensors.shard_gather import gathered_whole, is_shard
from rollout.weights.tensors.tensor_sources import (
    NamedTensors,
    Pairs,
    TrainerWeights,
    plain_name,
)

TensorList = Sequence[Sequence[Any]]
"""Name, dtype and shape of each of the trainer's tensors, in the order of their gathers."""


class PlannedSource:
    """Tensors that are all known: a mapping or a list.

    Args:
        tensors: rank 0's; None on rank 0.

    Attributes:
        manifest: of the checkpoint's tensors that they become.

    Raises:
        WeightMismatch: a tensor of rank 0 is missing here, or is another one.
    """

    def __init__(
        self,
        named_tensors: NamedTensors,
        *,
        expected: Manifest | None,
        tensors: TensorList | None,
        name_map: NameMap | None,
        dtype: torch.dtype | None,
        plans: PushPlanCache,
        gather_timeout_s: float | None = None,
    ) -> None:
        if tensors is not None:
            named_tensors = _in_order(named_tensors, tensors)
            # Rank 0 has left out what is tied, and only it decides that.
            name_map = name_map or splitter_of((name for name, *_ in tensors), expected)
            expected = None
        self._weights = TrainerWeights(
            named_tensors,
            bucket_bytes=sys.maxsize,
            expected=expected,
            name_map=name_map,
            plans=plans,
            dtype=dtype,
            is_on_all_ranks=True,
            gather_timeout_s=gather_timeout_s,
        )
        self.manifest = self._weights.manifest

    @property
    def is_on_cuda(self) -> bool:
        return self._weights.is_on_cuda

    @property
    def num_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def tensors(self) -> TensorList:
        """For the other ranks."""
        return [
            [name, str(tensor.dtype), list(tensor.shape)]
            for name, tensor in self._weights.trainer_tensors()
        ]

    def buckets(self, bucket_bytes: int) -> Iterator[tuple[Pairs, bool]]:
        """Each bucket's whole tensors, and whether it is the last."""
        return self._weights.gathered(bucket_bytes)


class StreamedSource:
    """Tensors that a generator gathers one by one, with collectives of its own.

    Attributes:
        is_on_cuda: whether the first bucket has a tensor on a GPU; False before that.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        expected: Manifest | None,
        name_map: NameMap | None,
        dtype: torch.dtype | None,
        gather_timeout_s: float | None = None,
    ) -> None:
        self.is_on_cuda = False
        self._held_bytes = 0  # of whole tensors in the bucket that is made
        self._named = named_tensors
        self._expected = expected
        self._name_map = name_map
        self._dtype = dtype
        self._gather_timeout_s = gather_timeout_s

    def buckets(self, bucket_bytes: int) -> Iterator[tuple[Pairs, bool]]:
        """Each bucket's whole tensors, and whether it is the last."""
        held: list[tuple[str, torch.Tensor]] = []
        self._held_bytes = 0
        for name, tensor in self._mapped(bucket_bytes):
            more = 0 if tensor is None else self._num_bytes(name, tensor)
            if held and (tensor is None or self._held_bytes + more > bucket_bytes):
                yield self._taken(held), False
                self._held_bytes = 0
            if tensor is not None:
                held.append((name, tensor))
                self._held_bytes += more
            del tensor
        if not held:
            raise WeightMismatch("the source of this push has no tensors")
        yield self._taken(held), True

    def _taken(self, held: list[tuple[str, torch.Tensor]]) -> Pairs:
        """The held tensors as a bucket; they are held no more."""
        bucket = Pairs.of(held)
        held.clear()
        self.is_on_cuda = self.is_on_cuda or any(one.is_cuda for one in bucket.tensors)
        return bucket

    def _num_bytes(self, name: str, tensor: torch.Tensor) -> int:
        """In its own dtype or the model's, whichever takes more: it is cast inside its bucket."""
        known = None if self._expected is None else self._expected.tensors.get(name)
        own = tensor.numel() * cast_dtype(tensor, self._dtype).itemsize  # of a shard, as a whole
        return max(own, 0 if known is None else known.num_bytes)

    def _mapped(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Whole tensors under the checkpoint's names; None after those that fill the bucket.

        Shards wait for one another until they fill it: gathers that are started together cost less.
        Whole tensors take memory, so they do not wait.
        """
        shards: list[tuple[str, Any]] = []
        waiting_bytes = 0
        for name, tensor in named_pairs(self._named):
            more = self._num_bytes(plain_name(name), tensor)
            is_full = self._held_bytes + waiting_bytes + more > bucket_bytes
            if shards and (is_full or not is_shard(tensor)):
                yield from self._gathered(shards)
                waiting_bytes = 0
            if is_full:
                yield "", None
            shards.append((name, tensor))
            waiting_bytes += more
            if not is_shard(tensor):
                del tensor
                yield from self._gathered(shards)
                waiting_bytes = 0
        yield from self._gathered(shards)

    def _gathered(self, shards: list[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """These shards as whole tensors, renamed; ``shards`` has none of them any more."""
        names = [name for name, _ in shards]
        tensors = [tensor for _, tensor in shards]
        shards.clear()
        whole = gathered_whole(tensors, self._dtype, self._gather_timeout_s)
        tensors.clear()
        whole.reverse()
        for name in names:
            yield from self._renamed(name, whole.pop())

    def _renamed(self, name: str, whole: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if self._name_map is not None:
            return self._name_map(name, whole)
        name = plain_name(name)
        if self._expected is not None and is_stacked(name, self._expected):
            return split_experts(name, whole)
        return [(name, whole)]


def make_source(
    named_tensors: NamedTensors,
    *,
    expected: Manifest | None,
    tensors: TensorList | None,
    name_map: NameMap | None,
    dtype: torch.dtype | None,
    plans: PushPlanCache,
    gather_timeout_s: float | None = None,
) -> PlannedSource | StreamedSource:
    """The source for these tensors; an iterator is consumed bucket by bucket."""
    if isinstance(named_tensors, Iterator):
        return StreamedSource(
            named_tensors,
            expected=expected,
            name_map=name_map,
            dtype=dtype,
            gather_timeout_s=gather_timeout_s,
        )
    return PlannedSource(
        named_tensors,
        expected=expected,
        tensors=tensors,
        name_map=name_map,
        dtype=dtype,
        plans=plans,
        gather_timeout_s=gather_timeout_s,
    )


def digest_of(tensors: TensorList) -> str:
    """Equal for the same list."""
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()


def cast_to(pairs: Pairs, expected: Manifest | None) -> Pairs:
    """The tensors in the dtypes of the model; ``pairs`` has none of them any more."""
    known = {} if expected is None else expected.tensors
    left = list(reversed(pairs.tensors))
    pairs.tensors = []
    cast = []
    for spec in pairs.specs:
        tensor = left.pop()
        dtype = known[spec.name].dtype if spec.name in known else spec.dtype
        cast.append((spec.name, tensor.to(getattr(torch, dtype))))
        del tensor
    return Pairs.of(cast)


def content_of(pairs: Pairs) -> str:
    """Equal on two ranks that have the same names, dtypes and shapes in a bucket."""
    content = json.dumps([(spec.name, spec.dtype, spec.shape) for spec in pairs.specs]).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _in_order(named: NamedTensors, tensors: TensorList) -> list[tuple[str, torch.Tensor]]:
    """This rank's tensors in the order of rank 0's; those that rank 0 leaves out are left out."""
    own = {plain_name(name): tensor for name, tensor in named_pairs(named)}
    for name, dtype, shape in tensors:
        if name not in own:
            raise WeightMismatch(f"it has no tensor {name!r}, which rank 0 pushes", tensor=name)
        check_is_tensor(name, own[name])
        found = (str(own[name].dtype), list(own[name].shape))
        if found != (dtype, shape):
            raise WeightMismatch(
                f"its tensor {name!r} is {found[0]} {found[1]}, rank 0's is {dtype} {shape}",
                tensor=name,
            )
    return [(name, own[name]) for name, *_ in tensors]
