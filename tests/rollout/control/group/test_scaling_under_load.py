"""Engines leave and come back behind a real router, under load: no request is lost."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from engines.fake import FakeEngine
from engines.fake.http_fake import HttpFakeLauncher
from engines.fake.launcher import make_engine
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from rollout.config import Drain
from rollout.runtime.local import launch_local
from tests.support.builders import push
from tests.support.served_fakes import config

NUM_CLIENTS, NUM_TOKENS = 16, 5
GROUPS = {"main": {"num_engines": 3}}


def thoughtful(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return make_engine(spec, endpoint, token_s=0.004)


class Load:
    """Clients that ask one request after the other, and what became of each."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.num_asked = 0
        self._is_over = asyncio.Event()
        self._asked_enough = asyncio.Event()
        self._enough = 0

    async def client(self, session: aiohttp.ClientSession, url: str, name: int) -> None:
        number = 0
        while not self._is_over.is_set():
            number += 1
            body = {
                "input_ids": [1, 2],
                "sampling_params": {"max_new_tokens": NUM_TOKENS},
                "rid": f"{name}-{number}.",
            }
            self.num_asked += 1
            async with session.post(url + "/generate", json=body) as answer:
                told = await answer.json()
                reason = told["meta_info"]["finish_reason"]["type"] if answer.ok else told
                self.ends[f"{answer.status} {reason} {len(told.get('output_ids', ()))}"] += 1
            if self.num_asked >= self._enough:
                self._asked_enough.set()

    async def more(self, num: int) -> None:
        """Wait for so many more requests."""
        self._enough = self.num_asked + num
        self._asked_enough.clear()
        await self._asked_enough.wait()

    def end(self) -> None:
        self._is_over.set()


@asynccontextmanager
async def under_load(url: str) -> AsyncIterator[Load]:
    load = Load()
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as clients:
        for name in range(NUM_CLIENTS):
            clients.create_task(load.client(session, url, name))
        await load.more(NUM_CLIENTS)
        yield load
        load.end()


async def test_no_request_is_lost_while_an_engine_leaves_and_comes_back(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path, GROUPS)
    policy = settings.servers["policy"]
    lifecycle = policy.lifecycle.model_copy(update={"drain": Drain.FINISH})
    server = policy.model_copy(update={"lifecycle": lifecycle})
    settings = settings.model_copy(update={"servers": {"policy": server}})
    handle = await asyncio.to_thread(launch_local, settings, launcher=HttpFakeLauncher(thoughtful))
    try:
        policy = handle["policy"]
        url = (await policy.status()).router_url
        async with under_load(url) as load:
            await policy.engines.remove("main-1")
            await load.more(50)
            assert (await policy.status()).groups[0].vacant_slots == ("main-1",)
            await policy.engines.add("main-1")
            await load.more(50)
            await policy.offload()
            await policy.push(push(1))
            await load.more(50)
            status = await policy.status()
        assert [one.state for one in status.groups[0].engines] == ["serving"] * 3
        assert load.ends == {f"200 length {NUM_TOKENS}": load.num_asked}
        assert load.num_asked > 150
    finally:
        await asyncio.to_thread(handle.stop)
