"""What a trainer holds, as the tensors a checkpoint names: plain, sharded (DTensor), or renamed.

Always true: names, dtypes and shapes are known before anything is gathered or sent; shards are
gathered bucket by bucket, so that of the whole tensors no more than a bucket is alive at a time;
every rank that calls ``gathered`` does so in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from engines.embedded.fingerprint import dtype_name
from rollout.errors import WeightMismatch
from rollout.weights.manifest import Manifest, TensorSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter)

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
NameMap = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""From a trainer's tensor to the checkpoint's: called once with a tensor on the meta device, to
learn names and shapes, and once with the real one.  For a framework with fused weights of its own
names (Megatron):

    def to_hf(name, tensor):
        layer = name.split(".")[2]
        if name.endswith("self_attention.linear_qkv.weight"):
            # [groups * (q_per_group + 2) * head_dim, hidden], a group's queries, key and value
            grouped = tensor.view(num_groups, q_per_group + 2, head_dim, hidden)
            at = f"model.layers.{layer}.self_attn"
            yield f"{at}.q_proj.weight", grouped[:, :q_per_group].reshape(-1, hidden)
            yield f"{at}.k_proj.weight", grouped[:, -2].reshape(-1, hidden)
            yield f"{at}.v_proj.weight", grouped[:, -1].reshape(-1, hidden)
        elif name.endswith("mlp.linear_fc1.weight"):
            gate, up = tensor.chunk(2)
            yield f"model.layers.{layer}.mlp.gate_proj.weight", gate
            yield f"model.layers.{layer}.mlp.up_proj.weight", up
        else:
            yield HF_NAMES[name], tensor

    server.update_weights(megatron_tensors, name_map=to_hf)

Shards of tensor, pipeline and expert parallelism are the caller's to gather: a DTensor is gathered
here; for anything else pass an iterable of (name, tensor) made from the framework's own gathers.
"""


def specs_of(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """Names, dtypes and shapes of tensors."""
    return [spec_of(name, tensor.dtype, tensor.shape) for name, tensor in pairs]


@lru_cache(maxsize=1 << 16)
def spec_of(name: str, dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    """One tensor's; the same object at every push, so that comparing lists of them is quick."""
    return TensorSpec(name, dtype_name(dtype), tuple(shape))


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the trainer's tensors, and what it becomes."""

    name: str
    tensor: torch.Tensor
    specs: tuple[TensorSpec, ...]
    num_bytes: int


class Weights:
    """A trainer's tensors, planned in buckets.

    Args:
        named_tensors: under the trainer's names; kept as they are, shards included.
        bucket_bytes: a bucket holds so much unless a single tensor is larger.
        expected: the model's manifest, to recognise tied tensors; None keeps every name.
        name_map: see ``NameMap``.

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
    ) -> None:
        pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
        for name, tensor in pairs:
            if not isinstance(tensor, torch.Tensor):
                raise WeightMismatch(
                    f"{name!r} is a {type(tensor).__name__}, not a tensor", tensor=str(name)
                )
        if expected is not None and name_map is None:
            known = expected.tensors
            if any(name not in known for name, _ in pairs):
                pairs = list(_without_tied(pairs, expected))
        self._name_map = name_map
        self._parts = [self._planned(name, tensor) for name, tensor in pairs]
        self.manifest = Manifest.of(spec for part in self._parts for spec in part.specs)
        self.has_shards = any(_is_shard(part.tensor) for part in self._parts)
        self._bucket_bytes = bucket_bytes
        self._buckets = list(_split(self._parts, bucket_bytes))

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    @property
    def is_on_cuda(self) -> bool:
        return any(part.tensor.is_cuda for part in self._parts)

    def gathered(
        self, most_bytes: int | None = None
    ) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
        """Each bucket's whole tensors, and whether they are the last.

        Drop one (``del``) before asking for the next, or both are alive.

        Args:
            most_bytes: smaller buckets than those that were planned.
        """
        buckets = self._buckets
        if most_bytes is not None and most_bytes < self._bucket_bytes:
            buckets = list(_split(self._parts, most_bytes))
        for index, bucket in enumerate(buckets):
            is_last = index == len(buckets) - 1
            yield [pair for part in bucket for pair in self._whole(part)], is_last

    def _planned(self, name: str, tensor: torch.Tensor) -> _Part:
        if self._name_map is None:
            spec = spec_of(name, tensor.dtype, tensor.shape)
            return _Part(name, tensor, (spec,), tensor.nbytes)
        outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        mapped = self._mapped(name, outline)
        return _Part(
            name,
            tensor,
            tuple(specs_of(mapped)),
            sum(one.numel() * one.itemsize for _, one in mapped),
        )

    def _mapped(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        assert self._name_map is not None
        return list(self._name_map(name, tensor))

    def _whole(self, part: _Part) -> list[tuple[str, torch.Tensor]]:
        tensor: Any = part.tensor.detach()
        if _is_shard(tensor):
            tensor = tensor.full_tensor()
        if self._name_map is None:
            return [(part.name, tensor)]
        mapped = self._mapped(part.name, tensor)
        if [(name, tuple(one.shape)) for name, one in mapped] != [
            (spec.name, spec.shape) for spec in part.specs
        ]:
            raise WeightMismatch(
                f"the name map makes something else of {part.name!r} than of its outline on the "
                "meta device; it must go by name, dtype and shape alone",
                tensor=part.name,
            )
        return mapped


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


def _without_tied(
    pairs: list[tuple[str, torch.Tensor]], expected: Manifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """Without what the model has no name for and is the same memory as something it has."""
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


def _split(parts: list[_Part], bucket_bytes: int) -> Iterator[list[_Part]]:
    bucket: list[_Part] = []
    size = 0
    for part in parts:
        if bucket and size + part.num_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.num_bytes
    if bucket:
        yield bucket
