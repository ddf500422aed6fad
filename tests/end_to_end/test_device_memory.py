"""A policy on logical GPUs: what its engines release is free there, and the host keeps as much.

So it is on a real GPU. The figures are those of the double of NVML, at each point of a step, after
a kill and after a recovery.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from rollout.core.errors import LifecycleError
from rollout.core.types import EngineStatus
from tests.support.cpu_engines import cpu_config
from tests.support.kinds import chaos_for, not_for
from tests.support.models import plain_models
from tests.support.nvml import NvmlDouble, logical_gpus
from tests.support.processes import wait_until
from tests.support.real_policy import RealPolicy, real_policy

KINDS = [
    pytest.param("embedded", marks=[pytest.mark.embedded, pytest.mark.slow]),
    pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(600)]),
]
MIB = 2**20
TOTAL_BYTES = 4 << 30
TRAINER_BYTES = 1 << 30
TIMEOUT_S = 120.0
BACK_WITHIN_S = {"embedded": 60.0, "sglang": 150.0}
# All these deaths are ours: none of them is a reason to wait with the next start.
HEALTH = {"probe_interval_s": 0.5, "max_restarts": 100, "backoff_s": 0.1, "max_backoff_s": 0.1}


class GpuPolicy(RealPolicy):
    """Two engines, ``main-0`` on GPU 0 and ``main-1`` on GPU 1."""

    kind: str
    nvml: NvmlDouble

    def used(self) -> list[int]:
        """Bytes in use on each GPU."""
        return [self.nvml.used_bytes(index) for index in (0, 1)]

    def engine(self, index: int) -> EngineStatus:
        return self.engines()[index]

    def is_back(self) -> bool:
        """Recovery has started all engines again; they may lack what was pushed."""
        return not any(one.fence_reason for one in self.engines())

    def kill(self, index: int) -> None:
        """SIGKILL to all processes of an engine, as the kernel does when memory runs out."""
        pid = self.engine(index).pid
        assert pid is not None
        main = psutil.Process(pid)
        for process in [main, *main.children(recursive=True)]:
            process.send_signal(signal.SIGKILL)

    def tokens(self) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": list(range(40, 60)), "sampling_params": sampling}
        reply = httpx.post(f"{self.handle.url}/generate", json=body, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        return list(reply.json()["output_ids"])


@contextmanager
def gpu_policy(kind: str, folder: Path) -> Iterator[GpuPolicy]:
    models = plain_models(folder, 2)
    # A KV cache of tens of megabytes: what comes and goes on the host is small beside it.
    engine = cpu_config(kind, gpus=1, cpus=0.5, options={"max-total-tokens": 262144})
    groups = {"main": {"num_engines": 2, "engine": engine}}
    with (
        logical_gpus(folder / "gpus", 2, TOTAL_BYTES) as nvml,
        real_policy(models, folder, groups, health=HEALTH) as started,
    ):
        policy = GpuPolicy(started.handle, started.models, started.log_dir, started.sabotage)
        policy.kind, policy.nvml = kind, nvml
        yield policy


@pytest.fixture(scope="module", params=KINDS)
def policy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuPolicy]:
    with gpu_policy(request.param, tmp_path_factory.mktemp(request.param)) as started:
        yield started


@pytest.fixture(autouse=True)
def whole(policy: GpuPolicy) -> Iterator[list[int]]:
    """Both engines serve; what each holds on its GPU."""
    yield policy.used()
    assert wait_until(policy.is_back, BACK_WITHIN_S[policy.kind])
    if not policy.is_whole():
        policy.handle.offload().result(TIMEOUT_S)
        policy.handle.push(policy.next_tensors()).result(TIMEOUT_S)
    assert policy.is_whole()


def test_the_first_offload_frees_the_gpus_and_not_the_host(
    policy: GpuPolicy, whole: list[int]
) -> None:
    resident = [one.resident_bytes for one in policy.engines()]
    assert min(whole) > 16 * MIB
    report = policy.handle.offload().result(TIMEOUT_S)
    assert report.freed_bytes == sum(whole)
    assert policy.used() == [0, 0]
    for before, engine in zip(resident, policy.engines(), strict=True):
        assert engine.resident_bytes is not None
        assert before is not None
        # A release of host memory would lower it by what the GPU got back.
        assert before - engine.resident_bytes < whole[0] // 2
    policy.handle.push(policy.next_tensors()).result(TIMEOUT_S)
    assert policy.used() == whole


def test_in_a_step_each_command_moves_what_it_names(policy: GpuPolicy, whole: list[int]) -> None:
    handle, tensors = policy.handle, policy.next_tensors()
    handle.offload().result(TIMEOUT_S)
    policy.nvml.hold(0, TRAINER_BYTES)  # the trainer takes the freed memory, and gives it back
    assert policy.used() == [TRAINER_BYTES, 0]
    policy.nvml.hold(0, 0)
    handle.phases.onload_weights().result(TIMEOUT_S)
    with_weights = policy.used()
    assert all(0 < held < full for held, full in zip(with_weights, whole, strict=True))
    handle.phases.update_weights(tensors).result(TIMEOUT_S)
    handle.phases.verify().result(TIMEOUT_S)
    assert policy.used() == with_weights
    handle.phases.onload_kv().result(TIMEOUT_S)
    assert policy.used() == whole
    handle.phases.continue_generation().result(TIMEOUT_S)
    assert {engine.weight_version for engine in policy.engines()} == {handle.weight_version}
    assert len(policy.tokens()) == 8


@not_for("sglang")  # on a CPU its figures of its memory are the host's: nothing to compare
def test_without_room_for_the_kv_cache_the_resume_is_refused_and_no_engine_dies(
    policy: GpuPolicy, whole: list[int]
) -> None:
    handle = policy.handle
    handle.offload().result(TIMEOUT_S)
    handle.phases.onload_weights().result(TIMEOUT_S)
    handle.phases.update_weights(policy.next_tensors()).result(TIMEOUT_S)
    handle.phases.verify().result(TIMEOUT_S)
    pids = [engine.pid for engine in policy.engines()]
    policy.nvml.hold(1, TOTAL_BYTES - policy.used()[1] - 1024)
    try:
        with pytest.raises(LifecycleError) as caught:
            handle.phases.onload_kv().result(TIMEOUT_S)
    finally:
        policy.nvml.hold(1, 0)
        handle.phases.onload_kv().result(TIMEOUT_S)
        handle.phases.continue_generation().result(TIMEOUT_S)
    said = str(caught.value)
    assert "engine main-1: GPU GPU-0001 has 1 KiB free, kv_cache" in said
    assert f"pid {os.getpid()}" in said
    assert [engine.pid for engine in policy.engines()] == pids
    assert policy.used() == whole


@pytest.mark.slow
def test_a_killed_engine_leaves_its_gpu_and_comes_back_to_it(
    policy: GpuPolicy, whole: list[int]
) -> None:
    before = policy.engine(1).pid
    policy.kill(1)
    assert wait_until(lambda: policy.used()[1] == 0, 20)
    assert policy.used()[0] == whole[0]
    came_back = wait_until(
        lambda: policy.is_back() and policy.engine(1).pid != before, BACK_WITHIN_S[policy.kind]
    )
    assert came_back, policy.engines()
    policy.handle.push(policy.next_tensors()).result(TIMEOUT_S)
    assert policy.used() == whole
    assert {engine.weight_version for engine in policy.engines()} == {policy.handle.weight_version}
    assert policy.is_whole()


@pytest.mark.slow
@chaos_for("sglang")
def test_an_engine_killed_while_offloaded_leaves_the_gpu_to_the_trainer_until_the_onload(
    policy: GpuPolicy, whole: list[int]
) -> None:
    policy.handle.offload().result(TIMEOUT_S)
    policy.kill(0)
    assert wait_until(lambda: bool(policy.engine(0).fence_reason), 20)
    policy.nvml.hold(0, TRAINER_BYTES)
    assert policy.used() == [TRAINER_BYTES, 0]
    policy.nvml.hold(0, 0)
    policy.handle.push(policy.next_tensors()).result(TIMEOUT_S)
    assert policy.used()[1] == whole[1]
    assert wait_until(policy.is_back, BACK_WITHIN_S[policy.kind])
    policy.handle.push(policy.next_tensors()).result(TIMEOUT_S)
    assert policy.used() == whole
