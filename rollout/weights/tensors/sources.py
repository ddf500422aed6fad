"""What a trainer holds, as the tensors a checkpoint names: plain, sharded (DTensor), or renamed.

Always true: names, dtypes and shapes are known before anything is gathered or sent; shards are
gathered bucket by bucket, so that of the whole tensors no more than a bucket is alive at a time;
every rank that calls ``gathered`` does so in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch

from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.tensors.planning import NameMap, Plans, Share, check_is_tensor, specs_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class Pairs(Sequence[tuple[str, torch.Tensor]]):
    """Names and tensors of one bucket; what is asked for is made into a pair only then.

    Attributes:
        specs: one for each of ``tensors``; the same list at every push of the same plan.
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


class Weights:
    """A trainer's tensors, planned in buckets.

    Args:
        named_tensors: under the trainer's names; kept as they are, shards included.
        bucket_bytes: a bucket holds so much unless a single tensor is larger.
        expected: the model's manifest, to recognise tied tensors; None keeps every name.
        name_map: see ``NameMap``.
        plans: those of earlier pushes, one of which may do.

    Raises:
        WeightMismatch: a value is not a tensor, or a name occurs twice.
    """

    def __init__(
        self,
        named_tensors: NamedTensors,
        *,
        bucket_bytes: int,
        expected: Manifest | None = None,
        name_map: NameMap | None = None,
        plans: Plans | None = None,
    ) -> None:
        names, tensors = _columns(named_tensors)
        if expected is not None and name_map is None:
            known = expected.tensors
            if any(name not in known for name in names):
                names, tensors = _columns(_without_tied(names, tensors, expected))
        self._tensors = tensors
        self._plan = (plans or Plans()).of(names, tensors, name_map)
        self.manifest = self._plan.manifest
        self.has_shards = any(map(_is_shard, tensors))
        self._bucket_bytes = bucket_bytes

    @property
    def num_buckets(self) -> int:
        return len(self._plan.shares(self._bucket_bytes))

    @property
    def num_bytes(self) -> int:
        return self._plan.num_bytes

    @property
    def is_on_cuda(self) -> bool:
        return any(tensor.is_cuda for tensor in self._tensors)

    def gathered(self, most_bytes: int | None = None) -> Iterator[tuple[Pairs, bool]]:
        """Each bucket's whole tensors, and whether they are the last.

        Drop one (``del``) before asking for the next, or both are alive.

        Args:
            most_bytes: smaller buckets than those that were planned.
        """
        bucket_bytes = self._bucket_bytes
        if most_bytes is not None and most_bytes < bucket_bytes:
            bucket_bytes = most_bytes
        shares = self._plan.shares(bucket_bytes)
        for share in shares:
            yield self._whole(share), share is shares[-1]

    def _whole(self, share: Share) -> Pairs:
        tensors: list[torch.Tensor] = []
        for index in range(share.first, share.end):
            tensor: Any = self._tensors[index]
            if tensor.requires_grad:
                tensor = tensor.detach()
            if _is_shard(tensor):
                tensor = tensor.full_tensor()
            if self._plan.name_map is None:
                tensors.append(tensor)
            else:
                tensors += self._plan.parts[index].mapped(self._plan.name_map, tensor)
        return Pairs(share.specs, tensors)


def take_part(
    named_tensors: NamedTensors, *, bucket_bytes: int, name_map: NameMap | None = None
) -> None:
    """What every rank but the one that pushes calls, with its shards of the same tensors: it
    takes part in the gathers and keeps nothing.

    Args:
        bucket_bytes: the server's ``weights.bucket_bytes``.
    """
    weights = Weights(named_tensors, bucket_bytes=bucket_bytes, name_map=name_map)
    for pairs, _ in weights.gathered():
        del pairs


def _columns(named: NamedTensors) -> tuple[list[str], list[torch.Tensor]]:
    """Names and tensors apart: no object is made for each pair."""
    if isinstance(named, Mapping):
        return list(named), list(named.values())
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor)
    return names, tensors


def _without_tied(
    names: Sequence[str], tensors: Sequence[torch.Tensor], expected: Manifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """Without what the model has no name for and is the same memory as something it has."""
    pairs = list(zip(names, tensors, strict=True))
    for pair in pairs:
        check_is_tensor(*pair)
    known = {_memory_of(tensor) for name, tensor in pairs if name in expected.tensors}
    for name, tensor in pairs:
        if name in expected.tensors or not tensor.numel() or _memory_of(tensor) not in known:
            yield name, tensor


def _memory_of(tensor: Any) -> tuple[object, ...]:
    """Equal for tied tensors; not for a view that only starts where another tensor does."""
    if _is_shard(tensor):
        tensor = tensor.to_local()
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _is_shard(tensor: torch.Tensor) -> bool:
    # A DTensor, without loading what defines it; most are plain, and a look for a name that is
    # not there is slow.
    return type(tensor) not in _PLAIN and hasattr(tensor, "full_tensor")
