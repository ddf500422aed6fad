"""Shared memory that a GPU copies to is pinned, with a double of CUDA."""

import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rollout.weights.routes.buffers import ShmBufferPool  # noqa: E402
from rollout.weights.routes.cuda_ipc import pinned  # noqa: E402
from tests.support.cuda_double import CudaDouble  # noqa: E402

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
