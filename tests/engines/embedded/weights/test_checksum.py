"""The checksum of a model whose weights count as on a GPU: made there, by sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines.embedded.memory.regions import Memory
from engines.embedded.weights.lora_adapters import Adapters
from engines.embedded.weights.model_weights import ModelWeights
from engines.tensors import torch_fingerprint
from engines.tensors.fingerprint import way_of
from engines.tensors.torch_fingerprint import bytes_fingerprint, device_fingerprint

pytestmark = pytest.mark.embedded
# Larger than what the sums of any tensor bring to the host.
LARGE = 3 * torch_fingerprint.COLUMN_WORDS
ADAPTER = {"r": 2, "lora_alpha": 4}


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(LARGE, 8), torch.nn.Linear(8, 8))


def adapter() -> dict[str, torch.Tensor]:
    return {"1.lora_A.weight": torch.randn(2, 8), "1.lora_B.weight": torch.randn(8, 2)}


def test_on_a_gpu_it_is_sums_that_any_device_makes() -> None:
    on_gpu = ModelWeights(model(), is_on_gpu=True)
    tensors = dict(model().state_dict())
    digests, checksum = on_gpu.checksum()
    assert digests == {name: device_fingerprint(name, one) for name, one in tensors.items()}
    assert checksum.startswith("sums:")
    on_cpu, _ = ModelWeights(model()).checksum()
    assert on_cpu == {name: bytes_fingerprint(name, one) for name, one in tensors.items()}


def test_on_a_gpu_the_weights_are_not_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    copy: Any = torch_fingerprint._host_bytes

    def count(content: torch.Tensor) -> Any:
        copied.append(content.numel())
        return copy(content)

    monkeypatch.setattr(torch_fingerprint, "_host_bytes", count)
    weights = ModelWeights(model(), is_on_gpu=True)
    weights.checksum()
    assert 0 < sum(copied) < weights.num_bytes / 4


@pytest.mark.parametrize(("is_on_gpu", "way"), [(False, "xxh3"), (True, "sums")])
def test_adapters_are_fingerprinted_as_the_model_is(is_on_gpu: bool, way: str) -> None:
    of = model()
    adapters = Adapters(of, is_enabled=True, max_rank=8, is_on_gpu=is_on_gpu)
    adapters.load("one", ADAPTER, list(adapter().items()))
    digests, checksum = ModelWeights(of, adapters.fingerprints, is_on_gpu=is_on_gpu).checksum()
    assert "lora:one:1.lora_A.weight" in digests
    assert way_of(digests) == way
    assert checksum.startswith(f"{way}:")


@pytest.mark.parametrize(
    ("device", "gpus", "is_on_gpu", "held_by"),
    [("cpu", "", False, "cpu"), ("cuda", "/a/folder", True, "cpu"), ("meta", "", True, "meta")],
)
def test_logical_gpus_hold_their_memory_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: str, is_on_gpu: bool, held_by: str
) -> None:
    if gpus:
        monkeypatch.setenv("NVML_DOUBLE", gpus)
    else:
        monkeypatch.delenv("NVML_DOUBLE", raising=False)
    memory = Memory(torch.device(device), saver=False, weights_backup=False)
    assert (memory.is_on_gpu, memory.device.type) == (is_on_gpu, held_by)
