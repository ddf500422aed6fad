"""A bucket's tensors into a mapped file, each piece hashed right after it was copied.

Always true: only the ranges of the layout are written; a fingerprint is of a tensor's own bytes, so
a copy that is not the same, or a tensor that changes meanwhile, is found out by whoever proves what
came of it.  What torch must first lay out anew is hashed in the file.

Hashing apart would read all memory once more; a piece that was just copied is still in the core's
cache: as source, for a copy may go past the caches.  Tensors are copied by address, for a model of
experts has ten thousands of small ones, and each torch call takes as long as copying 64 KiB.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_char, memmove
from itertools import chain
from mmap import mmap

import torch

from engines.embedded.fingerprint import as_bytes
from engines.fingerprint import host_fingerprint_of, start_with
from rollout.weights.layout import FileLayout, Row
from rollout.weights.manifest import TensorSpec

# What a core's own cache holds twice, as source and as copy, with room for others.
PIECE_BYTES = 256 << 10
_BATCH_BYTES = 16 << 20
# One core copies at half of what memory can do, two at most of it; more only on large hosts.
_MOST_THREADS = 4
# With smaller tensors threads spend more time on waiting for the interpreter, which each copy and
# each hash lets go of, than they win: some 20 us for each tensor, and one thread takes 11 to 35 for
# 128 KiB, on one host and another.
_LARGE_BYTES = 1 << 20
# All that has an address here: a slice of it takes a third of the time of an array at an address.
_MEMORY = memoryview((c_char * sys.maxsize).from_address(0)).cast("B")

_is_plain = frozenset({torch.Tensor, torch.nn.Parameter}).__contains__


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
    batches = list(_batches(layout.rows))
    num_threads = min(_MOST_THREADS, len(batches), len(os.sched_getaffinity(0)))
    if layout.num_bytes < len(specs) * _LARGE_BYTES:
        num_threads = 1

    def copy(batch: slice) -> list[str]:
        return _copied(flat, layout.rows[batch], tensors[batch], is_hashed=fingerprint)

    if num_threads < 2:
        found = [copy(batch) for batch in batches]
    else:
        with ThreadPoolExecutor(num_threads, "copy") as threads:
            found = list(threads.map(copy, batches))
    if not fingerprint:
        return {}
    digests = chain.from_iterable(found)
    return dict(zip((spec.name for spec in specs), digests, strict=True))


def _batches(rows: Sequence[Row]) -> Iterator[slice]:
    first = size = 0
    for index, (_, begin, end) in enumerate(rows):
        size += end - begin
        if size >= _BATCH_BYTES or index == len(rows) - 1:
            yield slice(first, index + 1)
            first, size = index + 1, 0


def _copied(
    flat: torch.Tensor, rows: Sequence[Row], tensors: Sequence[torch.Tensor], *, is_hashed: bool
) -> list[str]:
    """Copy these; their fingerprints, if they are wanted."""
    file = flat.data_ptr()
    found: list[str] = []
    for (head, begin, end), tensor in zip(rows, tensors, strict=True):
        source = target = file + begin
        if is_in_memory(tensor):
            source = tensor.data_ptr()
        else:
            flat[begin:end].copy_(as_bytes(tensor))
        if not is_hashed:
            memmove(target, source, end - begin)
            continue
        hasher = start_with(head)
        for done in range(0, end - begin, PIECE_BYTES):
            size = min(PIECE_BYTES, end - begin - done)
            piece = _MEMORY[source + done : source + done + size]
            memmove(target + done, source + done, size)
            hasher.update(piece)
        found.append(host_fingerprint_of(hasher))
    return found


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes are simply those at ``data_ptr``."""
    return _is_plain(type(tensor)) and tensor.is_cpu and tensor.is_contiguous()
