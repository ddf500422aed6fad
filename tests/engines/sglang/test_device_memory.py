"""Real SGLang on the CPU with logical GPUs: its memory is on them, and its host memory stays.

So it is on a real GPU, where the host's memory does not show a release.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from engines.http.client import EngineClient
from engines.launch import LocalLauncher
from engines.process.gpu_memory import gpu_memory
from engines.protocol import MemoryTag, ServerInfo
from rollout.config import HealthConfig, LifecycleConfig, WeightUpdate
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.memory import size_of_weights
from rollout.control.engine.start import connect_http
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import LifecycleError
from rollout.core.types import EngineSlot
from rollout.rules.lifecycle import Command
from rollout.rules.release_policy import least_freed_bytes
from rollout.runtime.local import launch_local
from tests.support.builders import server_config
from tests.support.contract import Models
from tests.support.cpu_engines import cpu_config
from tests.support.nvml import NvmlDouble, nvml_double
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

TOTAL_BYTES = 4 << 30
OFFLOAD = (Command.PAUSE_GENERATION, Command.FLUSH_CACHE, Command.RELEASE_MEMORY_OCCUPATION)
ONLOAD = (Command.ONLOAD_WEIGHTS, Command.VERIFY, Command.ONLOAD_KV, Command.CONTINUE_GENERATION)


@asynccontextmanager
async def started(models: Models, folder: Path) -> AsyncIterator[ServerGroup]:
    """A group of one frozen engine on GPU 0."""
    config = server_config({"main": {"engine": cpu_config("sglang", gpus=1)}}, update="frozen")
    settings = GroupSettings(
        name="main",
        path="servers.policy.groups.main",
        model_path=str(models.first),
        log_dir=str(folder),
        group=config.groups["main"],
        update=WeightUpdate.FROZEN,
        lifecycle=LifecycleConfig(),
    )
    slot = EngineSlot("main-0", "main", 0, gpu_ids=(0,))
    connect = connect_http(settings.lifecycle, HealthConfig())
    group = ServerGroup(settings, [slot], LocalLauncher(), connect)
    await group.start()
    try:
        yield group
    finally:
        await group.stop()


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[NvmlDouble]:
    with nvml_double(tmp_path / "gpus") as double:
        double.add(0, "GPU-aaa", TOTAL_BYTES)
        yield double


def used_on_gpu() -> int:
    (gpu,) = gpu_memory([0]) or ()
    return gpu.used_bytes


async def test_an_offload_frees_the_gpu_and_not_the_host(
    contract_models: Models, tmp_path: Path, nvml: NvmlDouble
) -> None:
    async with started(contract_models, tmp_path) as group:
        nvml.hold(0, TOTAL_BYTES // 2)  # the trainer, all the time
        on_gpu = used_on_gpu() - TOTAL_BYTES // 2
        (before,) = (await group.status()).engines
        for command in OFFLOAD:
            report = await group.run(command)
        assert report.failures == ()
        assert report.freed_bytes == on_gpu > 2**20
        assert used_on_gpu() == TOTAL_BYTES // 2
        (offloaded,) = (await group.status()).engines
        # Host memory fell by less than a release has to free, as on a real GPU.
        least = least_freed_bytes(tuple(MemoryTag), {}, size_of_weights(str(contract_models.first)))
        assert before.resident_bytes is not None
        assert offloaded.resident_bytes is not None
        assert before.resident_bytes - offloaded.resident_bytes < max(least, on_gpu // 2)

        for command in ONLOAD:
            await group.run(command, version=0 if command is Command.VERIFY else None)
        assert used_on_gpu() == TOTAL_BYTES // 2 + on_gpu
        (serving,) = (await group.status()).engines
        assert serving.state == "serving"
    # What its processes held is free once they have ended.
    assert used_on_gpu() == TOTAL_BYTES // 2


class ReportingClient(EngineClient):
    """It adds what SGLang reports on CUDA alone: the memory of each tag."""

    weights_bytes = 0

    async def server_info(self) -> ServerInfo:
        info = await super().server_info()
        # Asked only before a release, when the engine holds everything and the trainer nothing.
        by_tag = {
            MemoryTag.WEIGHTS: self.weights_bytes,
            MemoryTag.KV_CACHE: used_on_gpu() - self.weights_bytes,
        }
        return replace(info, resident_bytes=by_tag)


def test_the_trainer_is_in_the_way_of_the_kv_cache_until_it_has_its_turn(
    contract_models: Models, tmp_path: Path, nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    model = contract_models.first
    monkeypatch.setattr(ReportingClient, "weights_bytes", size_of_weights(str(model)))
    groups = {"main": one_engine(gpus=1)}
    config = real_config(model, tmp_path, groups, weights={"update": "frozen"})
    with launch_local(
        config, connect=lambda endpoint, name: ReportingClient(endpoint, engine_id=name)
    ) as deployment:
        policy = deployment["policy"]
        of_engine = used_on_gpu()
        policy.offload().result(60)
        assert used_on_gpu() == 0
        nvml.hold(0, TOTAL_BYTES - of_engine + 2**16)  # room for the weights, not for all
        with pytest.raises(
            LifecycleError, match=r"GPU GPU-aaa has .* free, kv_cache need"
        ) as error:
            policy.serve().result(60)
        assert f"pid {os.getpid()} (" in str(error.value)
        assert policy.status().result(60).phase == "verified"
        policy.serve(before_kv=lambda: nvml.hold(0, 0)).result(60)
        assert used_on_gpu() == of_engine
        status = policy.status().result(60)
        assert (status.phase, status.gate) == ("serving", "open")
