"""Writes buckets as safetensors files, into tmpfs or a folder on a shared disk.

Always true: a file is complete before its path is sent to an engine; its fingerprints are of the
tensor's own bytes, so the later verification finds a bad copy, and a tensor that changed meanwhile.
A tensor that is not contiguous in host memory is hashed in the file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from engines.embedded.weights.torch_fingerprint import (
    as_bytes,
    bytes_fingerprint,
    device_fingerprint,
    is_in_memory,
)
from engines.tensors import bulk_copy
from engines.tensors.fingerprint import BYTES
from rollout.weights.format.bucket_layout import FileLayout, lay_out, split_by_size
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.push.held_buffers import HeldBuffers
from rollout.weights.push.shm_buffers import ShmBuffer, ShmBufferPool
from rollout.weights.tensors.tensor_sources import Pairs

_BATCH_BYTES = 16 << 20
# One core copies at half of the memory bandwidth, two at most of it; more help on large hosts.
_MOST_THREADS = 4
# Without the compiled module, a thread waits 20 us for the interpreter per tensor.  For smaller
# tensors that is more than a second thread gains.
_LARGE_BYTES = 1 << 20


def write_shm_buffer(
    pairs: Pairs, pool: ShmBufferPool | HeldBuffers, *, method: str
) -> tuple[ShmBuffer, Mapping[str, str]]:
    """Write a bucket into a buffer of the pool; returns it with its fingerprints."""
    layout = pool.layouts.of(pairs.specs)
    buffer = pool.take(layout.num_bytes)
    try:
        buffer.write_header(layout.header)
        return buffer, copy_tensors(buffer.view, layout, pairs.specs, pairs.tensors, method=method)
    except BaseException:
        pool.give(buffer)
        raise


def copy_tensors(
    view: mmap | memoryview,
    layout: FileLayout,
    specs: Sequence[TensorSpec],
    tensors: Sequence[torch.Tensor],
    *,
    method: str,
) -> Mapping[str, str]:
    """Copy and hash all in one pass; returns fingerprints by name, made by ``method``. Only the
    ranges of the layout are written."""
    flat = torch.frombuffer(view, dtype=torch.uint8)  # keeps the mapping during the copies
    batches = split_by_size(layout.sizes, _BATCH_BYTES)
    num_threads = min(_MOST_THREADS, len(batches), len(os.sched_getaffinity(0)))
    if not bulk_copy.is_compiled() and layout.num_bytes < len(specs) * _LARGE_BYTES:
        num_threads = 1

    def copy(batch: slice) -> list[str]:
        return _copied(flat, layout, tensors[batch], batch, is_hashed=method == BYTES)

    if num_threads < 2:
        found = [copy(batch) for batch in batches]
    else:
        with ThreadPoolExecutor(num_threads, "copy") as threads:
            found = list(threads.map(copy, batches))
    if method != BYTES:
        return fingerprints_of(zip((spec.name for spec in specs), tensors, strict=True), method)
    digests = chain.from_iterable(found)
    return dict(zip((spec.name for spec in specs), digests, strict=True))


def _copied(
    flat: torch.Tensor,
    layout: FileLayout,
    tensors: Sequence[torch.Tensor],
    batch: slice,
    *,
    is_hashed: bool,
) -> list[str]:
    """Copy these; returns their fingerprints, if wanted."""
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
        return bulk_copy.copy_and_hash(layout.heads[batch], targets, sources, sizes)
    bulk_copy.copy_all(targets, sources, sizes)
    return []


def fingerprints_of(pairs: Iterable[tuple[str, torch.Tensor]], method: str) -> dict[str, str]:
    """Fingerprints of tensors on any device; none if ``method`` is empty."""
    if not method:
        return {}
    fingerprint = bytes_fingerprint if method == BYTES else device_fingerprint
    return {name: fingerprint(name, tensor) for name, tensor in pairs}


class CheckpointWriter:
    """Writes a checkpoint of one version into a temporary folder, and renames it when complete.

    Args:
        folder: its path; an existing folder is replaced.
        copied: the checkpoint that the engines started from, for config and tokenizer.
        method: of the fingerprints; empty takes none.

    Attributes:
        fingerprints: of the tensors written so far.
    """

    def __init__(self, folder: str | Path, copied: str | Path, method: str = "") -> None:
        self.fingerprints: dict[str, str] = {}
        self._method = method
        self.folder = Path(folder)
        self._beside = self.folder.with_name(f".{self.folder.name}.writing")
        shutil.rmtree(self._beside, ignore_errors=True)
        self._beside.mkdir(parents=True)
        self._copied = Path(copied)
        self._num_files = 0

    def add(self, pairs: Pairs) -> None:
        """Write a bucket as another file."""
        layout = lay_out(pairs.specs)
        self._num_files += 1
        with (self._beside / f"bucket-{self._num_files:05d}.safetensors").open("wb") as file:
            file.write(layout.header)
            for name, tensor in sorted(pairs, key=lambda pair: layout.offsets[pair[0]][0]):
                array: Any = as_bytes(tensor).cpu().numpy()
                assert file.tell() == layout.offsets[name][0]
                file.write(memoryview(array))
            file.flush()
            os.fsync(file.fileno())
        self.fingerprints |= fingerprints_of(pairs, self._method)

    def finish(self) -> Path:
        """Complete it, and rename it to its path."""
        for file in self._copied.glob("*"):
            if file.is_file() and not file.name.startswith(".") and not _holds_weights(file):
                shutil.copy2(file, self._beside / file.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._beside.rename(self.folder)
        return self.folder

    def drop(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self._beside, ignore_errors=True)


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(
        ".index.json"
    )
