"""A bucket's tensors into a mapped file, hashed on their way.

Always true: only the ranges of the layout are written; a fingerprint is of a tensor's own bytes, so
a copy that is not the same, or a tensor that changes meanwhile, is found out by whoever proves what
came of it.  What torch must first lay out anew is hashed in the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from mmap import mmap

import torch

from engines import bulk
from engines.embedded.fingerprint import as_bytes, is_in_memory
from rollout.weights.layout import FileLayout
from rollout.weights.manifest import TensorSpec

_BATCH_BYTES = 16 << 20
# One core copies at half of what memory can do, two at most of it; more only on large hosts.
_MOST_THREADS = 4
# Copied from Python, each smaller tensor costs a thread more in waiting for the interpreter (20 us)
# than a second thread wins.
_LARGE_BYTES = 1 << 20


def copy_tensors(
    view: mmap | memoryview,
    layout: FileLayout,
    specs: Sequence[TensorSpec],
    tensors: Sequence[torch.Tensor],
    *,
    fingerprint: bool,
) -> Mapping[str, str]:
    """Copy all, and take their fingerprints if wanted."""
    flat = torch.frombuffer(view, dtype=torch.uint8)  # keeps the mapping while there are copies
    batches = list(_batches(layout.sizes))
    num_threads = min(_MOST_THREADS, len(batches), len(os.sched_getaffinity(0)))
    if not bulk.is_compiled() and layout.num_bytes < len(specs) * _LARGE_BYTES:
        num_threads = 1

    def copy(batch: slice) -> list[str]:
        return _copied(flat, layout, tensors[batch], batch, is_hashed=fingerprint)

    if num_threads < 2:
        found = [copy(batch) for batch in batches]
    else:
        with ThreadPoolExecutor(num_threads, "copy") as threads:
            found = list(threads.map(copy, batches))
    if not fingerprint:
        return {}
    digests = chain.from_iterable(found)
    return dict(zip((spec.name for spec in specs), digests, strict=True))


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    first = size = 0
    for index, its_size in enumerate(sizes):
        size += its_size
        if size >= _BATCH_BYTES or index == len(sizes) - 1:
            yield slice(first, index + 1)
            first, size = index + 1, 0


def _copied(
    flat: torch.Tensor,
    layout: FileLayout,
    tensors: Sequence[torch.Tensor],
    batch: slice,
    *,
    is_hashed: bool,
) -> list[str]:
    """Copy these; their fingerprints, if they are wanted."""
    file = flat.data_ptr()
    sizes = layout.sizes[batch]
    targets = [file + begin for begin in layout.begins[batch]]
    sources = []
    for tensor, target, size in zip(tensors, targets, sizes, strict=True):
        if is_in_memory(tensor):
            sources.append(tensor.data_ptr())
        else:
            flat[target - file : target - file + size].copy_(as_bytes(tensor))
            sources.append(target)
    if is_hashed:
        return bulk.copy_and_hash(layout.heads[batch], targets, sources, sizes)
    bulk.copy_all(targets, sources, sizes)
    return []
