"""Real SGLang whose first rank is ahead of the others, which answers for all of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines.launch import EngineSpec, LocalLauncher
from engines.protocol import MemoryTag, PauseMode
from tests.engines.embedded.reference import greedy
from tests.support.contract import GREEDY, PROMPT, Bench, Models, client
from tests.support.cpu_engines import cpu_engine
from tests.support.late_ranks import late_ranks
from tests.support.real_policy import TWO_STAGES

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LATE_S = 2.0
SIZES: dict[str, dict[str, Any]] = {
    "tensor-parallel": {
        "options": {"tp": 2},
        "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    },
    "stages": TWO_STAGES["sglang"],
}


@pytest.fixture(params=SIZES)
async def engine(
    request: pytest.FixtureRequest, contract_models: Models, tmp_path: Path
) -> AsyncIterator[Bench]:
    sizes = SIZES[request.param]
    env = {**sizes.get("env", {}), **late_ranks(tmp_path / "late", LATE_S)}
    settings = cpu_engine("sglang", options=sizes["options"], env=env)
    log = tmp_path / "engine.log"
    spec = EngineSpec(
        "late-0", model_path=str(contract_models.first), log_path=str(log), **settings
    )
    running = await LocalLauncher().launch(spec)
    bench = Bench("sglang", client(running, spec.engine_id), running, contract_models)
    try:
        yield bench
    finally:
        await bench.engine.aclose()
        await running.stop(10.0)


async def test_what_the_first_rank_has_answered_all_ranks_have_done(
    engine: Bench, tmp_path: Path
) -> None:
    """A release of memory; and one load after the other, as the buckets of a push, from folders
    that go when each has ended."""
    await engine.engine.pause_generation(PauseMode.ABORT)
    await engine.engine.flush_cache()
    began = time.monotonic()
    await engine.engine.release_memory_occupation([MemoryTag.KV_CACHE])
    assert time.monotonic() - began >= LATE_S
    await engine.engine.resume_memory_occupation([MemoryTag.KV_CACHE])
    for version, model in enumerate([engine.models.second, engine.models.first] * 2, 1):
        folder = shutil.copytree(model, tmp_path / str(version))
        await engine.engine.update_weights_from_disk(str(folder), weight_version=str(version))
        shutil.rmtree(folder)
        await engine.engine.continue_generation()
        reply = await engine.engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert list(reply.output_ids) == greedy(model, list(PROMPT), max_new_tokens=8)
        await engine.engine.pause_generation(PauseMode.ABORT)
