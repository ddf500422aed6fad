"""CUDA IPC handles in the format of SGLang, with the GPU by its UUID; CUDA is a double here."""

from __future__ import annotations

import base64

import pytest
import torch

from engines.embedded.core.errors import Invalid
from engines.embedded.weights.payload_tensors import read_payload
from engines.tensors.torch_fingerprint import bytes_fingerprint, device_fingerprint
from rollout.core.errors import WeightMismatch
from rollout.weights.tensors.payload import ExportSettings, around_handle, ipc_handle
from tests.support import cuda_double
from tests.support.cuda_double import CudaDouble, some_pairs
from tests.support.gpu.payloads import opened

UUIDS = ["11111111-aaaa", "22222222-bbbb"]
GPU = torch.device("cuda", 0)
SETTINGS = ExportSettings("", "")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    double = CudaDouble(UUIDS)
    double.install(monkeypatch.setattr)
    return double


def payload(cuda: CudaDouble, index: int, seed: int, around: int | None = None) -> bytes:
    """A bucket on GPU ``index``, in the pickle that another rank has made around it."""
    cuda.use(index)
    handle = ipc_handle(some_pairs(seed), torch.device("cuda", index), SETTINGS).handle
    head, tail = around_handle(some_pairs(seed if around is None else around))
    return head + handle + tail


def prints(seed: int) -> dict[str, str]:
    return {name: bytes_fingerprint(name, tensor) for name, tensor in some_pairs(seed)}


def device_prints(seed: int) -> dict[str, str]:
    return {name: device_fingerprint(name, tensor) for name, tensor in some_pairs(seed)}


@pytest.mark.slow
def test_sglang_opens_each_ranks_handle_on_the_gpu_with_its_uuid(cuda: CudaDouble) -> None:
    """The entries differ: SGLang's rank k opens entry k."""
    entries = [payload(cuda, 0, seed=7, around=8), payload(cuda, 1, seed=8)]
    # The engine counts its GPUs in another order than the trainer.
    found = opened(entries, ROLLOUT_CUDA_DOUBLE=",".join(reversed(UUIDS)))
    assert [one["devices"] for one in found] == [[1], [0]]
    assert [one["fingerprints"] for one in found] == [device_prints(7), device_prints(8)]


def test_an_embedded_engine_opens_a_handle_by_uuid_and_by_number(cuda: CudaDouble) -> None:
    made = payload(cuda, 1, seed=3)
    text = base64.b64encode(made).decode()
    named = read_payload(text, "flattened_bucket")
    assert {name: bytes_fingerprint(name, tensor) for name, tensor in named} == prints(3)
    assert cuda_double.opened == [1]
    cuda.uuids.reverse()
    read_payload(text, "flattened_bucket")
    assert cuda_double.opened == [1, 0]
    cuda.uuids[0] = "33333333-cccc"
    with pytest.raises(Invalid, match=r"on GPU 22222222-bbbb, and this engine has 33333333-cccc"):
        read_payload(text, "flattened_bucket")


def test_a_handle_is_small_whatever_the_bucket_holds(cuda: CudaDouble) -> None:
    """What the ranks exchange: names and shapes are in the pickle around it."""
    cuda.use(0)
    pairs = [(f"tensor {index}", torch.zeros(1)) for index in range(1000)]
    made = ipc_handle(pairs, GPU, SETTINGS)
    assert len(made.handle) < made.flat.nbytes + 1000  # the double's handle holds the bytes


def test_an_engine_on_the_cpu_opens_no_handle(cuda: CudaDouble, monkeypatch) -> None:
    made = base64.b64encode(payload(cuda, 0, seed=3)).decode()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Invalid, match="rebuild_cuda_tensor"):
        read_payload(made, "flattened_bucket")


def test_tensors_in_host_memory_are_refused_before_anything_is_made() -> None:
    with pytest.raises(WeightMismatch, match=r"'wide' is on cpu: weights.transport = cuda_ipc"):
        ipc_handle(some_pairs(1), torch.device("cpu"), SETTINGS)
