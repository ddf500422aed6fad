"""Plans a push: its tensors by name, and its buckets. Plans are cached between pushes.

Always true: a cached plan is used only for tensors of the same names, dtypes and shapes, in the
same order, with the same name map; a plan holds no tensor.

A mixture-of-experts model has tens of thousands of tensors.  Making an object for each at every
push takes longer than copying them, mostly because of full garbage collections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, ne
from typing import Any

import torch

from engines.tensors.dtypes import DTYPES, SAFETENSORS_WORDS
from engines.tensors.torch_fingerprint import dtype_name
from rollout.core.errors import WeightMismatch
from rollout.weights.format.bucket_layout import split_by_size
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.tensors.finite_check import are_checked_in_copies

NameMap = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]
"""Maps a trainer's tensor to the checkpoint's. It is called with a tensor on the meta device, for
names and shapes, and at every push with the real tensor: twice if engines get buckets before all
are made, for the values must be known before.  docs/how-to/megatron.md has one for a framework with
other names and fused weights.
"""

Dtype = torch.dtype

_TYPES = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_LAYOUT, _IS_META = attrgetter("layout"), attrgetter("is_meta")
# For the whole model, for a part of it that is pushed in between, and so on.
_MOST_PLANS = 4


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One of the trainer's tensors, and the checkpoint's tensors made from it.

    Attributes:
        specs: of the checkpoint's tensors; one without a name map.
        num_bytes: of those.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    specs: tuple[TensorSpec, ...]
    num_bytes: int

    def mapped(self, name_map: NameMap, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The name map's result for the whole tensor.

        Raises:
            WeightMismatch: the result differs from the plan.
        """
        found = list(name_map(self.name, tensor))
        if [name for name, _ in found] != [spec.name for spec in self.specs]:
            raise self._differs("it has other names")
        for spec, (_, mapped) in zip(self.specs, found, strict=True):
            if why := why_differs(spec, mapped):
                raise self._differs(f"{spec.name!r} {why}")
        return [mapped for _, mapped in found]

    def _differs(self, why: str) -> WeightMismatch:
        return WeightMismatch(
            f"the name map's result for {self.name!r} differs from that on the meta device, where "
            f"torch.autocast does nothing: {why}; it must depend on name, dtype and shape only, so "
            "push outside of autocast, or give each result its dtype",
            tensor=self.name,
        )


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """The parts of one bucket: from ``first`` up to ``end``."""

    first: int
    end: int
    specs: list[TensorSpec]


@dataclass(eq=False, slots=True)
class PushPlan:
    """All tensors of a push, in order.

    Attributes:
        largest_bytes: of what is made from one of the trainer's tensors.
    """

    parts: Sequence[PlannedTensor]
    name_map: NameMap | None
    manifest: Manifest
    num_bytes: int
    largest_bytes: int
    dtype: torch.dtype | None = None
    _shares: dict[int, list[PlannedBucket]] = field(default_factory=dict)
    _names: list[str] = field(init=False)
    _dtypes: list[torch.dtype] = field(init=False)
    _shapes: list[torch.Size] = field(init=False)
    _checked: tuple[Mapping[str, TensorSpec], bool] | None = None

    def __post_init__(self) -> None:
        self._names = [part.name for part in self.parts]
        self._dtypes = [part.dtype for part in self.parts]
        self._shapes = [part.shape for part in self.parts]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        name_map: NameMap | None,
        dtype: torch.dtype | None = None,
    ) -> PushPlan:
        """The plan of these tensors.

        Args:
            dtype: of float tensors before the name map; None keeps theirs.

        Raises:
            WeightMismatch: a value is not a tensor, or a name occurs twice.
        """
        parts = [_plan_tensor(*pair, name_map, dtype) for pair in zip(names, tensors, strict=True)]
        manifest = Manifest.of(spec for part in parts for spec in part.specs)
        sizes = [part.num_bytes for part in parts]
        return cls(parts, name_map, manifest, sum(sizes), max(sizes, default=0), dtype)

    def fits(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        name_map: NameMap | None,
        dtype: torch.dtype | None = None,
    ) -> bool:
        """Whether it is also the plan of these tensors."""
        if name_map != self.name_map or dtype is not self.dtype:
            return False
        return names == self._names and are_alike(tensors, self._dtypes, self._shapes)

    def is_checked_in_copies(self, model: Mapping[str, TensorSpec]) -> bool:
        """See ``are_checked_in_copies``; it is found out once for a model."""
        if self._checked is None or self._checked[0] is not model:
            self._checked = model, are_checked_in_copies(self.manifest, model)
        return self._checked[1]

    def shares(self, bucket_bytes: int) -> list[PlannedBucket]:
        """The buckets of up to so many bytes; one is larger if a single tensor is."""
        shares = self._shares.get(bucket_bytes)
        if shares is None:
            sizes = [part.num_bytes for part in self.parts]
            shares = self._shares[bucket_bytes] = [
                PlannedBucket(
                    run.start, run.stop, [spec for part in self.parts[run] for spec in part.specs]
                )
                for run in split_by_size(sizes, bucket_bytes)
            ]
        return shares


class PushPlanCache:
    """Plans of the last few kinds of push."""

    def __init__(self) -> None:
        self._cached: list[PushPlan] = []

    def of(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        name_map: NameMap | None,
        dtype: torch.dtype | None = None,
    ) -> PushPlan:
        """See ``PushPlan.of``."""
        for plan in self._cached:
            if plan.fits(names, tensors, name_map, dtype):
                return plan
        plan = PushPlan.of(names, tensors, name_map, dtype)
        self._cached = [plan, *self._cached[: _MOST_PLANS - 1]]
        return plan


def are_alike(
    tensors: Sequence[Any], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> bool:
    """Whether all are tensors with values that can be copied, of these types and shapes.

    One call asks all tensors for one thing: a model of experts has tens of thousands.
    """
    return (
        all(issubclass(kind, torch.Tensor) for kind in set(map(type, tensors)))
        and list(map(_DTYPE, tensors)) == dtypes
        and not any(
            map(ne, map(_SHAPE, tensors), shapes)
        )  # without a list, which wakes the collector
        and {torch.strided}.issuperset(map(_LAYOUT, tensors))
        and not any(map(_IS_META, tensors))
    )


def cast_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor after the cast of float tensors to ``dtype``."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _plan_tensor(
    name: str, tensor: torch.Tensor, name_map: NameMap | None, dtype: torch.dtype | None
) -> PlannedTensor:
    check_is_tensor(name, tensor)
    outline = torch.empty(tensor.shape, dtype=cast_dtype(tensor, dtype), device="meta")
    mapped = [(name, outline)] if name_map is None else list(name_map(name, outline))
    return PlannedTensor(
        name,
        tensor.dtype,
        tensor.shape,
        tuple(spec_of(*pair) for pair in mapped),
        sum(tensor.numel() * tensor.itemsize for _, tensor in mapped),
    )


def check_is_tensor(name: str, value: object) -> None:
    """Check that a value is a tensor with values that can be copied.

    Raises:
        WeightMismatch: it is not; names it.
    """
    if why := _why_no_tensor(value):
        raise WeightMismatch(f"{name!r} {why}", tensor=str(name))


def _why_no_tensor(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if value.layout is not torch.strided:
        return f"is {value.layout}; push its to_dense()"
    if value.is_meta:
        return "is on the meta device, so it has no values; load the model first"
    return ""


def first_difference(specs: Sequence[TensorSpec], tensors: Sequence[Any]) -> tuple[str, str] | None:
    """Name of the first tensor that is not what its spec says, and why, or None if all are."""
    dtypes = [_TYPES[spec.dtype] for spec in specs]
    if are_alike(tensors, dtypes, [spec.shape for spec in specs]):
        return None
    differing = zip(specs, map(why_differs, specs, tensors), strict=True)
    return next(((spec.name, why) for spec, why in differing if why), None)


def why_differs(spec: TensorSpec, tensor: Any) -> str:
    """Why a tensor is not the one that the spec describes."""
    if why := _why_no_tensor(tensor):
        return why
    if tensor.dtype is getattr(torch, spec.dtype) and tensor.shape == spec.shape:
        return ""
    found = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
    return f"is {found}, not {spec.dtype} {list(spec.shape)} as planned"


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a tensor is.

    Raises:
        WeightMismatch: no route carries its type; names it.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in SAFETENSORS_WORDS:
        raise WeightMismatch(
            f"tensor {name!r} is {dtype}, which is not sent to engines; these types are: "
            f"{', '.join(SAFETENSORS_WORDS)}",
            tensor=name,
        )
    return TensorSpec(name, dtype, tuple(tensor.shape))


def specs_of(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    return [spec_of(name, tensor) for name, tensor in pairs]
