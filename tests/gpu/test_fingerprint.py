"""fingerprint: sums are those of the CPU, as fast as memory is read, and copy nothing large."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.embedded.weights.model_weights import ModelWeights
from engines.tensors.torch_fingerprint import (
    COLUMN_WORDS,
    as_bytes,
    bytes_fingerprint,
    device_fingerprint,
)
from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, copied_to_host, timed

pytestmark = pytest.mark.embedded
DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool]
SIZES = [0, 5, 8 * 1000, 8 * 100_000 + 3, COLUMN_WORDS * 8 * 3 + 7]
# Each byte is read twice, for the rows and for the columns.
LEAST_BYTES_PER_S = 1e12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_cpu_and_gpu_agree(gpu: Gpu, dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size).to(dtype)
    moved = tensor.to(gpu.device, copy=True)
    for kind in (bytes_fingerprint, device_fingerprint):
        assert kind("w", tensor) == kind("w", moved)
    inside = torch.cat([torch.zeros(3, dtype=torch.uint8), as_bytes(tensor)]).to(gpu.device)[3:]
    whole = as_bytes(tensor)
    assert device_fingerprint("w", whole) == device_fingerprint("w", inside)


def test_it_reads_as_fast_as_the_gpu_does(gpu: Gpu) -> None:
    size = gpu.need_free(9) * 8 // 9
    tensor = torch.empty(size, dtype=torch.uint8, device=gpu.device).random_()
    device_fingerprint("w", tensor)  # loads the kernels
    seconds = timed(lambda: device_fingerprint("w", tensor))
    record(f"fingerprint {gpu.device}", seconds=seconds, num_bytes=2 * tensor.nbytes)
    if gpu.is_real:
        assert 2 * tensor.nbytes / seconds >= LEAST_BYTES_PER_S


def test_the_checksum_of_a_model_copies_little_to_the_host(gpu: Gpu, tmp_path: Path) -> None:
    if not gpu.is_real:
        pytest.skip("there is no GPU to copy from")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(COLUMN_WORDS, 64) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to(gpu.device)
    weights = ModelWeights(model, is_on_gpu=True)
    weights.checksum()
    copied, seconds = copied_to_host(weights.checksum, tmp_path / "trace.json")
    assert 0 < copied < weights.num_bytes / 16
    record(
        f"checksum {gpu.device}", seconds=seconds, num_bytes=weights.num_bytes, copied_bytes=copied
    )
