"""What the machine itself can do: every other figure is read beside these."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.repeats import rates
from benchmarks.weights.clock import memcpy
from engines.tensors.torch_fingerprint import device_fingerprint
from tests.support.gpu.machine import Gpu, timed


def measure(gpu: Gpu, repeats: int) -> dict[str, float]:
    """GiB/s: medians, and of fingerprints also the worst.

    ``host_memcpy``: one thread between two arrays.  ``pcie_in`` and ``pcie_out``: pinned memory to
    the GPU and back.  ``pageable_out``: to memory that is not pinned.  ``gpu_copy``: bytes copied
    within the GPU, each of which is read and written.  ``fingerprint``: bytes of a tensor that is
    fingerprinted there, each of which is read twice.
    """
    num_bytes = gpu.need_free(2) // 2
    # Of random bytes: a GPU copies zeros faster than what a model has.
    on_gpu = torch.empty(num_bytes, dtype=torch.uint8, device=gpu.device).random_()
    other = torch.empty_like(on_gpu)
    pageable = torch.empty(num_bytes, dtype=torch.uint8)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=gpu.is_real)
    pinned.copy_(on_gpu)
    works: dict[str, Callable[[], object]] = {
        "pcie_in": lambda: on_gpu.copy_(pinned),
        "pcie_out": lambda: pinned.copy_(on_gpu),
        "pageable_out": lambda: pageable.copy_(on_gpu),
        "gpu_copy": lambda: other.copy_(on_gpu),
        "fingerprint": lambda: device_fingerprint("w", on_gpu),
    }
    found = {"host_memcpy": memcpy(num_bytes, 3)["gib_per_s"]}
    worst = {}
    for name, work in works.items():
        work()  # the first loads kernels, and touches memory
        found[name], worst[name] = rates([timed(work) for _ in range(repeats)], num_bytes)
    return found | {"fingerprint_worst": worst["fingerprint"]}
