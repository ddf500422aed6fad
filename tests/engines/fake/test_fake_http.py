"""The fake behind its port: the same faults, seen through the client that drives real engines."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from engines.fake import FakeEngine, faults
from engines.fake.http_fake import HttpFakeLauncher
from engines.http.client import EngineClient
from engines.launch import EngineSpec
from engines.process.tcp_ports import reserve_port
from engines.protocol import MemoryTag, SamplingParams
from engines.protocol.errors import EngineRejected, EngineUnreachable
from tests.support.engine_keys import client_of

FEW = SamplingParams(max_new_tokens=4)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[FakeEngine, EngineClient]]:
    process = await HttpFakeLauncher().launch(EngineSpec("main-0", "fake", "/nowhere", "/nowhere"))
    client = client_of(process, engine_id="main-0")
    try:
        yield process.engine, client
    finally:
        await client.aclose()
        await process.kill()


async def test_a_stream_over_http_says_all_so_far_each_time() -> None:
    async with served() as (_, client):
        replies = [one async for one in client.stream_generate(text="ab", sampling_params=FEW)]
    assert [len(one.output_ids) for one in replies] == [1, 2, 3, 4]
    assert replies[-1].finish_reason.kind == "length"


async def test_an_engine_that_dies_in_mid_stream_breaks_the_connection() -> None:
    async with served() as (engine, client):
        engine.faults.strike("generate", faults.die(tokens=2))
        stream = client.stream_generate(text="ab", sampling_params=FEW)
        assert len((await anext(stream)).output_ids) == 1
        with pytest.raises(EngineUnreachable):
            async for _ in stream:
                pass


async def test_every_way_to_update_weights_is_there() -> None:
    async with served() as (engine, client):
        await client.update_weights_from_disk("/other", weight_version="1")
        await client.update_weight_version("2")
        await client.init_weights_update_group(
            master_address="127.0.0.1",
            master_port=1,
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="gloo",
        )
        await client.begin_weight_update()
        await client.update_weights_from_distributed(
            names=["lm_head.weight"],
            dtypes=["float32"],
            shapes=[[16, 8]],
            group_name="g",
            weight_version="3",
        )
        await client.end_weight_update()
        await client.destroy_weights_update_group("g")
        assert await client.weight_version() == "3"
        await client.load_lora_adapter("a", "/adapter")
        await client.unload_lora_adapter("a")
        assert engine.adapters == {}


async def test_a_call_that_ends_the_engine_breaks_its_connection() -> None:
    async with served() as (engine, client):
        await client.release_memory_occupation([MemoryTag.KV_CACHE])
        with pytest.raises(EngineUnreachable):
            await client.release_memory_occupation([MemoryTag.KV_CACHE])
        assert engine.death_reason == "release of a tag twice"
        with pytest.raises(EngineUnreachable):
            await client.model_info()


async def test_faults_can_be_planned_over_http() -> None:
    async with served() as (engine, client), httpx.AsyncClient(trust_env=False) as plain:
        url = engine.endpoint.url
        wrong = await plain.post(f"{url}/fake/fault", json={"fault": "flush_cache:explode"})
        assert (wrong.status_code, wrong.text.startswith("fault 'flush_cache:expl")) == (400, True)
        await plain.post(f"{url}/fake/fault", json={"fault": "flush_cache:reject=502"})
        with pytest.raises(EngineRejected, match="502"):
            await client.flush_cache()
        await plain.post(f"{url}/fake/freeze", json={})
        asking = asyncio.create_task(client.model_info())
        await asyncio.sleep(0)
        assert not asking.done()
        await plain.post(f"{url}/fake/thaw", json={})
        await asking
        await plain.post(f"{url}/fake/kill", json={})
        assert engine.is_dead


async def test_it_can_be_run_from_a_command_line_with_a_fault() -> None:
    with reserve_port("127.0.0.1") as reservation:
        port = reservation.port
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engines.fake", "--port", str(port)),
        *("--fault", "pause_generation:die"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert b"listens on" in await process.stdout.readline()
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.post(f"http://127.0.0.1:{port}/pause_generation", json={})
        _, told = await process.communicate()
        assert process.returncode == 1
        assert b"a planned death in pause_generation" in told
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
