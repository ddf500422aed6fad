"""Pauses: what they do to what runs, what waits, and what is not allowed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.engines.embedded import reference
from tests.engines.embedded.engine_client import PROMPT, Asker, payload

pytestmark = pytest.mark.embedded


async def test_a_pause_ends_what_runs_and_holds_what_comes(engine: Asker) -> None:
    async with engine.in_flight() as stream:
        await engine.post("/pause_generation", mode="abort")
        assert (await stream.rest())["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await engine.http.get("/ready")).status_code == 503
    assert (await engine.http.get("/health")).status_code == 200
    held = asyncio.create_task(engine.generate())
    while (await engine.get("/server_info"))["num_held_requests"] == 0:
        assert not held.done()
    await engine.post("/flush_cache?timeout=5")  # a held request is not in flight
    assert not held.done()
    await engine.post("/continue_generation")
    assert (await held)["output_ids"]
    assert (await engine.http.get("/ready")).status_code == 200


async def test_a_held_request_can_be_aborted_by_its_id(engine: Asker) -> None:
    await engine.post("/pause_generation")
    held = asyncio.create_task(engine.generate(rid="held"))
    while (await engine.get("/server_info"))["num_held_requests"] == 0:
        assert not held.done()
    await engine.post("/abort_request", rid="held")
    reply = await held
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_frozen_request_goes_on_as_if_nothing_had_been(engine: Asker, mode: str) -> None:
    async with engine.in_flight(max_new_tokens=300) as stream:
        await engine.post("/pause_generation", mode=mode)
        await engine.post("/continue_generation")
        frozen = await stream.rest()
    whole = await engine.generate(max_new_tokens=300, ignore_eos=True)
    assert frozen["meta_info"]["completion_tokens"] == 300
    assert frozen["output_ids"] == whole["output_ids"]


async def test_new_weights_in_a_retract_pause_show_in_the_spans_and_the_tokens(
    engine: Asker, models: dict[str, Path]
) -> None:
    async with engine.in_flight(max_new_tokens=300) as stream:
        await engine.post("/pause_generation", mode="retract")
        await engine.post("/begin_weight_update")
        await engine.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=payload(reference.state_dict(models["second"])),
            weight_version="7",
        )
        await engine.post("/end_weight_update")
        await engine.post("/continue_generation")
        last = await stream.rest()
    old, new = last["meta_info"]["weight_versions"]
    assert (old["version"], old["start"]) == ("0", 0)
    assert (new["version"], new["start"], new["end"]) == ("7", old["end"], 300)
    so_far = PROMPT + last["output_ids"][: old["end"]]
    expected = reference.greedy(models["second"], so_far, max_new_tokens=1)
    assert last["output_ids"][old["end"]] == expected[0]


async def test_flush_says_no_while_something_runs_unless_it_was_retracted(engine: Asker) -> None:
    async with engine.in_flight():
        assert "in flight" in await engine.refused(400, "/flush_cache")
        assert "in flight" in await engine.refused(400, "/flush_cache?timeout=0.05")
        await engine.post("/pause_generation", mode="in_place")
        assert "in flight" in await engine.refused(400, "/flush_cache")
        await engine.post("/pause_generation", mode="retract")
        await engine.post("/flush_cache")


async def test_a_pause_that_would_deadlock_sglang_is_refused(engine: Asker) -> None:
    async with engine.in_flight() as stream:
        await engine.post("/pause_generation", mode="in_place")
        assert "in_place" in await engine.refused(409, "/pause_generation", mode="abort")
        await engine.post("/continue_generation")
        assert await stream.next() is not None


async def test_an_unknown_mode_is_refused(engine: Asker) -> None:
    assert "sideways" in await engine.refused(400, "/pause_generation", mode="sideways")
