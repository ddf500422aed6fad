"""Where weights and KV cache live, and how their memory is released and resumed, per tag.

Always true: a tensor handed out by ``allocate`` keeps its address for the life of the process.
On CPU a tag is an ``Arena``.  On CUDA it is a region of ``torch_memory_saver``; that path is
written after its documentation and has not been run (no GPU where this was written).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from math import prod
from typing import Any, Protocol

import torch

from engines.embedded.arena import Arena, aligned
from engines.protocol import MemoryTag

Layout = Sequence[tuple[torch.Size, torch.dtype]]
_POISON = 0xFF  # every byte 0xFF is a NaN in float32, bfloat16 and float16


class Region(Protocol):
    """The memory of one tag."""

    tensors: list[torch.Tensor]

    def release(self) -> None: ...
    def resume(self) -> bool: ...
    def resident_bytes(self) -> int: ...


class ArenaRegion:
    """A tag on CPU: views into one arena."""

    def __init__(self, layout: Layout, *, backup: bool, populate: bool) -> None:
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in layout]
        self._arena = Arena(sum(aligned(size) for size in sizes))
        self._backup = backup
        self._populate = populate
        if populate:
            self._arena.populate()
        self.tensors = [
            torch.frombuffer(self._arena.take(size), dtype=torch.uint8).view(dtype).view(shape)
            for size, (shape, dtype) in zip(sizes, layout, strict=True)
        ]

    def release(self) -> None:
        self._arena.release(backup=self._backup)

    def resume(self) -> bool:
        has_contents = self._arena.resume()
        if self._populate:
            self._arena.populate()
        return has_contents

    def resident_bytes(self) -> int:
        return self._arena.resident_bytes()


class SaverRegion:
    """A tag on CUDA: allocations of torch_memory_saver.  Not run yet, see the module's words."""

    def __init__(self, tag: MemoryTag, layout: Layout, *, backup: bool) -> None:
        saver: Any = import_module("torch_memory_saver").torch_memory_saver
        # "torch" hooks a memory pool of torch's own and so needs no LD_PRELOAD at start.
        saver.hook_mode = "torch"
        self._saver = saver
        self._tag = tag.value
        self._backup = backup
        self._is_released = False
        with saver.region(tag=self._tag, enable_cpu_backup=backup):
            self.tensors = [
                torch.zeros(shape, dtype=dtype, device="cuda") for shape, dtype in layout
            ]

    def release(self) -> None:
        torch.cuda.synchronize()
        self._saver.pause(self._tag)
        self._is_released = True

    def resume(self) -> bool:
        self._saver.resume(self._tag)
        self._is_released = False
        return self._backup

    def resident_bytes(self) -> int:
        return 0 if self._is_released else sum(tensor.nbytes for tensor in self.tensors)


class PlainRegion:
    """A tag whose memory is never released: CUDA without the memory saver."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in layout]

    def release(self) -> None:
        raise AssertionError("refused before it gets here: the memory saver is off")

    def resume(self) -> bool:
        raise AssertionError("refused before it gets here: the memory saver is off")

    def resident_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Memory:
    """All regions of one engine.  Which command is legal when is decided in ``legality``."""

    def __init__(self, device: torch.device, *, saver: bool, weights_backup: bool) -> None:
        self.device = device
        self._saver = saver
        self._weights_backup = weights_backup
        self._regions: dict[MemoryTag, Region] = {}
        self.released: set[MemoryTag] = set()

    def allocate(self, tag: MemoryTag, layout: Layout) -> list[torch.Tensor]:
        """Zeroed tensors of the given shapes and dtypes, which become the whole of ``tag``."""
        backup = self._weights_backup and tag is MemoryTag.WEIGHTS
        region: Region
        if self.device.type == "cpu":
            # A KV pool is taken up front, as SGLang takes its: to run out of memory is then an
            # error of the start or of the onload, not of some request in the middle of a rollout.
            region = ArenaRegion(layout, backup=backup, populate=tag is MemoryTag.KV_CACHE)
        elif self._saver:
            region = SaverRegion(tag, layout, backup=backup)
        else:
            region = PlainRegion(layout, self.device)
        self._regions[tag] = region
        return region.tensors

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Give back each tag's memory.  Tags without a region (no CUDA graphs here) only count."""
        for tag in tags:
            if tag in self._regions:
                self._regions[tag].release()
            self.released.add(tag)

    def resume(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory again.  Contents that did not come back are made unmistakable:
        weights become NaN, so that a missing push shows; the KV cache becomes zero."""
        for tag in tags:
            region = self._regions.get(tag)
            if region is not None and not region.resume():
                byte = _POISON if tag is MemoryTag.WEIGHTS else 0
                if byte or self.device.type != "cpu":  # arenas come back as zero anyway
                    for tensor in region.tensors:
                        tensor.view(-1).view(torch.uint8).fill_(byte)
            self.released.discard(tag)

    def resident_bytes(self) -> dict[str, int]:
        """Physical memory of each tag, in bytes."""
        return {tag.value: region.resident_bytes() for tag, region in self._regions.items()}
