"""push and nccl: every transport brings what the trainer has on the GPU, and nothing piles up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.tensors.torch_fingerprint import bytes_fingerprint, device_fingerprint
from rollout.core.errors import ConfigError
from rollout.runtime.handle import ServerHandle
from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, copied_to_host, need, timed, with_engines
from tests.support.gpu.policy import TIMEOUT_S, OneEngine, embedded_engine, one_engine

pytestmark = [pytest.mark.embedded, with_engines]
TRANSPORTS = ["by_value", "shared_memory", "distributed", "disk", "cuda_ipc"]
NUM_PUSHES = {"cpu": 6, "cuda": 200}
FLAT_AFTER = {"cpu": 2, "cuda": 50}
# With a large model not all of them fit into the time of a test.
MOST_S = 120.0
TIED, ITS_TWIN = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def policy(gpu: Gpu, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneEngine]:
    need("torch_memory_saver", gpu)
    logs = tmp_path_factory.mktemp("logs")
    with one_engine(gpu, model, logs, embedded_engine(gpu, 4096)) as started:
        yield started


def pushing_by(policy: OneEngine, **weights: Any) -> ServerHandle:
    """The same server, pushed to in another way."""
    config = policy.handle._config
    settings = config.weights.model_validate({**config.weights.model_dump(), **weights})
    changed = config.model_copy(update={"weights": settings})
    return ServerHandle("policy", changed, policy.handle._caller)


def renewed(policy: OneEngine, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random tensors of the model's shapes, on the GPU."""
    return {
        name: (torch.randn_like(one, dtype=torch.float32) * 0.02).to(dtype)
        for name, one in policy.tensors.items()
    }


def check_held(policy: OneEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    """The engine holds these, by its own word and in the model's dtype."""
    for name, text in policy.fingerprints().items():
        way = device_fingerprint if text.startswith("sums:") else bytes_fingerprint
        assert text == way(name, tensors[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_engine_holds_what_was_pushed(
    policy: OneEngine, transport: str, tmp_path: Path
) -> None:
    if transport == "cuda_ipc" and not policy.gpu.is_real:
        pytest.skip("cuda_ipc: the tensors are not on a GPU")
    backend = "gloo" if transport == "distributed" else "auto"
    disk_path = str(tmp_path / "{version}")
    handle = pushing_by(policy, transport=transport, backend=backend, disk_path=disk_path)
    tensors = renewed(policy)
    first_s = timed(lambda: handle.push(tensors).result(TIMEOUT_S))
    seconds = timed(lambda: handle.push(tensors).result(TIMEOUT_S))
    check_held(policy, tensors)
    handle.close()
    num_bytes = sum(one.nbytes for one in tensors.values())
    name = f"push {transport} {policy.gpu.device}"
    record(name, seconds=seconds, num_bytes=num_bytes, first_s=first_s)


def test_wider_floats_are_cast_and_a_tied_tensor_goes_once(policy: OneEngine) -> None:
    handle = pushing_by(policy)
    tensors = renewed(policy, torch.float32)
    handle.push({**tensors, ITS_TWIN: tensors[TIED]}).result(TIMEOUT_S)
    check_held(policy, tensors)
    handle.close()


def test_many_pushes_are_right_and_leave_memory_flat(policy: OneEngine) -> None:
    """The trainer overwrites its tensors as soon as a push has returned."""
    gpu = policy.gpu
    handle = pushing_by(policy)
    tensors = renewed(policy)
    flat_after = FLAT_AFTER[gpu.device]
    used: list[int] = []

    def push_all() -> None:
        ends_at = time.monotonic() + MOST_S
        for index in range(NUM_PUSHES[gpu.device]):
            if time.monotonic() > ends_at and len(used) >= 2:
                return
            for one in tensors.values():
                one.normal_(std=0.02)
            handle.push(tensors).result(TIMEOUT_S)
            sent = {name: one.clone() for name, one in tensors.items()} if index % 50 == 0 else {}
            for one in tensors.values():
                one.fill_(float("nan"))
            if sent:
                check_held(policy, sent)
            if index >= flat_after:
                used.append(gpu.used_bytes())

    seconds = timed(push_all)
    assert max(used) - min(used) < gpu.gib / 2
    assert used[-1] - used[0] < gpu.gib / 10
    handle.push(policy.tensors).result(TIMEOUT_S)
    check_held(policy, policy.tensors)
    handle.close()
    number = flat_after + len(used)
    num_bytes = number * sum(one.nbytes for one in tensors.values())
    record(f"push many {gpu.device}", seconds=seconds, num_bytes=num_bytes, pushes=number)


def test_a_push_by_ipc_copies_little_to_the_host(policy: OneEngine, tmp_path: Path) -> None:
    if not policy.gpu.is_real:
        pytest.skip("cuda_ipc: the tensors are not on a GPU")
    handle = pushing_by(policy, transport="cuda_ipc")
    tensors = renewed(policy)
    copied, seconds = copied_to_host(
        lambda: handle.push(tensors).result(TIMEOUT_S), tmp_path / "trace.json"
    )
    handle.close()
    num_bytes = sum(one.nbytes for one in tensors.values())
    record("push cuda_ipc profiled", seconds=seconds, num_bytes=num_bytes, copied_bytes=copied)
    assert 0 < copied < num_bytes / 16  # the fingerprints


def test_a_pusher_hands_over_memory_of_its_gpu(policy: OneEngine) -> None:
    """One rank; on a logical GPU the tensors are in host memory, and go by shared memory."""
    tensors = renewed(policy)
    with pushing_by(policy, transport="auto").pusher() as pusher:
        pusher.push(tensors)
        check_held(policy, tensors)
        again = renewed(policy)
        seconds = timed(lambda: pusher.push(again))
        check_held(policy, again)
        assert bool(pusher.rank.pool.num_bytes()) is not policy.gpu.is_real
    num_bytes = sum(one.nbytes for one in tensors.values())
    record(f"push of a rank {policy.gpu.device}", seconds=seconds, num_bytes=num_bytes)


def test_nccl_onto_the_trainers_own_gpu_is_refused_in_words(policy: OneEngine) -> None:
    """Two ranks of a group on one GPU would end in NCCL itself, on both sides."""
    before = policy.fingerprints()
    handle = pushing_by(policy, transport="distributed", backend="nccl")
    with pytest.raises(ConfigError, match="nccl: group main: it offloads"):
        handle.push(policy.tensors).result(TIMEOUT_S)
    handle.close()
    assert policy.state == "serving"
    assert policy.fingerprints() == before
