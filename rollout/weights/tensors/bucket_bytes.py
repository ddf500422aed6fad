"""The bytes of buckets: in files, in tmpfs or on a shared disk, and flat for a broadcast.

Always true: a file is complete before its path is sent to an engine; its fingerprints are of the
tensor's own bytes, so the later verification finds a bad copy, and a tensor that changed meanwhile.
A tensor that is not contiguous in host memory is hashed in the file.  All flat buckets use the same
memory, so one is sent before the next is made.

A broadcast over gloo costs both sides together 0.14 ms, at any size.  Measured on two cores, in CPU
time of both sides: single tensors of 128 KiB cost 2.4 times as much as flattened ones, of 1 MiB 1.1
times, of 4 MiB the same; larger tensors cost less unflattened.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch

from engines.tensors import bulk_copy, flattened_bucket
from engines.tensors.collective.buffers import BucketBuffers, host_memory
from engines.tensors.dtypes import BROADCAST_TYPES
from engines.tensors.fingerprint import BYTES
from engines.tensors.torch_fingerprint import (
    are_in_memory,
    as_bytes,
    bytes_fingerprint,
    device_fingerprints,
    is_in_memory,
)
from rollout.weights.format.bucket_layout import FileLayout, LayoutCache, split_by_size
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.tensors.finite_check import check_finite, largest_in
from rollout.weights.tensors.sources import Pairs

_BATCH_BYTES = 16 << 20
# One core copies at half of the memory bandwidth, two at most of it; more help on large hosts.
_MOST_THREADS = 4
# Without the compiled module, a thread waits 20 us for the interpreter per tensor.  For smaller
# tensors that is more than a second thread gains.
_LARGE_BYTES = 1 << 20
_MOST_MEAN_BYTES = 4 << 20
# On the host; larger buffers take longer to allocate and are not faster.
_MOST_HOST_BYTES = 64 << 20


def copy_tensors(
    view: mmap.mmap | memoryview,
    layout: FileLayout,
    pairs: Pairs,
    *,
    method: str,
    model: Mapping[str, TensorSpec] | None = None,
) -> Mapping[str, str]:
    """Copy, hash and check all in one pass; returns fingerprints by name, made by ``method``. Only
    the ranges of the layout are written.

    Args:
        model: its tensors, in whose types the values must be numbers; None checks none.

    Raises:
        WeightMismatch: a value is not.
    """
    is_compiled = bulk_copy.is_compiled()
    if model is not None and not is_compiled:  # rank 0 has it, and decided
        check_values(pairs, model)
        model = None
    flat = torch.frombuffer(view, dtype=torch.uint8)  # keeps the mapping during the copies
    batches = split_by_size(layout.sizes, _BATCH_BYTES)
    num_threads = min(_MOST_THREADS, len(batches), len(os.sched_getaffinity(0)))
    if not is_compiled and layout.num_bytes < len(pairs) * _LARGE_BYTES:
        num_threads = 1

    def copy(batch: slice) -> tuple[list[str], list[bool]]:
        dtypes = None if model is None else [spec.dtype for spec in pairs.specs[batch]]
        heads = layout.heads[batch] if method == BYTES else None
        return _copied(flat, layout, pairs.tensors[batch], batch, heads, dtypes)

    if num_threads < 2:
        found = [copy(batch) for batch in batches]
    else:
        with ThreadPoolExecutor(num_threads, "copy") as threads:
            found = list(threads.map(copy, batches))
    if model is not None:
        check_values(pairs, model, chain.from_iterable(suspects for _, suspects in found))
    if method != BYTES:
        return fingerprints_of(pairs, method)
    digests = chain.from_iterable(digests for digests, _ in found)
    return dict(zip((spec.name for spec in pairs.specs), digests, strict=True))


def check_values(
    pairs: Pairs, model: Mapping[str, TensorSpec], suspects: Iterable[bool] = repeat(True)
) -> None:
    """Check the values of a bucket, or of the tensors in it that may have a wrong one.

    Raises:
        WeightMismatch: one is no number in the type of the model; names the first such tensor.
    """
    check_finite(
        (spec.name, tensor, largest_in(model, spec))
        for spec, tensor, is_suspect in zip(pairs.specs, pairs.tensors, suspects, strict=False)
        if is_suspect
    )


def _copied(
    flat: torch.Tensor,
    layout: FileLayout,
    tensors: Sequence[torch.Tensor],
    batch: slice,
    heads: Sequence[bytes] | None,
    dtypes: Sequence[str] | None,
) -> tuple[list[str], list[bool]]:
    """Copy these; returns fingerprints, and which may have a value that is no number, if wanted."""
    file = flat.data_ptr()
    sizes = layout.sizes[batch]
    targets = [file + begin for begin in layout.begins[batch]]
    if are_in_memory(tensors):
        sources = list(map(torch.Tensor.data_ptr, tensors))
    else:
        sources = []
        for tensor, target, size in zip(tensors, targets, sizes, strict=True):
            if is_in_memory(tensor):
                sources.append(tensor.data_ptr())
            else:
                flat[target - file : target - file + size].copy_(as_bytes(tensor))
                sources.append(target)
    if dtypes is not None:
        return bulk_copy.copy_and_check(dtypes, targets, sources, sizes, heads)
    if heads is not None:
        return bulk_copy.copy_and_hash(heads, targets, sources, sizes), []
    bulk_copy.copy_all(targets, sources, sizes)
    return [], []


def fingerprints_of(pairs: Iterable[tuple[str, torch.Tensor]], method: str) -> dict[str, str]:
    """Fingerprints of tensors on any device; none if ``method`` is empty."""
    if not method:
        return {}
    if method != BYTES:
        return device_fingerprints(pairs)
    return {name: bytes_fingerprint(name, tensor) for name, tensor in pairs}


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """A flattened bucket.

    Attributes:
        description: ``names``, ``dtypes`` and ``shapes`` of its tensors, in the order of their
            bytes.
        tensor: the bytes, uint8.
    """

    description: Mapping[str, Any]
    tensor: torch.Tensor
    fingerprints: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _FlatLayout:
    """The order and offsets of a bucket's tensors."""

    indices: Sequence[int]
    specs: Sequence[TensorSpec]
    file: FileLayout
    description: Mapping[str, Any]


def is_flattened(pairs: Pairs) -> bool:
    """Whether a broadcast sends these as one tensor of bytes.

    It does if that is cheaper, or if a backend does not know one of their types.
    """
    if any(spec.dtype not in BROADCAST_TYPES for spec in pairs.specs):
        return True
    num_bytes = sum(tensor.nbytes for tensor in pairs.tensors)
    return len(pairs) > 1 and num_bytes < _MOST_MEAN_BYTES * len(pairs)


def split_bucket(
    pairs: Pairs, device: torch.device, most_bytes: int = _MOST_HOST_BYTES
) -> list[Pairs]:
    """Parts of a bucket, each flattened at once on this device."""
    if device.type != "cpu":
        return [pairs]
    sizes = [tensor.nbytes for tensor in pairs.tensors]
    return [pairs[part] for part in split_by_size(sizes, most_bytes)]


class FlatLayoutCache(LayoutCache[_FlatLayout]):
    """Flat layouts, from earlier pushes."""

    def __init__(self) -> None:
        super().__init__(_make_flat_layout)


class Flattener:
    """Flattens the buckets of one push, in memory that is reused."""

    def __init__(self, layouts: FlatLayoutCache) -> None:
        self._layouts = layouts
        self._host: mmap.mmap | None = None
        self._on_device: dict[torch.device, BucketBuffers] = {}

    def flatten(self, pairs: Pairs, device: torch.device, *, method: str) -> FlatBucket:
        """Copy these tensors, from any device, into one on ``device``."""
        layout = self._layouts.of(pairs.specs)
        tensors = [pairs.tensors[index] for index in layout.indices]
        size = layout.file.num_bytes
        if device.type == "cpu":
            if self._host is None or len(self._host) < size:
                self._host = None  # free it before allocating more
                self._host = host_memory(size)
            view = self._host
            found = copy_tensors(view, layout.file, Pairs(layout.specs, tensors), method=method)
            return FlatBucket(
                layout.description, torch.frombuffer(view, dtype=torch.uint8)[:size], found
            )
        tensor = self._concatenate(tensors, size, device)
        return FlatBucket(layout.description, tensor, fingerprints_of(pairs, method))

    def free(self) -> None:
        """Free the memory; the push has ended."""
        self._host = None
        self._on_device.clear()

    def _concatenate(
        self, tensors: Sequence[torch.Tensor], size: int, device: torch.device
    ) -> torch.Tensor:
        """On a device. Reusing the memory is safe: the device runs this thread's work in order,
        so the next copy waits for the broadcast."""
        buffers = self._on_device.setdefault(device, BucketBuffers(device))
        memory = buffers.take(size)
        torch.cat([as_bytes(tensor).to(device) for tensor in tensors], out=memory[:size])
        buffers.give(memory)
        return memory[:size]


def _make_flat_layout(given: Sequence[TensorSpec]) -> _FlatLayout:
    indices = flattened_bucket.wide_first([spec.dtype for spec in given])
    specs = [given[index] for index in indices]
    description = describe_tensors(specs)
    places = flattened_bucket.lay_out(
        description["names"], description["dtypes"], description["shapes"]
    )
    ranges = {spec.name: place for spec, place in zip(specs, places, strict=True)}
    return _FlatLayout(indices, specs, FileLayout.of(specs, ranges), description)


def describe_tensors(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """The arguments of an engine's update that describe these tensors."""
    return {
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }
