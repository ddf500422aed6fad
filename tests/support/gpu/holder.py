"""Holds memory of a GPU until its standard input ends: ``holder DEVICE GPU_ID BYTES PINNED_BYTES``.

On ``cpu`` the memory is a logical GPU's.  It prints one line of JSON once it holds all of it: its
pid, and what the memory takes by CUDA's figures and by NVML's.  Only the change is compared, since
the two count the driver's own memory differently.
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


def main(device: str, gpu_id: str, num_bytes: int, pinned_bytes: int) -> None:
    def used() -> tuple[int, int]:
        (gpu,) = gpu_memory([read_gpu_id(gpu_id)]) or ()
        if device != "cuda":
            return gpu.used_bytes, gpu.used_bytes
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()  # makes the context, the first time
        return total - free, gpu.used_bytes

    used()
    before = used()
    held: list[Any] = []
    shape = torch.Size([num_bytes])
    if device == "cuda":
        held.append(torch.zeros(shape, dtype=torch.uint8, device=device))
        if pinned_bytes:
            held.append(torch.zeros(pinned_bytes, dtype=torch.uint8, pin_memory=True))
    else:
        memory = Memory(torch.device("cuda"), saver=True, weights_backup=False)
        held.append(memory.allocate(MemoryTag.WEIGHTS, [(shape, torch.uint8)]))
    by_cuda, by_nvml = (after - first for after, first in zip(used(), before, strict=True))
    figures = {"pid": os.getpid(), "taken_by_cuda": by_cuda, "taken_by_nvml": by_nvml}
    print(json.dumps(figures), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # after a region of the memory saver any other end has status 1
