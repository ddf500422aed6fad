"""Holds memory of a GPU until its standard input ends: ``holder DEVICE BYTES PINNED_BYTES``.

On ``cpu`` the memory is a logical GPU's. It prints one line of JSON once it holds all of it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from engines.embedded.memory.regions import Memory
from engines.protocol import MemoryTag


def main(device: str, num_bytes: int, pinned_bytes: int) -> None:
    held: list[Any] = []
    free_before, total = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
    shape = torch.Size([num_bytes])
    if device == "cuda":
        held.append(torch.zeros(shape, dtype=torch.uint8, device=device))
        if pinned_bytes:
            held.append(torch.zeros(pinned_bytes, dtype=torch.uint8, pin_memory=True))
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
    else:
        memory = Memory(torch.device("cuda"), saver=True, weights_backup=False)
        held.append(memory.allocate(MemoryTag.WEIGHTS, [(shape, torch.uint8)]))
        free = 0
    figures = {
        "pid": os.getpid(),
        "used_bytes": total - free,
        "free_before_bytes": free_before,
    }
    print(json.dumps(figures), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
