"""A router over fake engines of both kinds, which listen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp

from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.http_fake import HttpFakeLauncher
from engines.fake.launcher import Make, make_engine
from engines.protocol import Endpoint
from engines.protocol.logprob_kind import LogprobRule
from engines.protocol.spec import EngineSpec
from engines.vllm.features import LOGPROB_RULES, PROCESSED
from rollout.router import Backend, RouterHost
from tests.rollout.router.conftest import router_config
from tests.support.vllm_stub.stub import StubVllm
from tests.support.vllm_stub.wire import ServedStubs, make_stub

PROMPT = [5, 6, 7]


class Served:
    """A router and fake engines of both kinds."""

    def __init__(self, host: RouterHost, endpoint: Endpoint, engines: Sequence[FakeEngine]) -> None:
        self.host = host
        self.engines = engines
        self.url = endpoint.url

    async def post(self, body: dict[str, Any], path: str = "/generate", **headers: str) -> Any:
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.url + path, json=body, headers=headers) as reply,
        ):
            return reply.status, reply.headers, await reply.read()

    async def generate(self, num: int = 8, **more: Any) -> Any:
        sampling = {"max_new_tokens": num} | more.pop("sampling_params", {})
        body = {"input_ids": PROMPT, "sampling_params": sampling, **more}
        status, _, content = await self.post(body)
        assert status == 200, content
        return json.loads(content)


@asynccontextmanager
async def served(
    *kinds: str,
    model_path: str = "/models/m",
    token_s: float = 0.002,
    make: Make = make_stub,
    logprobs_mode: str = PROCESSED,
    returns_masks: bool = False,
    **config: Any,
) -> AsyncIterator[Served]:
    """Engines of these kinds, all at weight version 3, behind an open gate."""
    launchers = {
        "vllm": ServedStubs(partial(make, token_s=token_s)),
        "sglang": HttpFakeLauncher(partial(make_engine, token_s=token_s)),
    }
    running = [
        await launchers[kind].launch(
            EngineSpec(f"main-{index}", kind, model_path, "", weight_version=3)
        )
        for index, kind in enumerate(kinds)
    ]
    for one in running:
        if isinstance(one.engine, StubVllm):
            one.engine.logprobs_mode = logprobs_mode
            one.engine.returns_masks = returns_masks
    # The engines name the folder of the tokenizer.
    host = RouterHost(router_config(**{"tokenizer_path": ""} | config))
    endpoint = await host.start()
    of_vllm = replace(LOGPROB_RULES[logprobs_mode], has_masks=returns_masks)
    rules = {"sglang": LogprobRule(), "vllm": of_vllm}
    members = [
        Backend(
            one.engine.engine_id,
            one.endpoint,
            kind=kind,
            logprobs=rules[kind],
            access=one.access,
        )
        for one, kind in zip(running, kinds, strict=True)
    ]
    try:
        await host.set_members(1, members)
        await host.set_gate("open", weight_version=3)
        yield Served(host, endpoint, [one.engine for one in running])
    finally:
        await host.stop(1.0)
        for one in running:
            await one.kill()


def events_of(content: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in content.split(b"\n") if line[:7] == b"data: {"]
