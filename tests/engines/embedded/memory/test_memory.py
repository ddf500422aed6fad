"""Release and resume: memory really goes and comes, and illegal orders are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.engines.embedded import reference
from tests.engines.embedded.engine_client import (
    PROMPT,
    Asker,
    Server,
    payload,
    sampling,
    two_servers,
)
from tests.support.event_lines import async_lines_of

pytestmark = [pytest.mark.exec, pytest.mark.embedded]
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@pytest.fixture(scope="module")
def servers(models: Mapping[str, Path]) -> Iterator[dict[str, Server]]:
    """Not those of other tests: forked engines share memory with the process they come from."""
    with two_servers(models) as started:
        yield started


async def test_memory_goes_and_comes_back_bit_equal_with_a_backup(backed: Asker) -> None:
    before = await backed.generate()
    checksum = (await backed.post("/weights_checker"))["per_engine_checksum"]
    resident = backed.server.resident_bytes()
    held = (await backed.get("/server_info"))["resident_bytes"]
    assert held["weights"] > 30e6
    assert held["kv_cache"] > 0
    await backed.post("/pause_generation")
    await backed.post(RELEASE)
    assert (await backed.get("/server_info"))["resident_bytes"] == {"weights": 0, "kv_cache": 0}
    assert backed.server.resident_bytes() < resident - 0.9 * held["weights"]
    await backed.post(RESUME)
    assert backed.server.resident_bytes() > resident - 0.1 * held["weights"]
    assert (await backed.post("/weights_checker"))["per_engine_checksum"] == checksum
    await backed.post("/continue_generation")
    assert (await backed.generate())["output_ids"] == before["output_ids"]


async def test_without_a_backup_weights_are_lost_until_they_are_pushed(
    engine: Asker, models: dict[str, Path]
) -> None:
    before = await engine.generate()
    checksum = (await engine.post("/weights_checker"))["per_engine_checksum"]
    resident = engine.server.resident_bytes()
    held = (await engine.get("/server_info"))["resident_bytes"]["weights"]
    await engine.post("/pause_generation")
    await engine.post(RELEASE)
    assert engine.server.resident_bytes() < resident - 0.9 * held
    await engine.post(RESUME, tags=["weights"])
    assert (await engine.post("/weights_checker"))["per_engine_checksum"] != checksum
    await engine.post(RESUME, tags=["kv_cache", "cuda_graph"])
    await engine.post("/continue_generation")
    # The weights are of any value: the engine computes other tokens with them, or sees NaN.
    garbage = await engine.try_post("/generate", input_ids=PROMPT, sampling_params=sampling())
    if garbage.status_code == 500:
        assert "weights are lost" in garbage.json()["message"]
    else:
        assert garbage.json()["output_ids"] != before["output_ids"]
    await engine.post("/begin_weight_update")
    tensors = payload(reference.state_dict(models["first"]))
    await engine.post("/update_weights_from_tensor", serialized_named_tensors=tensors)
    await engine.post("/end_weight_update")
    assert (await engine.post("/weights_checker"))["per_engine_checksum"] == checksum
    assert (await engine.generate())["output_ids"] == before["output_ids"]


async def test_release_and_resume_twice_are_refused_and_say_what(engine: Asker) -> None:
    await engine.post("/pause_generation")
    assert "weights" in await engine.refused(409, RESUME, tags=["weights"])
    await engine.post(RELEASE, tags=["weights"])
    assert "weights" in await engine.refused(409, RELEASE, tags=["weights"])
    assert "weights" in await engine.refused(409, RELEASE)
    assert "kv_cache" in await engine.refused(409, RESUME)
    assert "attic" in await engine.refused(400, RELEASE, tags=["attic"])


@pytest.mark.parametrize("mode", [None, "in_place"])
async def test_release_with_requests_in_flight_is_refused(engine: Asker, mode: str | None) -> None:
    async with engine.in_flight() as stream:
        if mode:
            await engine.post("/pause_generation", mode=mode)
        assert "1 requests are in flight" in await engine.refused(409, RELEASE)
        if mode:
            await engine.post("/continue_generation")
        assert await stream.next() is not None


async def test_release_under_retracted_requests_is_fine(engine: Asker) -> None:
    async with engine.in_flight(max_new_tokens=200) as stream:
        await engine.post("/pause_generation", mode="retract")
        await engine.post(RELEASE, tags=["kv_cache"])
        assert "kv_cache" in await engine.refused(409, "/continue_generation")
        await engine.post(RESUME, tags=["kv_cache"])
        await engine.post("/continue_generation")
        last = await stream.rest()
    whole = await engine.generate(max_new_tokens=200, ignore_eos=True)
    assert last["output_ids"] == whole["output_ids"]


WHILE_RELEASED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"input_ids": PROMPT}),
    ("/weights_checker", {}),
    ("/begin_weight_update", {}),
    ("/update_weights_from_disk", {"model_path": "anywhere"}),
]


@pytest.mark.parametrize(("path", "body"), WHILE_RELEASED)
async def test_what_needs_weights_is_refused_while_they_are_released(
    engine: Asker, path: str, body: dict[str, Any]
) -> None:
    await engine.post(RELEASE, tags=["weights"])
    assert "weights released" in await engine.refused(409, path, **body)
    assert (await engine.http.get("/ready")).status_code == 503
    assert (await engine.http.get("/health_generate")).status_code == 503


async def test_a_stream_refused_while_released_says_so_in_the_stream(engine: Asker) -> None:
    await engine.post(RELEASE, tags=["kv_cache"])
    body = {"input_ids": PROMPT, "stream": True}
    async with engine.http.stream("POST", "/generate", json=body) as response:
        lines = [line async for line in async_lines_of(response) if line]
    assert "kv_cache released" in lines[0]
    assert lines[-1] == "data: [DONE]"
