"""vLLM's worker of GPUs with our checks, for ``--worker-cls``.  Not tested on a GPU."""

from __future__ import annotations

import logging
from collections import Counter

from vllm.device_allocator.cumem import CuMemAllocator
from vllm.v1.worker.gpu_worker import Worker

from engines.vllm_plugin.worker import KV_CACHE, WEIGHTS, CheckedWorker, WorkerExtension

logger = logging.getLogger(__name__)

_OF_VLLM = "Memory usage increased"


class WorkerBesideOthers(Worker):  # type: ignore[misc]
    """vLLM's own, on a GPU that others use too."""

    def sleep(self, level: int = 1) -> None:
        """vLLM releases first, and then asserts that the GPU has not less free memory than before;
        a trainer beside it may have taken what was released."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if not str(error).startswith(_OF_VLLM):
                raise
            logger.warning("others on this GPU took memory during the release: %s", error)


class GpuWorker(CheckedWorker, WorkerExtension, WorkerBesideOthers):
    """One rank on a GPU."""

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each tag that are not released; none without vLLM's sleep mode."""
        allocator = CuMemAllocator.instance
        if allocator is None or not allocator.pointer_to_data:
            return {}
        held: Counter[str] = Counter({WEIGHTS: 0, KV_CACHE: 0})
        for data in allocator.pointer_to_data.values():
            if data.tag in held and data.tag not in self.released_tags:
                _, num_bytes, *_ = data.handle
                held[data.tag] += num_bytes
        return dict(held)
