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
from itertools import chain, compress
from operator import attrgetter

import torch

from engines.tensors import bulk_copy
from engines.tensors.torch_fingerprint import are_in_memory, dtype_name
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec

Checked = tuple[str, torch.Tensor, float]
"""Name, tensor, and the largest value that its engine's type has."""
_LARGEST = {
    name: torch.finfo(getattr(torch, name)).max for name in ("float32", "bfloat16", "float16")
}
_NBYTES = attrgetter("nbytes")
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
    floats = [
        checked for checked in tensors if checked[1].is_floating_point() and checked[1].numel()
    ]
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


def check_in_memory(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor], model: Mapping[str, TensorSpec]
) -> bool:
    """Check the values of tensors that ``are_checked_in_copies``, without an object for each.

    Returns:
        False if their bytes are not all in host memory as they are sent; then nothing is checked.

    Raises:
        WeightMismatch: see ``check_finite``.
    """
    if not are_in_memory(tensors):
        return False
    suspects = _suspects(tensors, [spec.dtype for spec in specs])
    check_finite(
        (spec.name, tensor, largest_in(model, spec))
        for spec, tensor in compress(zip(specs, tensors, strict=True), suspects)
    )
    return True


def _with_nonfinite(floats: Sequence[Checked]) -> Iterator[Checked]:
    """The tensors with a value that is not finite, or too large."""
    on_host: list[Checked] = []
    others: list[Checked] = []
    for checked in floats:
        (on_host if _is_read_at_once(checked) else others).append(checked)
    dtypes = [dtype_name(tensor.dtype) for _, tensor, _ in on_host]
    suspects = compress(on_host, _suspects([tensor for _, tensor, _ in on_host], dtypes))
    wrong = {id(checked) for checked in _in_ranges([*suspects, *others])}
    return (checked for checked in floats if id(checked) in wrong)


def _is_read_at_once(checked: Checked) -> bool:
    _, tensor, largest = checked
    is_whole = tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_whole and bulk_copy.can_check(dtype_name(tensor.dtype), largest)


def _suspects(tensors: Sequence[torch.Tensor], dtypes: Sequence[str]) -> Iterator[bool]:
    """Whether each may have such a value, by bits: at the speed of memory, also small ones."""
    if not tensors:  # also where there is no compiled code
        return iter(())
    places = list(map(torch.Tensor.data_ptr, tensors))
    sizes = list(map(_NBYTES, tensors))

    def read(part: slice) -> list[bool]:
        return bulk_copy.suspects(dtypes[part], places[part], sizes[part])

    return chain.from_iterable(bulk_copy.in_threads(read, sizes))


def _in_ranges(floats: Sequence[Checked]) -> Iterator[Checked]:
    """The tensors with such a value, found by least and largest value: NaN if any value is."""
    ranges: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for _, tensor, _ in floats:
        values = tensor.detach()
        values = values.float() if values.itemsize == 1 else values
        ranges[values.device, values.dtype] += torch.aminmax(values)
    read = {key: iter(torch.stack(ends).tolist()) for key, ends in ranges.items()}
    for checked in floats:
        _, tensor, largest = checked
        dtype = torch.float32 if tensor.itemsize == 1 else tensor.dtype
        ends = read[tensor.device, dtype]
        if not all(math.isfinite(end) and abs(end) <= largest for end in (next(ends), next(ends))):
            yield checked
