"""Where weights and KV cache live, and how their memory is released and resumed, per tag.

Always true: a tensor handed out by ``allocate`` keeps its address for the life of the process.
What else is queued here on a GPU is done after ``finish_work``, which the generation thread calls
after each command and before each step; a release waits by itself.

On CPU a tag is a ``ReleasableMemory``.  On a GPU it is a region of ``torch_memory_saver``.  That
was not run on a GPU; tests run it over logical GPUs, with the saver of ``tools/cpu_engines``
and a double of NVML.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

import torch

from engines.embedded.memory.releasable_memory import ReleasableMemory
from engines.protocol import MemoryTag
from engines.tensors.collective.buffers import finished
from engines.tensors.flattened_bucket import aligned

Layout = Sequence[tuple[torch.Size, torch.dtype]]
# Names the GPUs of a double of NVML; set by tests.
_LOGICAL_GPUS = "NVML_DOUBLE"
# A cache alone lets several threads make its first entry.
_SETTING_UP = threading.Lock()
_POISON = 0xFF  # every byte 0xFF is a NaN in float32, bfloat16 and float16


class HostRegion:
    """A tag on CPU: views into one mapping."""

    def __init__(self, layout: Layout, *, backup: bool, populate: bool) -> None:
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in layout]
        self._memory = ReleasableMemory(sum(aligned(size) for size in sizes))
        self._backup = backup
        self._populate = populate
        if populate:
            self._memory.populate()
        self.tensors = [
            torch.frombuffer(self._memory.take(size), dtype=torch.uint8).view(dtype).view(shape)
            for size, (shape, dtype) in zip(sizes, layout, strict=True)
        ]

    def release(self) -> None:
        self._memory.release(backup=self._backup)

    def resume(self) -> bool:
        has_contents = self._memory.resume()
        if self._populate:
            self._memory.populate()
        return has_contents

    def resident_bytes(self) -> int:
        return self._memory.resident_bytes()


@cache
def memory_saver() -> Any:
    """The memory saver, set up once: after the first region it refuses another mode.

    Raises:
        ValueError: it is not installed.
    """
    try:
        saver = import_module("torch_memory_saver").torch_memory_saver
    except ModuleNotFoundError:
        raise ValueError(
            "memory of a GPU is released by torch_memory_saver, which is not installed: "
            "pip install torch-memory-saver, or set needs_offload to false"
        ) from None
    # "torch" hooks a memory pool of torch's own and so needs no LD_PRELOAD at start.
    saver.hook_mode = "torch"
    return saver


class DeviceRegion:
    """A tag on a GPU: allocations of torch_memory_saver, or without ``saver`` plain ones that are
    never released."""

    def __init__(
        self, tag: MemoryTag, layout: Layout, device: torch.device, *, saver: bool, backup: bool
    ) -> None:
        self._tag = tag.value
        self._device = device
        self._backup = backup
        self._is_released = False
        allocations: Any = nullcontext()
        if saver:
            with _SETTING_UP:
                self._saver = memory_saver()
            allocations = self._saver.region(tag=self._tag, enable_cpu_backup=backup)
        with allocations:
            self.tensors = [
                torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in layout
            ]

    def release(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._saver.pause(self._tag)
        self._is_released = True

    def resume(self) -> bool:
        self._saver.resume(self._tag)
        self._is_released = False
        return self._backup

    def resident_bytes(self) -> int:
        return 0 if self._is_released else sum(tensor.nbytes for tensor in self.tensors)


class Memory:
    """All regions of one engine.  ``command_rules`` decides which command is legal.

    Args:
        device: ``cpu``, ``cuda`` or ``meta``; with logical GPUs, ``cuda`` means the CPU's memory,
            which then is allocated and released as on a GPU.

    Attributes:
        is_on_gpu: whether its memory counts as that of a GPU.
    """

    def __init__(self, device: torch.device, *, saver: bool, weights_backup: bool) -> None:
        self.is_on_gpu = device.type != "cpu"
        has_logical_gpus = device.type == "cuda" and _LOGICAL_GPUS in os.environ
        self.device = torch.device("cpu") if has_logical_gpus else device
        self._saver = saver
        self._weights_backup = weights_backup
        self._regions: dict[MemoryTag, HostRegion | DeviceRegion] = {}
        self.released: set[MemoryTag] = set()

    def allocate(self, tag: MemoryTag, layout: Layout) -> list[torch.Tensor]:
        """Zeroed tensors of the given shapes and dtypes, which become the whole of ``tag``."""
        backup = self._weights_backup and tag is MemoryTag.WEIGHTS
        region: HostRegion | DeviceRegion
        if not self.is_on_gpu:
            # A KV pool is taken up front, as SGLang takes its: to run out of memory is then an
            # error of the start or of the onload, not of some request in the middle of a rollout.
            region = HostRegion(layout, backup=backup, populate=tag is MemoryTag.KV_CACHE)
        else:
            region = DeviceRegion(tag, layout, self.device, saver=self._saver, backup=backup)
        self._regions[tag] = region
        return region.tensors

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Give back each tag's memory.  Tags without a region (no CUDA graphs here) only count."""
        for tag in tags:
            if tag in self._regions:
                self._regions[tag].release()
            self.released.add(tag)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory again.  Lost contents are overwritten: weights become NaN, so that
        a missing push shows; the KV cache becomes zero."""
        for tag in tags:
            region = self._regions.get(tag)
            if region is not None and not region.resume():
                byte = _POISON if tag is MemoryTag.WEIGHTS else 0
                if byte or self.is_on_gpu:  # host memory comes back as zero anyway
                    for tensor in region.tensors:
                        tensor.view(-1).view(torch.uint8).fill_(byte)
            self.released.discard(tag)

    def finish_work(self) -> None:
        """Returns when a GPU has done what was queued on this thread's stream; at once on CPU."""
        finished(self.device)

    def resident_bytes(self) -> dict[str, int]:
        """Physical memory of each tag, in bytes."""
        return {tag.value: region.resident_bytes() for tag, region in self._regions.items()}
