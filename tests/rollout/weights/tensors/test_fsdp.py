"""Shards of FSDP2 are gathered bucket by bucket: two real ranks over gloo."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from rollout.weights.tensors import shard_gather
from tests.rollout.weights.tensors.gathering_ranks import WORKER, gather_by_ranks

pytestmark = pytest.mark.embedded


@pytest.mark.slow
def test_shards_are_gathered_whole_with_one_bucket_of_them_alive(tmp_path: Path) -> None:
    for report in gather_by_ranks(tmp_path):
        assert report["equal"], "what was gathered is not what was sharded"
        assert report["buckets"] > 3
        # A bucket's worth, of a model that has several: nothing else was whole at any time.
        assert report["most"] <= 3000 < report["total"] / 3
        assert report["alive"] == 0


@pytest.mark.slow
def test_shards_of_a_generator_are_gathered_together_bucket_by_bucket(tmp_path: Path) -> None:
    for report in gather_by_ranks(tmp_path):
        streamed = report["streamed"]
        assert streamed["equal"]
        assert streamed["gathers"] == report["buckets"], "one for each bucket, not for each tensor"
        assert streamed["most"] <= 3000
        assert streamed["alive"] == 0


@pytest.mark.exec
@pytest.mark.slow
def test_shards_of_one_rank_are_pushed_by_it_alone(tmp_path: Path) -> None:
    (report,) = gather_by_ranks(tmp_path, "cpu", "1", num_ranks=1)
    assert report["equal"]


@pytest.mark.slow
def test_any_placement_is_gathered_whole(tmp_path: Path) -> None:
    worker = WORKER.with_name("sharding_worker.py")
    names = gather_by_ranks(tmp_path, num_ranks=4, worker=worker)[0]["names"]
    kinds = {name.split(".")[0] for name in names}
    assert kinds == {"uneven", "two", "hsdp", "offloaded", "beside_tp"}


@pytest.mark.slow
@pytest.mark.parametrize("odd", [None, 0, 3])
def test_a_shard_of_hsdp_is_compared_with_the_same_shard_of_the_other_replica(
    tmp_path: Path, odd: int | None
) -> None:
    worker = WORKER.with_name("replica_worker.py")
    reports = gather_by_ranks(tmp_path, str(-1 if odd is None else odd), num_ranks=4, worker=worker)
    said = reports[0]
    assert said == reports[1] == reports[2] == reports[3]
    assert said.keys() == {"0.weight", "0.bias", "1.weight", "columns", "short", "whole"}
    same = {"short"} if odd == 3 else set()  # it has none of its rows
    for name, text in said.items():
        if odd is None or name in same:
            assert text == ""
        elif name == "whole":
            assert text.startswith(f"rank {odd} has other values of tensor 'whole' than rank ")
        else:
            shard, ranks = f"'{name} shard {odd % 2}'", sorted([odd, (odd + 2) % 4])
            assert f"has other values of tensor {shard} than rank" in text
            assert all(f"rank {one}" in text for one in ranks)


@pytest.mark.slow
def test_a_late_rank_ends_a_gather_and_still_finds_its_peers(tmp_path: Path) -> None:
    worker = WORKER.with_name("late_worker.py")
    first, late = gather_by_ranks(tmp_path, worker=worker)
    assert first["error"] == "a gather was not done within 0.5 s: a rank did not join it"
    assert late["error"] == ""
    for report in (first, late):
        assert report["next_is_right"]


def test_pieces_are_small_beside_the_tensors_and_never_mix_dtypes() -> None:
    from rollout.weights.tensors.shard_gather import _PIECE_BYTES, _pieces, _Shard

    group = SimpleNamespace(group_name="all")

    def shard(number: int, dtype: torch.dtype = torch.float32, rows: int = 64) -> _Shard:
        shape = torch.Size([rows, 64])
        return _Shard(number, torch.empty(0), 0, shape, dtype, "cpu", group, 2)

    def sizes(shards: list[_Shard]) -> list[int]:
        found = list(_pieces(shards))
        assert all(len({one.dtype for one in piece.shards}) == 1 for piece in found)
        gathered = [one.index for piece in found for one in piece.shards]
        assert sorted(gathered) == [one.index for one in shards]
        return [sum(one.whole_bytes for one in piece.shards) for piece in found]

    few = sizes([shard(number) for number in range(8)])
    assert few == [2 * 64 * 64 * 4] * 4  # a quarter each
    assert max(sizes([shard(number) for number in range(4000)])) == _PIECE_BYTES
    mixed = (torch.float32, torch.bfloat16)
    sizes([shard(number, mixed[number % 2]) for number in range(16)])
    assert len(sizes([shard(number, rows=8192) for number in range(3)])) == 3


def sharded_on_device(rows: int, num_parts: int = 2, device: str = "cpu") -> Any:
    """As a DTensor on a mesh of a GPU, for which ``meta`` stands; this rank's part may be in host
    memory."""
    local = torch.ones(1, 1, device=device).expand(rows // num_parts, 4)
    group = SimpleNamespace(group_name="all")
    return SimpleNamespace(
        device_mesh=SimpleNamespace(
            device_type="meta", get_group=lambda at: group, size=lambda at: num_parts
        ),
        placements=[Shard(0)],
        shape=torch.Size([rows, 4]),
        ndim=2,
        dtype=local.dtype,
        is_floating_point=lambda: True,
        to_local=lambda: local,
        full_tensor=None,
    )


class StreamDouble:
    """Gathers on a GPU: those that were started are done when the process has slept once.

    Attributes:
        backend: of the group.
        num_waits: sleeps of the process.
        most_bytes: of the inputs of gathers that were started and not done.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "nccl") -> None:
        self.num_waits = self.most_bytes = 0
        self.most_under_way = self.num_started = 0
        self._under_way: list[int] = []
        self._num_done = 0
        monkeypatch.setattr(shard_gather, "_gather", self._started)
        monkeypatch.setattr(dist, "get_backend", lambda group: backend)
        monkeypatch.setattr(time, "sleep", self._slept)

    def _slept(self, seconds: float) -> None:
        self.num_waits += 1
        self._num_done = self.num_started
        self._under_way.clear()

    def _started(self, parts: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
        number = self.num_started
        self.num_started += 1
        self._under_way.append(own.nbytes)
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        self.most_bytes = max(self.most_bytes, sum(self._under_way))

        def wait() -> None:
            assert number < self._num_done, "the stream waits for what may never come"

        return SimpleNamespace(wait=wait, is_completed=lambda: number < self._num_done)


def test_on_a_gpu_a_process_waits_once_for_the_gathers_of_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = StreamDouble(monkeypatch)
    shards = [sharded_on_device(rows, device="meta") for rows in [1 << 18] * 100 + [64]]
    shard_gather.gathered_whole(shards, timeout_s=5)
    assert stream.num_started == 101
    assert stream.num_waits == 1


@pytest.mark.parametrize(
    ("backend", "number", "rows", "most"),
    [
        ("nccl", 1000, 1 << 18, lambda stream: stream.most_under_way <= 256),
        # Each rank casts its part before the gather: 8 MiB.
        ("nccl", 100, 1 << 22, lambda stream: stream.most_bytes <= 72 << 20),
        ("gloo", 100, 1 << 18, lambda stream: stream.most_under_way <= 2),
    ],
)
def test_what_is_under_way_on_a_gpu_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    number: int,
    rows: int,
    most: Callable[[StreamDouble], bool],
) -> None:
    stream = StreamDouble(monkeypatch, backend)
    shards = [sharded_on_device(rows, num_parts=4) for _ in range(number)]
    shard_gather.gathered_whole(shards, torch.bfloat16, timeout_s=5)
    assert stream.num_started == number
    assert most(stream)


def test_a_gather_on_a_gpu_that_is_late_leaves_the_stream_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = StreamDouble(monkeypatch)
    now_s = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(now_s))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    shards = [sharded_on_device(1 << 18) for _ in range(300)]
    with pytest.raises(shard_gather.GatherTimeout, match="within 5 s"):
        shard_gather.gathered_whole(shards, timeout_s=5)
    assert stream.num_started == 300, "the other ranks find this one in all gathers"


def test_shards_in_host_memory_are_gathered_on_the_devices_of_their_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a double: FSDP2's CPU offload on a mesh of another device, whose group cannot gather in
    host memory.
    """
    gathered_on = []

    def gather(parts: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
        gathered_on.append((own.device.type, own.dtype))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(shard_gather, "_gather", gather)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    small, large = shard_gather.gathered_whole(
        [sharded_on_device(4), sharded_on_device(1 << 18)], torch.bfloat16
    )
    assert gathered_on == [("meta", torch.bfloat16)] * 2
    for whole, rows in ((small, 4), (large, 1 << 18)):
        assert (whole.device.type, whole.dtype) == ("meta", torch.bfloat16)
        assert whole.shape == (rows, 4)
