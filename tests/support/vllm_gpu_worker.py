"""Calls our worker of GPUs above a double of vLLM's own, and prints what it returned, as JSON.

To be run by an interpreter that has vLLM.  Its allocator is a double, too: there is no GPU.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.device_allocator import AllocationData
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.v1.worker import gpu_worker as of_vllm
from vllm.v1.worker.worker_base import WorkerBase

from engines.vllm_plugin.gpu_worker import GpuWorker
from engines.vllm_plugin.worker import WorkerExtension

GROUPS = SimpleNamespace(groups=SimpleNamespace(names=list))


def allocations(*sizes: tuple[str, int]) -> dict[int, Any]:
    return {at: AllocationData((0, num, at, 0), tag) for at, (tag, num) in enumerate(sizes)}


def said(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    calls: list[str] = []
    fails = {"with": ""}

    def sleep(self: Any, level: int = 1) -> None:
        calls.append(f"sleep {level}")
        assert not fails["with"], fails["with"]

    of_vllm.Worker.sleep = sleep
    of_vllm.Worker.wake_up = lambda self, tags=None: calls.append(f"wake_up {tags}")
    of_vllm.Worker.start_weight_update = lambda self: calls.append("start")
    worker: Any = GpuWorker.__new__(GpuWorker)
    worker.device = torch.device("cuda", 0)
    worker.model_runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(2, 2))
    parallel = SimpleNamespace(world_size=1, pipeline_parallel_size=1)
    worker.vllm_config = SimpleNamespace(parallel_config=parallel, quant_config=None)
    worker.weight_transfer_engine = SimpleNamespace(broadcasts=GROUPS, is_lost=False)

    found: dict[str, Any] = {
        "is_extended": WorkerExtension in GpuWorker.__bases__,
        "is_of_vllm": issubclass(GpuWorker, WorkerBase),
        "without sleep mode": worker.resident_bytes(),
    }
    CuMemAllocator.instance = SimpleNamespace(
        pointer_to_data=allocations(("weights", 5), ("kv_cache", 7), ("weights", 6), ("other", 9))
    )
    found["awake"] = worker.rollout_state()
    fails["with"] = "Memory usage increased after sleeping."
    worker.sleep(2)
    found["asleep"] = worker.rollout_state()
    found["update"] = said(worker.start_weight_update)
    worker.wake_up(["weights"])
    found["update after wake_up"] = said(worker.start_weight_update)
    found["weights are back"] = worker.resident_bytes()
    fails["with"] = "another assertion"
    found["other error"] = said(worker.sleep)
    found["calls"] = calls
    print(json.dumps(found))


if __name__ == "__main__":
    main()
