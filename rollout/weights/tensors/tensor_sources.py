"""A trainer's tensors under the checkpoint's names: plain, sharded (DTensor), or renamed.

Always true: names, dtypes and shapes are known before anything is gathered or sent; shards are
gathered bucket by bucket, so that at most one bucket of whole tensors is in memory; all ranks
gather in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload

import torch

from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.format.named import named_pairs
from rollout.weights.format.stacked_experts import splitter_of
from rollout.weights.tensors.fp8_quantiser import Fp8BlockQuantiser
from rollout.weights.tensors.push_plan import (
    NameMap,
    PlannedBucket,
    PushPlanCache,
    check_is_tensor,
    specs_of,
)
from rollout.weights.tensors.shard_gather import gathered_whole, has_shards, is_shard

# By torch.compile and activation checkpointing.
_ADDED_TO_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class Pairs(Sequence[tuple[str, torch.Tensor]]):
    """Names and tensors of one bucket; a pair is made only when it is read.

    Attributes:
        specs: of ``tensors``; the same list at every push of the same plan.
    """

    def __init__(self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        self.specs = specs
        self.tensors = tensors

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, torch.Tensor]]) -> Pairs:
        pairs = list(pairs)
        return cls(specs_of(pairs), [tensor for _, tensor in pairs])

    def __len__(self) -> int:
        return len(self.specs)

    @overload
    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> Pairs: ...
    def __getitem__(self, index: int | slice) -> tuple[str, torch.Tensor] | Pairs:
        if isinstance(index, slice):
            return Pairs(self.specs[index], self.tensors[index])
        return self.specs[index].name, self.tensors[index]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, tensor in zip(self.specs, self.tensors, strict=True):
            yield spec.name, tensor


class BucketsOfTensors(Protocol):
    """Tensors that are gathered bucket by bucket: a trainer's, or those of all its ranks."""

    @property
    def is_on_cuda(self) -> bool: ...
    @property
    def manifest(self) -> Manifest: ...
    def gathered(self, most_bytes: int | None = None) -> Iterator[tuple[Pairs, bool]]: ...


class TrainerWeights:
    """A trainer's tensors, planned in buckets.

    Args:
        named_tensors: under the trainer's names; shards are not gathered yet.
        bucket_bytes: size of a bucket, unless a single tensor is larger.
        expected: the model's manifest, to find tied tensors and stacked experts; None keeps every
            name.
        name_map: see ``NameMap``.
        plans: cached plans of earlier pushes.
        dtype: of float tensors; they are cast before they are gathered.
        is_on_all_ranks: every rank of the trainer gathers its buckets, in the same order.
        gather_timeout_s: for each gather; None leaves it to the process group.

    Raises:
        WeightMismatch: a value is not a tensor, a name occurs twice, or a tensor is sharded over
            other ranks, which would not take part in its gather.
    """

    def __init__(
        self,
        named_tensors: NamedTensors,
        *,
        bucket_bytes: int,
        expected: Manifest | None = None,
        name_map: NameMap | None = None,
        plans: PushPlanCache | None = None,
        dtype: torch.dtype | None = None,
        is_on_all_ranks: bool = False,
        gather_timeout_s: float | None = None,
    ) -> None:
        names, tensors = _columns(named_tensors)
        if not is_on_all_ranks:
            _check_whole(names, tensors)
        if expected is not None and _keeps_names(name_map):
            known = expected.tensors
            if any(name not in known for name in names):
                names, tensors = _columns(_without_tied(names, tensors, expected))
        self._names = names
        self._tensors = tensors
        if name_map is None:
            name_map = splitter_of(names, expected)
        self._plan = (plans or PushPlanCache()).of(names, tensors, name_map, dtype)
        self.manifest = self._plan.manifest
        self._bucket_bytes = bucket_bytes
        self._gather_timeout_s = gather_timeout_s

    @property
    def num_bytes(self) -> int:
        return self._plan.num_bytes

    @property
    def is_on_cuda(self) -> bool:
        return any(tensor.is_cuda for tensor in self._tensors)

    def trainer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors under the trainer's names, in the order in which they are gathered."""
        return zip(self._names, self._tensors, strict=True)

    def gathered(self, most_bytes: int | None = None) -> Iterator[tuple[Pairs, bool]]:
        """Each bucket's whole tensors, and whether it is the last.

        Delete one (``del``) before taking the next, or both are in memory.

        Args:
            most_bytes: for smaller buckets than planned.
        """
        bucket_bytes = self._bucket_bytes
        if most_bytes is not None and most_bytes < bucket_bytes:
            bucket_bytes = most_bytes
        shares = self._plan.shares(bucket_bytes)
        for share in shares:
            yield self._whole(share), share is shares[-1]

    def _whole(self, share: PlannedBucket) -> Pairs:
        tensors = self._tensors[share.first : share.end]
        whole = gathered_whole(tensors, self._plan.dtype, self._gather_timeout_s)
        if self._plan.name_map is None:
            return Pairs(share.specs, whole)
        # After all gathers: an error of the name map must not leave other ranks in a gather.
        parts = self._plan.parts[share.first : share.end]
        mapped: list[torch.Tensor] = []
        for part in parts:
            mapped += part.mapped(self._plan.name_map, whole.pop(0))
        return Pairs(share.specs, mapped)


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile and activation checkpointing add to it."""
    for added in _ADDED_TO_NAMES:
        name = name.replace(added, "")
    return name


def _keeps_names(name_map: NameMap | None) -> bool:
    """Whether the trainer's names are the checkpoint's, so that tied ones are found by name."""
    return name_map is None or isinstance(name_map, Fp8BlockQuantiser)


def _columns(named: NamedTensors) -> tuple[list[str], list[torch.Tensor]]:
    """Names and tensors in two lists, without an object for each pair.

    A model of experts has tens of thousands, so what is true of all is found by one call.
    """
    if isinstance(named, Mapping) and {str}.issuperset(map(type, named)):
        names, tensors = list(named), list(named.values())
    else:
        names, tensors = [], []
        for name, tensor in named_pairs(named):
            names.append(name)
            tensors.append(tensor)
    text = "\n".join(names)
    if any(added in text for added in _ADDED_TO_NAMES):
        names = [plain_name(name) for name in names]
    return names, tensors


def _check_whole(names: Sequence[str], tensors: Sequence[Any]) -> None:
    if not has_shards(tensors):
        return
    for name, tensor in zip(names, tensors, strict=True):
        if is_shard(tensor) and (num_ranks := tensor.device_mesh.size()) > 1:
            raise WeightMismatch(
                f"tensor {name!r} is sharded over {num_ranks} ranks, and this push gathers on one; "
                "push from every rank: pusher = policy.pusher(), then pusher.push(tensors)",
                tensor=name,
            )


def _without_tied(
    names: Sequence[str], tensors: Sequence[torch.Tensor], expected: Manifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """Omits tensors that the model does not have if they share memory with one that it has."""
    pairs = list(zip(names, tensors, strict=True))
    for pair in pairs:
        check_is_tensor(*pair)
    known = {_memory_of(tensor) for name, tensor in pairs if name in expected.tensors}
    for name, tensor in pairs:
        if name in expected.tensors or not tensor.numel() or _memory_of(tensor) not in known:
            yield name, tensor


def _memory_of(tensor: Any) -> tuple[object, ...]:
    """Equal for tied tensors, but not for a view with the same start."""
    if is_shard(tensor):
        tensor = tensor.to_local()
    # The shard of a rank may be empty, and then it has no address.
    place = tensor.data_ptr() or tensor.untyped_storage()._cdata
    return place, tensor.device, tensor.dtype, tensor.shape, tensor.stride()
