"""GPU ids as indices, UUIDs and MIG slices: read, placed, and handed to engines as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.protocol import GpuId, read_gpu_id
from rollout.runtime.local import launch_local, visible_gpus
from tests.support.nvml import nvml_double
from tests.support.ray_worlds import stub_world
from tests.support.served_fakes import TIMEOUT_S, launched


@pytest.mark.parametrize(
    ("allowed", "found"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0, 3", [0, 3]),
        ("2,-1,3", [2]),
        ("GPU-11aa,GPU-22bb", ["GPU-11aa", "GPU-22bb"]),
        ("MIG-33cc", ["MIG-33cc"]),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_use(
    monkeypatch: pytest.MonkeyPatch, allowed: str, found: list[GpuId]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert visible_gpus() == found


def test_gpus_are_counted_where_the_driver_lists_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in some containers, without ``/proc/driver/nvidia``."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with nvml_double(tmp_path / "gpus") as double:
        double.add(0, "GPU-aaa", 80 << 30)
        double.add(1, "GPU-bbb", 80 << 30)
        assert visible_gpus() == [0, 1]


def test_another_spelling_is_refused() -> None:
    with pytest.raises(ValueError, match="GPU id 'cuda:0': an index, or a UUID"):
        read_gpu_id("cuda:0")


def test_an_engine_gets_the_gpus_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-33cc,MIG-44dd")
    groups = {"shared": {"num_engines": 2, "engine": {"kind": "fake", "gpus": 1}}}
    with launched(launch_local, tmp_path, groups) as deployment:
        (group,) = deployment["policy"].status().result(TIMEOUT_S).groups
        gpus = [[gpu.uuid for gpu in engine.gpus] for engine in group.engines]
    assert gpus == [["GPU-MIG-33cc"], ["GPU-MIG-44dd"]]


def test_ray_may_report_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_world() as world:
        nodes = world.load("nodes")
        monkeypatch.setattr(nodes.ray, "get_gpu_ids", lambda: ["MIG-33cc", "3", 4])
        assert nodes.visible_gpu_ids() == ["MIG-33cc", 3, 4]
