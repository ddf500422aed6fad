"""facts and memory: what the machine has, and that our figures of it are CUDA's."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from engines.process.gpu_memory import gpu_memory
from engines.tensors.bulk_copy import is_compiled
from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, holder, timed

pytestmark = pytest.mark.embedded
SHARED_GIB = 1
# A CUDA context, and what the driver keeps for a process.
CONTEXT_GIB = 2.0


def test_the_machine_is_described(gpu: Gpu) -> None:
    by_uuid = gpu_memory([gpu.uuid])
    assert by_uuid is not None
    (found,) = by_uuid
    assert 0 <= found.used_bytes < found.total_bytes
    facts: dict[str, Any] = {"uuid": gpu.uuid, "total_bytes": found.total_bytes}
    if gpu.is_real:
        import pynvml

        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        facts["name"] = torch.cuda.get_device_name()
        facts["torch"] = torch.__version__
    facts["is_bulk_compiled"] = is_compiled()
    facts["used_bytes"] = found.used_bytes
    facts["shared_memory_bytes"] = shutil.disk_usage("/dev/shm").free
    record(f"facts {gpu.device}", **facts)


def add_one(tensors: Any, is_done: Any) -> None:
    tensor = tensors.get()
    tensor.add_(1)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    del tensor  # a process that ends with it leaves it counted as used
    is_done.set()


@pytest.mark.slow
def test_a_tensor_is_shared_by_two_processes_and_not_copied(gpu: Gpu) -> None:
    size = gpu.need_free(2 * SHARED_GIB) // 2
    tensor = torch.empty(size, dtype=torch.uint8, device=gpu.device).random_()
    expected = tensor + 1
    context: Any = torch.multiprocessing.get_context("spawn")
    tensors, is_done = context.SimpleQueue(), context.Event()
    process = context.Process(target=add_one, args=(tensors, is_done))

    def give() -> None:
        process.start()
        tensors.put(tensor)
        assert is_done.wait(60)

    seconds = timed(give)
    process.join(60)
    tensors.close()
    assert process.exitcode == 0
    assert torch.equal(tensor, expected)
    record(f"ipc round trip {gpu.device}", seconds=seconds, num_bytes=tensor.nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["index", "uuid"])
def test_our_figure_is_that_of_a_process_that_sees_the_gpu_by(gpu: Gpu, spelling: str) -> None:
    num_bytes = gpu.need_free(4 + CONTEXT_GIB) - int(CONTEXT_GIB * gpu.gib)
    before = gpu.settle()
    visible = gpu.uuid if spelling == "uuid" and gpu.is_real else str(gpu.gpu_id)
    with holder(gpu, num_bytes, CUDA_VISIBLE_DEVICES=visible) as held:
        used = gpu.used_bytes()
        assert num_bytes <= used - before <= num_bytes + CONTEXT_GIB * gpu.gib
        for source in ("taken_by_cuda", "taken_by_nvml"):
            assert num_bytes <= held.report[source] < num_bytes + gpu.gib / 4
        record(f"memory by {spelling} {gpu.device}", used_bytes=used, **held.report)
    assert gpu.settle() <= before + gpu.gib / 100
