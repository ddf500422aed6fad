"""ranks: several gloo ranks of one trainer share the GPU, and gather what all hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.weights.tensors.gathering_ranks import gather_by_ranks
from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, timed, with_engines

pytestmark = [pytest.mark.embedded, with_engines]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_of_all_ranks_are_gathered_whole(gpu: Gpu, num_ranks: int, tmp_path: Path) -> None:
    found = []
    seconds = timed(
        lambda: found.append(
            gather_by_ranks(tmp_path, gpu.device, str(num_ranks), num_ranks=num_ranks)
        )
    )
    for report in found[0]:
        assert report["equal"], "what was gathered is not what was sharded"
        assert report["most"] <= 3000
    record(f"ranks {num_ranks} {gpu.device}", seconds=seconds)


def test_shared_memory_is_pinned_for_the_gpu(gpu: Gpu, tmp_path: Path) -> None:
    if not gpu.is_real:
        pytest.skip("there is no GPU to pin memory for")
    import torch

    from rollout.weights.routes.buffers import ShmBufferPool
    from rollout.weights.routes.cuda_ipc import pinned

    weight = torch.arange(1 << 20, device=gpu.device)
    pool = ShmBufferPool("/dev/shm", pinned)
    slot = pool.take(weight.nbytes)
    flat = torch.frombuffer(slot.view, dtype=weight.dtype)
    assert flat.is_pinned()
    flat.copy_(weight)
    assert torch.equal(flat, weight.cpu())
    del flat
    pool.close()
