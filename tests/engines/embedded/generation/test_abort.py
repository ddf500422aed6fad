"""Requests that end before their time."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
from tests.engines.embedded.engine_client import PROMPT, Asker, sampling

pytestmark = pytest.mark.embedded
ENDLESS = sampling(max_new_tokens=4000, ignore_eos=True)


async def test_an_aborted_request_answers_with_all_its_tokens(engine: Asker) -> None:
    async with engine.in_flight(rid="long", temperature=0) as stream:
        await engine.post("/abort_request", rid="long")
        last = await stream.rest()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    count = len(last["output_ids"])
    again = await engine.generate(max_new_tokens=count, ignore_eos=True)
    assert count >= 1
    assert last["output_ids"] == again["output_ids"]


async def test_a_request_that_is_not_streamed_keeps_its_tokens_too(engine: Asker) -> None:
    body = {"input_ids": PROMPT, "sampling_params": ENDLESS, "rid": "whole"}
    whole = asyncio.create_task(engine.post("/generate", **body))
    while (await engine.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
        assert not whole.done()
    await engine.post("/abort_request", abort_all=True)
    reply = await whole
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])


async def test_only_the_exact_id_is_aborted(engine: Asker) -> None:
    async with engine.in_flight(rid="p-1") as one, engine.in_flight(rid="p-10") as ten:
        await engine.post("/abort_request", rid="p-1")
        assert (await one.rest())["meta_info"]["finish_reason"]["type"] == "abort"
        assert await ten.next() is not None
        assert ten.last["meta_info"]["finish_reason"] is None


async def test_an_id_that_is_live_is_refused_and_free_again_afterwards(engine: Asker) -> None:
    async with engine.in_flight(rid="mine") as stream:
        words = await engine.refused(400, "/generate", input_ids=PROMPT, rid="mine")
        assert "mine" in words
        await engine.post("/abort_request", rid="mine")
        await stream.rest()
    assert (await engine.generate(rid="mine"))["meta_info"]["id"] == "mine"


async def test_a_client_that_goes_away_from_a_stream_aborts_it(engine: Asker) -> None:
    async with engine.in_flight():
        pass
    await engine.post("/flush_cache?timeout=20")


async def test_a_client_that_goes_away_from_a_whole_answer_aborts_it(engine: Asker) -> None:
    async with httpx.AsyncClient(base_url=engine.server.url) as leaving:
        body = {"input_ids": PROMPT, "sampling_params": ENDLESS, "rid": "leaves"}
        request = asyncio.create_task(leaving.post("/generate", json=body))
        while (await engine.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
            assert not request.done()
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
    await engine.post("/flush_cache?timeout=20")
