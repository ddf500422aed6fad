"""Shards of FSDP2 are gathered bucket by bucket: two real ranks over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.embedded
WORKER = Path(__file__).with_name("fsdp_worker.py")


def gather_by_ranks(
    folder: Path, *arguments: str, num_ranks: int = 2, worker: Path = WORKER
) -> list[dict[str, Any]]:
    """What each rank says of the gathers that all took part in."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(folder), *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=90)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(num_ranks)]


def test_shards_are_gathered_whole_with_one_bucket_of_them_alive(tmp_path: Path) -> None:
    for report in gather_by_ranks(tmp_path):
        assert report["equal"], "what was gathered is not what was sharded"
        assert report["buckets"] > 3
        # A bucket's worth, of a model that has several: nothing else was whole at any time.
        assert report["most"] <= 3000 < report["total"] / 3
        assert report["alive"] == 0


def test_shards_of_one_rank_are_pushed_by_it_alone(tmp_path: Path) -> None:
    (report,) = gather_by_ranks(tmp_path, "cpu", "1", num_ranks=1)
    assert report["equal"]


@pytest.mark.slow
def test_any_placement_is_gathered_whole(tmp_path: Path) -> None:
    worker = WORKER.with_name("sharding_worker.py")
    names = gather_by_ranks(tmp_path, num_ranks=4, worker=worker)[0]["names"]
    kinds = {name.split(".")[0] for name in names}
    assert kinds == {"uneven", "two", "hsdp", "offloaded", "beside_tp"}


def test_so_many_gathers_are_under_way_and_no_more() -> None:
    from rollout.weights.tensors import tensor_sources

    under_way, most = 0, 0

    class Gather:
        def wait(self) -> str:
            nonlocal under_way
            under_way -= 1
            return "whole"

    def start(tensor: Any) -> Gather:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return Gather()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_sources, "_started", start)
        tensors = [torch.zeros(1) for _ in range(100)]
        assert tensor_sources.gathered_whole(tensors) == ["whole"] * 100
    assert (under_way, most) == (0, tensor_sources.MOST_GATHERS)


def test_shards_in_host_memory_are_gathered_on_the_devices_of_their_mesh() -> None:
    """With a double: FSDP2's CPU offload on a mesh of GPUs, whose group cannot gather in host
    memory.
    """
    from types import SimpleNamespace

    from rollout.weights.tensors.tensor_sources import gathered_whole

    class Shard:
        device_mesh = SimpleNamespace(device_type="cuda", ndim=1)
        requires_grad = False
        full_tensor = None

        def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
            self.device, self.dtype = torch.device(device), dtype

        def is_floating_point(self) -> bool:
            return True

        def to(self, to: Any) -> "Shard":
            if isinstance(to, str):
                return Shard(to, self.dtype)
            return Shard(self.device.type, to)

        def redistribute(self, **options: Any) -> "Shard":
            assert options["async_op"]
            return self

        def to_local(self) -> "Shard":
            return self

    (whole,) = gathered_whole([Shard()], torch.bfloat16)
    assert (whole.device.type, whole.dtype) == ("cuda", torch.bfloat16)
