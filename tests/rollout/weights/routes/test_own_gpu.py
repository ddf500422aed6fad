"""The GPU with a rank's tensors, and host memory that is pinned for it, with a double of CUDA."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rollout.weights.routes.buffers import ShmBufferPool  # noqa: E402
from rollout.weights.routes.cuda_ipc import HandleBuilder, gpu_with, pinned  # noqa: E402
from rollout.weights.routes.rank_end import OwnGpu  # noqa: E402
from rollout.weights.tensors.payload import ExportSettings  # noqa: E402
from rollout.weights.tensors.sources import Pairs  # noqa: E402
from tests.support.cuda_double import HAS_ACCELERATOR_SETTINGS, CudaDouble  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    double = CudaDouble(["GPU-0"])
    double.install(monkeypatch.setattr)
    return double


def test_each_buffer_is_pinned_until_it_is_removed(double: CudaDouble, tmp_path: Path) -> None:
    pool = ShmBufferPool(tmp_path, pinned)
    first = pool.take(5000)
    pool.take(7000)
    assert sorted(double.registered.values()) == [5000, 7000]
    pool.give(first)
    assert pool.take(5000) is first
    assert len(double.registered) == 2, "a buffer that is used again is pinned already"
    pool.give(first)
    pool.trim()
    assert list(double.registered.values()) == [7000]
    pool.close()
    assert not double.registered


def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    double: CudaDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double.register_error = 2
    pool = ShmBufferPool(tmp_path, pinned)
    with caplog.at_level(logging.WARNING):
        pool.take(5000).view[:3] = b"abc"
    assert "cannot pin 5000 bytes" in caplog.text
    assert "error 2" in caplog.text
    pool.close()


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="this process uses CUDA")
def test_without_cuda_nothing_is_pinned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = ShmBufferPool(tmp_path, pinned)
    pool.take(5000)
    pool.close()
    assert not caplog.text


@dataclass(frozen=True)
class OnGpu:
    """A tensor, as far as it is looked at to find where the tensors of a push are."""

    device: torch.device


def test_handles_are_of_the_gpu_with_the_tensors_not_of_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with torchrun and no ``set_device``."""
    double = CudaDouble(["GPU-0", "GPU-1"])
    double.install(monkeypatch.setattr)
    double.use(0)
    gpu = gpu_with({"a": OnGpu(torch.device("cuda", 1))})
    assert gpu == OwnGpu("GPU-1", ExportSettings("", ""))
    assert gpu_with({"a": OnGpu(torch.device("cuda"))}) == OwnGpu("GPU-0", ExportSettings("", ""))
    assert gpu_with({"a": torch.zeros(1)}) is None
    builder = HandleBuilder(gpu)
    builder.make(0, Pairs.of([("a", torch.zeros(8))]))
    assert set(double.made_on.values()) == {1}
    builder.close()


@pytest.mark.parametrize("settings", ["", "max_split_size_mb:512", "expandable_segments:False"])
def test_an_allocator_without_expandable_segments_is_left_alone(
    double: CudaDouble, settings: str
) -> None:
    double.settings = settings
    with ExportSettings.now().in_effect():
        pass
    assert double.all_settings == []


@pytest.mark.skipif(not HAS_ACCELERATOR_SETTINGS, reason="torch has them for CUDA only")
def test_torchs_own_allocator_gets_its_settings_back() -> None:
    settings = torch._C._accelerator_getAllocatorSettings
    change = torch._C._accelerator_setAllocatorSettings
    before = settings()
    try:
        change("expandable_segments:True,max_split_size_mb:512")
        found = ExportSettings.now()
        assert settings() == "expandable_segments:True,max_split_size_mb:512"
        with found.in_effect():
            assert settings() == "max_split_size_mb:512,expandable_segments:False"
        assert settings() == "expandable_segments:True,max_split_size_mb:512"
    finally:
        change(before)
