"""environment and kill: engines start in a trainer's environment, and leave the GPU if killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.launch import EngineSpec, LocalLauncher
from engines.protocol import SamplingParams
from tests.support.engine_keys import client_of
from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, holder, need, timed, with_engines
from tests.support.gpu.policy import PROMPT
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, with_engines]
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
}
SAVER = {
    "LD_PRELOAD": "/nowhere/torch_memory_saver_hook_mode_preload.abi3.so",
    "TMS_INIT_ENABLE": "1",
    "TMS_INIT_ENABLE_CPU_BACKUP": "1",
}
ALLOCATOR = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
HELD_GIB, PINNED_GIB = 60, 20
FREE_WITHIN_S = 60.0


@pytest.mark.parametrize(
    "trainers", [TORCHRUN, SAVER, ALLOCATOR], ids=["torchrun", "saver", "allocator"]
)
async def test_an_engine_comes_up_in_a_trainers_environment(
    gpu: Gpu,
    model: Path,
    tmp_path: Path,
    trainers: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need("torch_memory_saver", gpu)
    for name, value in trainers.items():
        monkeypatch.setenv(name, value)
    spec = EngineSpec(
        "main-0",
        "embedded",
        str(model),
        str(tmp_path / "main-0.log"),
        gpu_ids=(gpu.gpu_id,),
        memory_saver=True,
    )
    engine = await LocalLauncher().launch(spec)
    try:
        client = client_of(engine, engine_id="main-0")
        reply = await client.generate(
            input_ids=PROMPT, sampling_params=SamplingParams(max_new_tokens=4, ignore_eos=True)
        )
        await client.aclose()
        assert len(reply.output_ids) == 4
    finally:
        await engine.kill()


def test_a_killed_process_leaves_the_gpu(gpu: Gpu) -> None:
    before = gpu.settle()
    num_bytes = min(HELD_GIB * gpu.gib, int(gpu.free_bytes() * 0.8))
    with holder(gpu, num_bytes, PINNED_GIB * gpu.gib) as held:
        assert gpu.used_bytes() - before >= num_bytes
        held.process.kill()

        def wait() -> None:
            assert wait_until(lambda: gpu.used_bytes() <= before + gpu.gib // 10, FREE_WITHIN_S)

        seconds = timed(wait)
    record(f"kill {gpu.device}", seconds=seconds, num_bytes=num_bytes)
