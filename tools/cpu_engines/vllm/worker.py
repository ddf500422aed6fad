"""vLLM's worker of CPUs, that frees, loses and restores memory as on a GPU; for ``--worker-cls``.

Always true:
- what is released is given back to the system, and touching it ends the process;
- what was released without a backup holds no old bytes afterwards, but a constant;
- a linear layer keeps its weight.  vLLM 0.32 packs it elsewhere on a CPU and leaves an empty
  parameter, so that checksums are of nothing and a release frees nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker

from engines.vllm_plugin.worker import KV_CACHE, WEIGHTS, CheckedWorker, WorkerExtension
from tools.cpu_engines.memory_saver.torch_memory_saver import Block, MemorySaver

_BACKED_UP = 1
# As a float of any width it is 0.75: garbage, but finite.  NaN in the KV cache would get through
# the mask of attention, into all tokens.
_POISON = 0x3F


class HostWorker(CPUWorker):  # type: ignore[misc]
    """Its memory can be released by tag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        utils.dispatch_cpu_unquantized_gemm = _keep_weight
        self._memory = MemorySaver()
        self._buffers: dict[str, torch.Tensor] = {}

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return self._memory.region(tag) if tag in (WEIGHTS, KV_CACHE) else nullcontext()

    def sleep(self, level: int = 1) -> None:
        # vLLM keeps the buffers of a model at any level.
        named = self.model_runner.get_model().named_buffers()
        self._buffers = {name: buffer.clone() for name, buffer in named}
        self._release(WEIGHTS, has_backup=level == _BACKED_UP)
        self._release(KV_CACHE, has_backup=False)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for tag in tags or _released(self._memory):
            self._take(tag)
        if WEIGHTS in (tags or (WEIGHTS,)):
            self._restore_buffers()

    def discard(self, tags: tuple[str, ...]) -> None:
        for tag in tags:
            self._release(tag, has_backup=False)

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each tag that are not released."""
        return {
            tag: sum(block.held_bytes for block in self._memory.blocks(tag))
            for tag in (WEIGHTS, KV_CACHE)
        }

    def _release(self, tag: str, *, has_backup: bool) -> None:
        held = [block for block in self._memory.blocks(tag) if not block.is_paused]
        for block in held:
            block.has_backup = has_backup
            block.pause()

    def _take(self, tag: str) -> None:
        for block in _paused(self._memory, tag):
            block.resume()
            if not block.has_backup:
                block.overwrite(_POISON)

    def _restore_buffers(self) -> None:
        for name, buffer in self.model_runner.get_model().named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        self._buffers = {}


class CpuWorker(CheckedWorker, WorkerExtension, HostWorker):
    """One rank on a CPU."""


def _paused(memory: MemorySaver, tag: str) -> Sequence[Block]:
    return [block for block in memory.blocks(tag) if block.is_paused]


def _released(memory: MemorySaver) -> Iterator[str]:
    return (tag for tag in (WEIGHTS, KV_CACHE) if _paused(memory, tag))


def _keep_weight(layer: Any, remove_weight: bool) -> None:
    """In the place of vLLM's: torch multiplies with the parameter itself."""
    layer.cpu_linear = torch.nn.functional.linear
