"""ipc format: our payloads are opened by SGLang's own unpickler, in processes of their own."""

from __future__ import annotations

import os

import pytest
import torch

from engines.tensors.torch_fingerprint import device_fingerprint
from rollout.weights.tensors.payload import (
    ExportSettings,
    Pairs,
    around_handle,
    flattened_bucket,
    ipc_handle,
)
from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, need, timed
from tests.support.gpu.payloads import opened

pytestmark = pytest.mark.embedded
NUM_CHILDREN = {"cpu": 2, "cuda": 8}


def some_pairs(gpu: Gpu, seed: int) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(33, 65, generator=generator)
    named = {"wide": wide, "narrow": wide.to(torch.bfloat16)[:7], "odd": wide.view(-1)[:5] > 0}
    return [(name, one.to(gpu.device)) for name, one in named.items()]


def packed(gpu: Gpu, pairs: Pairs) -> tuple[bytes, object]:
    """The payload, and what must be kept until it has been read."""
    if not gpu.is_real:
        return flattened_bucket(pairs), None
    made = ipc_handle(pairs, pairs[0][1].device, ExportSettings.now())
    head, tail = around_handle(pairs)
    return head + made.handle + tail, made.flat


@pytest.mark.slow
def test_every_rank_opens_the_entry_that_is_its_own(gpu: Gpu) -> None:
    need("pybase64", gpu)
    shares = [some_pairs(gpu, seed) for seed in range(NUM_CHILDREN[gpu.device])]
    payloads = [packed(gpu, share) for share in shares]
    found: list[dict[str, object]] = []
    seconds = timed(lambda: found.extend(opened([payload for payload, _ in payloads])))
    for share, one in zip(shares, found, strict=True):
        assert one["fingerprints"] == {name: device_fingerprint(name, pair) for name, pair in share}
        assert str(one["device"]).startswith(gpu.device)
    record(f"ipc format {gpu.device}", seconds=seconds, children=len(found))


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["index", "uuid"])
def test_a_process_that_sees_the_gpu_by_index_or_uuid_opens_it(gpu: Gpu, spelling: str) -> None:
    pairs = some_pairs(gpu, 1)
    payload, kept = packed(gpu, pairs)
    visible = gpu.uuid if spelling == "uuid" else str(gpu.gpu_id)
    (found,) = opened([payload], CUDA_VISIBLE_DEVICES=visible)
    del kept
    assert found["fingerprints"] == {name: device_fingerprint(name, one) for name, one in pairs}


def test_what_a_trainer_with_expandable_segments_hands_over_is_opened(gpu: Gpu) -> None:
    """Memory of such a segment is not: torch exports a file descriptor, which containers refuse."""
    if not gpu.is_real:
        pytest.skip("no CUDA device")
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        share = [("large", torch.randn(8 << 20, device=gpu.device))]
        assert any(one["is_expandable"] for one in torch.cuda.memory_snapshot())
        payload, kept = packed(gpu, share)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    (found,) = opened([payload])
    del kept
    assert found["fingerprints"] == {name: device_fingerprint(name, one) for name, one in share}


def test_each_rank_hands_over_memory_of_its_own_gpu(gpu: Gpu) -> None:
    """Entries that differ, each with its own GPU by UUID; the readers see the GPUs in reverse."""
    if not gpu.is_real:
        pytest.skip("no CUDA device")
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    shares = [some_pairs(gpu, seed) for seed in range(len(devices))]
    settings = ExportSettings.now()
    made = [
        ipc_handle(share, device, settings) for share, device in zip(shares, devices, strict=True)
    ]
    head, tail = around_handle(shares[0])
    payloads = [head + one.handle + tail for one in made]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = visible if visible != [""] else [str(device.index) for device in devices]
    found = opened(payloads, CUDA_VISIBLE_DEVICES=",".join(reversed(numbers)))
    for index, (share, one) in enumerate(zip(shares, found, strict=True)):
        assert one["fingerprints"] == {name: device_fingerprint(name, pair) for name, pair in share}
        assert one["device"] == f"cuda:{len(devices) - 1 - index}"
    record("ipc handles of ranks", ranks=len(devices))
