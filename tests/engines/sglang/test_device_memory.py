"""Real SGLang on the CPU with logical GPUs: its memory is on them, and its host memory stays.

So it is on a real GPU, where the host's memory does not show a release.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engines.launch import LocalLauncher
from engines.process.gpu_memory import gpu_memory
from engines.protocol import MemoryTag
from rollout.config import HealthConfig, LifecycleConfig, WeightUpdate
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.memory import size_of_weights
from rollout.control.engine.start import connect_http
from rollout.control.group.server_group import ServerGroup
from rollout.core.types import EngineSlot
from rollout.rules.lifecycle import Command
from rollout.rules.release_policy import least_freed_bytes
from tests.support.builders import server_config
from tests.support.contract import CPU_OPTIONS, Models
from tests.support.nvml import NvmlDouble, nvml_double

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

TOTAL_BYTES = 4 << 30
OFFLOAD = (Command.PAUSE, Command.FLUSH, Command.RELEASE)
ONLOAD = (Command.RESUME_WEIGHTS, Command.VERIFY, Command.RESUME_KV, Command.CONTINUE)


@asynccontextmanager
async def started(models: Models, folder: Path) -> AsyncIterator[ServerGroup]:
    """A group of one frozen engine on GPU 0."""
    engine = {
        "kind": "sglang",
        "gpus": 1,
        "python": "sglang-cpu",
        "options": CPU_OPTIONS["sglang"],
    }
    config = server_config({"main": {"engine": engine}}, update="frozen")
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
