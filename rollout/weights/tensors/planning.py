"""What a push holds, by name, worked out once and kept from push to push.

Always true: a kept plan is used again only for tensors of the same names, dtypes and shapes, in the
same order, under the same name map; a plan holds no tensor.

A model of experts has ten thousands of tensors.  To make an object for each at every push takes
longer than to copy them, most of all in the full collections of garbage that it sets off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from engines.embedded.fingerprint import dtype_name
from rollout.errors import WeightMismatch
from rollout.weights.manifest import Manifest, TensorSpec

NameMap = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""From a trainer's tensor to the checkpoint's: called with a tensor on the meta device, to
learn names and shapes, and at every push with the real one.  For a framework with fused weights of
its own names (Megatron):

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

# One for the whole model, one for a part of it that is pushed in between, and so on.
_MOST_PLANS = 4


@dataclass(frozen=True, slots=True)
class Part:
    """One of the trainer's tensors, and what it becomes.

    Attributes:
        specs: of what the checkpoint has for it; one, where no name map says otherwise.
        num_bytes: of those.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    specs: tuple[TensorSpec, ...]
    num_bytes: int

    def mapped(self, name_map: NameMap, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What the name map makes of the whole tensor.

        Raises:
            WeightMismatch: something else than was planned.
        """
        found = list(name_map(self.name, tensor))
        if [(name, tuple(one.shape)) for name, one in found] != [
            (spec.name, spec.shape) for spec in self.specs
        ]:
            raise WeightMismatch(
                f"the name map makes something else of {self.name!r} than of its outline on the "
                "meta device; it must go by name, dtype and shape alone",
                tensor=self.name,
            )
        return [one for _, one in found]


@dataclass(frozen=True, slots=True)
class Share:
    """The parts that go in one bucket: those from ``first`` up to ``end``."""

    first: int
    end: int
    specs: list[TensorSpec]


@dataclass(eq=False, slots=True)
class Plan:
    """All parts of a push, in their order."""

    parts: Sequence[Part]
    name_map: NameMap | None
    manifest: Manifest
    num_bytes: int
    _shares: dict[int, list[Share]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, names: Sequence[str], tensors: Sequence[torch.Tensor], name_map: NameMap | None
    ) -> Plan:
        """The plan of these tensors.

        Raises:
            WeightMismatch: a value is not a tensor, or a name occurs twice.
        """
        parts = [_part(*pair, name_map) for pair in zip(names, tensors, strict=True)]
        manifest = Manifest.of(spec for part in parts for spec in part.specs)
        return cls(parts, name_map, manifest, sum(part.num_bytes for part in parts))

    def fits(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], name_map: NameMap | None
    ) -> bool:
        """Whether it is the plan of these tensors too."""
        if name_map is not self.name_map or len(names) != len(self.parts):
            return False
        for part, name, tensor in zip(self.parts, names, tensors, strict=True):
            if (
                part.name != name
                or not isinstance(tensor, torch.Tensor)
                or tensor.dtype is not part.dtype
                or tensor.shape != part.shape
            ):
                return False
        return True

    def shares(self, bucket_bytes: int) -> list[Share]:
        """What goes in each bucket of so many bytes; more only for a tensor that has more."""
        shares = self._shares.get(bucket_bytes)
        if shares is None:
            shares = self._shares[bucket_bytes] = [
                Share(first, end, [spec for part in self.parts[first:end] for spec in part.specs])
                for first, end in self._split(bucket_bytes)
            ]
        return shares

    def _split(self, bucket_bytes: int) -> Iterable[tuple[int, int]]:
        first = size = 0
        for index, part in enumerate(self.parts):
            if index > first and size + part.num_bytes > bucket_bytes:
                yield first, index
                first, size = index, 0
            size += part.num_bytes
        if self.parts:
            yield first, len(self.parts)


class Plans:
    """Those of the last few kinds of push."""

    def __init__(self) -> None:
        self._kept: list[Plan] = []

    def of(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], name_map: NameMap | None
    ) -> Plan:
        """The plan of these tensors.

        Raises:
            WeightMismatch: a value is not a tensor, or a name occurs twice.
        """
        for plan in self._kept:
            if plan.fits(names, tensors, name_map):
                return plan
        plan = Plan.of(names, tensors, name_map)
        self._kept = [plan, *self._kept[: _MOST_PLANS - 1]]
        return plan


def _part(name: str, tensor: torch.Tensor, name_map: NameMap | None) -> Part:
    check_is_tensor(name, tensor)
    if name_map is None:
        spec = spec_of(name, tensor)
        return Part(name, tensor.dtype, tensor.shape, (spec,), tensor.nbytes)
    outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    mapped = list(name_map(name, outline))
    return Part(
        name,
        tensor.dtype,
        tensor.shape,
        tuple(spec_of(*pair) for pair in mapped),
        sum(one.numel() * one.itemsize for _, one in mapped),
    )


def check_is_tensor(name: str, value: object) -> None:
    """Refuse anything else.

    Raises:
        WeightMismatch: naming it.
    """
    if not isinstance(value, torch.Tensor):
        message = f"{name!r} is a {type(value).__name__}, not a tensor"
        raise WeightMismatch(message, tensor=str(name))


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """One tensor's name, dtype and shape."""
    return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def specs_of(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """Names, dtypes and shapes of tensors."""
    return [spec_of(name, tensor) for name, tensor in pairs]
