"""Releases and resumes two regions of the memory saver, and prints what each step did, as JSON.

``saver DEVICE GPU_ID BYTES backup|none ROUNDS``: weights of BYTES and a KV cache of as many.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from engines.embedded.memory.regions import Memory
from engines.process.gpu_memory import gpu_memory
from engines.protocol import MemoryTag, read_gpu_id
from engines.tensors.torch_fingerprint import device_fingerprint
from tests.support.gpu.machine import timed


def main(device: str, gpu_id: str, num_bytes: int, backup: str, num_rounds: int) -> None:
    memory = Memory(torch.device("cuda"), saver=True, weights_backup=backup == "backup")
    layout = [(torch.Size([num_bytes]), torch.uint8)]
    (weights,) = memory.allocate(MemoryTag.WEIGHTS, layout)
    (cache,) = memory.allocate(MemoryTag.KV_CACHE, layout)
    addresses = weights.data_ptr(), cache.data_ptr()

    def used() -> int:
        (gpu,) = gpu_memory([read_gpu_id(gpu_id)]) or ()
        return gpu.used_bytes

    tags = [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]
    rounds: list[dict[str, Any]] = []
    for _ in range(num_rounds):
        for tensor in (weights, cache):
            tensor.random_()  # constant bytes are copied faster
        before = device_fingerprint("weights", weights)
        found: dict[str, Any] = {"held": used()}
        found["release_s"] = timed(lambda: memory.release(tags[:1]))
        found["release_kv_s"] = timed(lambda: memory.release(tags[1:]))
        found["released"] = used()
        found["resume_s"] = timed(lambda: memory.resume(tags[:1]))
        found["weights_only"] = used()
        found["weights_kept"] = device_fingerprint("weights", weights) == before
        found["resume_kv_s"] = timed(lambda: memory.resume(tags[1:]))
        found["resumed"] = used()
        found["cache_is_zero"] = not bool(cache.any())
        rounds.append(found)
    same = (weights.data_ptr(), cache.data_ptr()) == addresses
    print(json.dumps({"rounds": rounds, "same_address": same}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    os._exit(0)  # after a region of the memory saver any other end has status 1
