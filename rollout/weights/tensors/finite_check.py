"""Refuses tensors with values that are no numbers: NaN, or infinite in the type that engines have.

Always true: each tensor is read once, on its device; nothing of its size is made, except for
float8, of which torch compares no values.  What is on a device is waited for together.  In host
memory compiled code reads many tensors with one call, at the speed of memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from engines.tensors import bulk_copy
from engines.tensors.torch_fingerprint import dtype_name
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest

Checked = tuple[str, torch.Tensor, float]
"""Name, tensor, and the largest value that its engine's type has."""
_LARGEST = {"float16": torch.finfo(torch.float16).max}


def largest_of(*dtypes: object) -> float:
    """The largest value that survives casts to these types.

    Others than float16 have the range of their source, or scales.
    """
    names = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return min(_LARGEST.get(name, math.inf) for name in names)


def are_checked_in_copies(pushed: Manifest, expected: Manifest | None) -> bool:
    """Whether the compiled code, which copies tensors in host memory, can check all of them.

    Args:
        expected: of the engines; what their types do not have is found only before the copy.
    """
    known = {} if expected is None else expected.tensors
    return bulk_copy.is_compiled() and all(
        bulk_copy.can_check(spec.dtype)
        and (spec.name not in known or largest_of(known[spec.name].dtype) >= largest_of(spec.dtype))
        for spec in pushed.tensors.values()
        if getattr(torch, spec.dtype).is_floating_point
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
    too_large = "" if math.isinf(largest) else f", or over {largest:g}, the most of float16"
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
    wrong = {id(one) for one in [*_in_memory(on_host), *_in_ranges(others)]}
    return (one for one in floats if id(one) in wrong)


def _is_read_at_once(one: Checked) -> bool:
    _, tensor, largest = one
    is_whole = tensor.device.type == "cpu" and tensor.is_contiguous()
    # Otherwise a number may be too large for the engine's type.
    all_fit = torch.finfo(tensor.dtype).max <= largest
    return is_whole and all_fit and bulk_copy.can_check(dtype_name(tensor.dtype))


def _in_memory(floats: Sequence[Checked]) -> list[Checked]:
    """Those with such a value, by their bits: at the speed of memory, also if they are small."""
    if not floats:
        return []
    num_bytes = sum(tensor.nbytes for _, tensor, _ in floats)
    return [one for found in bulk_copy.in_threads(_in_share, floats, num_bytes) for one in found]


def _in_share(floats: Sequence[Checked]) -> list[Checked]:
    found = bulk_copy.nonfinite(
        [dtype_name(tensor.dtype) for _, tensor, _ in floats],
        [tensor.data_ptr() for _, tensor, _ in floats],
        [tensor.nbytes for _, tensor, _ in floats],
    )
    return [one for one, is_wrong in zip(floats, found, strict=True) if is_wrong]


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
