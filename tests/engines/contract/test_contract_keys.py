"""Engines with keys, one suite over every kind: who has no key does nothing, who has it all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import psutil
import pytest

from engines.protocol import PauseMode
from engines.protocol.errors import EngineRejected
from tests.engines.conftest import KINDS, VLLM
from tests.support.contract import PROMPT, Bench
from tests.support.kinds import not_for

pytestmark = [pytest.mark.clock, pytest.mark.timeout(400)]
CHANGING = {
    "vllm": [
        *("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/abort_requests"),
        *("/start_weight_update", "/update_weights", "/finish_weight_update", "/collective_rpc"),
        *("/update_weight_version", "/weight_checker", "/v1/load_lora_adapter"),
    ],
    "": [
        *("/pause_generation", "/continue_generation", "/flush_cache", "/abort_request"),
        *("/release_memory_occupation", "/resume_memory_occupation", "/weights_checker"),
        *("/begin_weight_update", "/update_weights_from_tensor", "/update_weights_from_disk"),
        *("/init_weights_update_group", "/update_weight_version", "/load_lora_adapter"),
    ],
}
SAMPLING = {"vllm": ["/inference/v1/generate", "/v1/completions"], "": ["/generate"]}


@pytest.mark.parametrize("kind", [*KINDS, VLLM], indirect=True)
@not_for("fake")
async def test_a_stranger_neither_samples_nor_changes_anything(bench: Bench) -> None:
    access = bench.running.access
    assert access.sampling != access.control
    changing, sampling = (paths.get(bench.kind, paths[""]) for paths in (CHANGING, SAMPLING))
    async with httpx.AsyncClient(base_url=bench.url, timeout=30, trust_env=False) as stranger:
        for path in [*changing, *sampling]:
            keys = ["", "wrong", access.sampling] if path in changing else ["", "wrong"]
            for key in keys:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                reply = await stranger.post(path, json={"input_ids": [1]}, headers=headers)
                assert reply.status_code == 401, (path, reply.text)
                assert not any(one in reply.text for one in (access.sampling, access.control))
        assert (await stranger.get("/health")).status_code == 200
    assert await bench.engine.is_ready()
    assert len(await bench.greedy(PROMPT)) == 8


@pytest.mark.parametrize("kind", [*KINDS, VLLM], indirect=True)
@not_for("fake", "fake-http")
async def test_no_process_and_no_log_shows_a_key(bench: Bench) -> None:
    access = bench.running.access
    assert bench.running.pid is not None
    root = psutil.Process(bench.running.pid)
    shown = [" ".join(one.cmdline()) for one in [root, *root.children(recursive=True)]]
    log = Path(next(file.path for file in root.open_files() if file.path.endswith(".log")))
    shown += [
        await asyncio.to_thread(log.read_text),
        repr(bench.running.access),
        str(vars(bench.running)),
    ]
    info = await bench.engine.server_info()
    shown += [repr(info), repr(await bench.engine.model_info())]
    assert not [text for text in shown if access.sampling in text or access.control in text]


@pytest.mark.parametrize("kind", [*KINDS, VLLM], indirect=True)
@not_for("fake")
async def test_a_call_for_another_process_is_refused_where_the_engine_can(bench: Bench) -> None:
    """SGLang does not know the header: there a change is seen by ``ServerInfo.start`` alone."""
    access = bench.running.access
    assert access.process
    bench.engine.authorize(access.of("another", run="run-1"))
    try:
        if bench.kind == "sglang":
            await bench.engine.pause_generation(PauseMode.ABORT)
        else:
            with pytest.raises(EngineRejected, match="run-1 is for process another, and this is"):
                await bench.engine.pause_generation(PauseMode.ABORT)
    finally:
        bench.engine.authorize(access)
    await bench.engine.continue_generation()
    assert len(await bench.greedy(PROMPT)) == 8
