"""Refuses tensors with values that are no numbers: NaN, or infinite in the type that engines have.

Always true: each tensor is read once, on its device; nothing of its size is made, except for
float8, of which torch compares no values.  What is on a device is waited for together.  In host
memory compiled code reads many tensors with one call, at the speed of memory; only those with a
value that may be too large are read again.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from engines.tensors import bulk_copy
from engines.tensors.torch_fingerprint import dtype_name
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec

Checked = tuple[str, torch.Tensor, float]
"""Name, tensor, and the largest value that its engine's type has."""
_LARGEST = {
    name: torch.finfo(getattr(torch, name)).max for name in ("float32", "bfloat16", "float16")
}
_TYPES = {largest: name for name, largest in _LARGEST.items()}


@functools.cache
def largest_of(*dtypes: str) -> float:
    """The largest value that survives casts to these types.

    The others are wider, or have scales.
    """
    return min(_LARGEST.get(name, math.inf) for name in dtypes)


def largest_in(model: Mapping[str, TensorSpec], spec: TensorSpec) -> float:
    """The largest value of a tensor that its engines can hold.

    Args:
        model: its tensors; another one has the type that is pushed.
    """
    known = model.get(spec.name, spec)
    return largest_of(spec.dtype, known.dtype)


def are_checked_in_copies(pushed: Manifest, model: Mapping[str, TensorSpec]) -> bool:
    """Whether the compiled code, which copies tensors in host memory, can check all of them."""
    if not bulk_copy.is_compiled():
        return False
    # There are few pairs of types and thousands of tensors.
    types = {(spec.dtype, model.get(name, spec).dtype) for name, spec in pushed.tensors.items()}
    return all(
        bulk_copy.can_check(sent, largest_of(sent, held))
        for sent, held in types
        if getattr(torch, sent).is_floating_point
    )


def check_finite(tensors: Iterable[Checked]) -> None:
    """Check the values of tensors; those of integers have none that is no number.

    Raises:
        WeightMismatch: a value is not finite; names the first such tensor and counts the others.
    """
    floats = [one for one in tensors if one[1].is_floating_point() and one[1].numel()]
    wrong = list(_with_nonfinite(floats))
    if not wrong:
        return
    name, tensor, largest = wrong[0]
    num = int((~(tensor.double().abs() <= largest) | ~tensor.double().isfinite()).sum())
    is_narrow = largest < max(_LARGEST["float32"], torch.finfo(tensor.dtype).max)
    too_large = f", or over {largest:g}, the most of {_TYPES[largest]}" if is_narrow else ""
    others = f"; {len(wrong) - 1} more tensors have such values" if wrong[1:] else ""
    raise WeightMismatch(
        f"{num} of {tensor.numel()} values of tensor {name!r} are NaN or infinite{too_large}"
        f"{others}. Set weights.allow_nonfinite to push them nevertheless",
        tensor=name,
    )


def _with_nonfinite(floats: Sequence[Checked]) -> Iterator[Checked]:
    """Those with such a value."""
    on_host: list[Checked] = []
    others: list[Checked] = []
    for one in floats:
        (on_host if _is_read_at_once(one) else others).append(one)
    wrong = {id(one) for one in _in_ranges([*_suspects(on_host), *others])}
    return (one for one in floats if id(one) in wrong)


def _is_read_at_once(one: Checked) -> bool:
    _, tensor, largest = one
    is_whole = tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_whole and bulk_copy.can_check(dtype_name(tensor.dtype), largest)


def _suspects(floats: Sequence[Checked]) -> list[Checked]:
    """Tensors that may have such a value, by bits: at the speed of memory, also small ones."""
    if not floats:
        return []
    num_bytes = sum(tensor.nbytes for _, tensor, _ in floats)
    return [one for found in bulk_copy.in_threads(_in_share, floats, num_bytes) for one in found]


def _in_share(floats: Sequence[Checked]) -> list[Checked]:
    found = bulk_copy.suspects(
        [dtype_name(tensor.dtype) for _, tensor, _ in floats],
        [tensor.data_ptr() for _, tensor, _ in floats],
        [tensor.nbytes for _, tensor, _ in floats],
    )
    return [one for one, is_suspect in zip(floats, found, strict=True) if is_suspect]


def _in_ranges(floats: Sequence[Checked]) -> Iterator[Checked]:
    """Those with such a value, by the least and the largest of each, which are NaN if one is."""
    ranges: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for _, tensor, _ in floats:
        values = tensor.detach()
        values = values.float() if values.itemsize == 1 else values
        ranges[values.device, values.dtype] += torch.aminmax(values)
    read = {key: iter(torch.stack(ends).tolist()) for key, ends in ranges.items()}
    for one in floats:
        _, tensor, largest = one
        dtype = torch.float32 if tensor.itemsize == 1 else tensor.dtype
        ends = read[tensor.device, dtype]
        if not all(math.isfinite(end) and abs(end) <= largest for end in (next(ends), next(ends))):
            yield one
