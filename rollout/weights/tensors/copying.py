"""A bucket's tensors into a mapped file, each piece hashed right after it was copied.

Always true: only the ranges of the layout are written; a fingerprint is of the bytes that are in
the file then, not of what should be in it.

Hashing apart would read all memory once more; a piece that was just copied is still in the core's
cache.  Tensors are copied by address, for a model of experts has ten thousands of small ones, and
each torch call takes as long as copying 64 KiB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from mmap import mmap

import torch

from engines.embedded.fingerprint import as_bytes
from engines.fingerprint import host_fingerprint_of, start
from rollout.weights.layout import FileLayout
from rollout.weights.manifest import TensorSpec

# What a core's own cache holds twice, as source and as copy, with room for others.
PIECE_BYTES = 512 << 10
_BATCH_BYTES = 16 << 20
# One core copies at half of what memory can do, two at most of it; more only on large hosts.
_MOST_THREADS = 4
# With smaller tensors threads spend more time on waiting for the interpreter, which each copy and
# each hash lets go of, than they win: two take 1.6 times as long as one with 128 KiB.
_LARGE_BYTES = 1 << 20

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
    found: dict[str, str] = {}
    with memoryview(view) as file:
        copying = _Copying(flat, file, layout.offsets, is_hashed=fingerprint)
        batches = list(_batches(specs, tensors, layout.offsets))
        num_threads = min(_MOST_THREADS, len(batches), len(os.sched_getaffinity(0)))
        if layout.num_bytes < len(specs) * _LARGE_BYTES:
            num_threads = 1
        if num_threads < 2:
            for batch in batches:
                found |= copying.copy(*batch)
        else:
            with ThreadPoolExecutor(num_threads, "copy") as threads:
                for part in threads.map(lambda batch: copying.copy(*batch), batches):
                    found |= part
    return found


def _batches(
    specs: Sequence[TensorSpec],
    tensors: Sequence[torch.Tensor],
    offsets: Mapping[str, tuple[int, int]],
) -> Iterator[tuple[Sequence[TensorSpec], Sequence[torch.Tensor]]]:
    first = size = 0
    for index, spec in enumerate(specs):
        begin, end = offsets[spec.name]
        size += end - begin
        if size >= _BATCH_BYTES or index == len(specs) - 1:
            yield specs[first : index + 1], tensors[first : index + 1]
            first, size = index + 1, 0


class _Copying:
    """One bucket under way; batches may be copied by several threads at once."""

    def __init__(
        self,
        flat: torch.Tensor,
        file: memoryview,
        offsets: Mapping[str, tuple[int, int]],
        *,
        is_hashed: bool,
    ) -> None:
        self._flat = flat
        self._address = flat.data_ptr()
        self._file = file
        self._offsets = offsets
        self._is_hashed = is_hashed

    def copy(self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> dict[str, str]:
        found: dict[str, str] = {}
        for spec, tensor in zip(specs, tensors, strict=True):
            begin, end = self._offsets[spec.name]
            source = 0
            if is_in_memory(tensor):
                source = tensor.data_ptr()
            else:
                self._flat[begin:end].copy_(as_bytes(tensor))
            if self._is_hashed:
                found[spec.name] = self._copied_and_hashed(spec, source, begin, end)
            elif source:
                memmove(self._address + begin, source, end - begin)
        return found

    def _copied_and_hashed(self, spec: TensorSpec, source: int, begin: int, end: int) -> str:
        """``source``: 0 if it has been copied already."""
        hasher = start(spec.name, spec.dtype, spec.shape)
        while begin < end:
            size = end - begin
            if size > PIECE_BYTES:
                size = PIECE_BYTES
            if source:
                memmove(self._address + begin, source, size)
                source += size
            hasher.update(self._file[begin : begin + size])
            begin += size
        return host_fingerprint_of(hasher)


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes are simply those at ``data_ptr``."""
    return _is_plain(type(tensor)) and tensor.is_cpu and tensor.is_contiguous()
