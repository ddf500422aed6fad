"""Prefix affinity beside least-in-flight, on prompts with shared prefixes, over embedded engines.

The figure comes from the engines: the share of all prompt tokens that were in their caches.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import aiohttp

from engines.launch import EngineSpec, LocalLauncher, RunningEngine
from rollout.config import RouterConfig
from rollout.router import Backend, RouterHost
from rollout.testing.tiny_model import make_tiny_model

NUM_ENGINES = 2
NUM_PREFIXES = 48
PREFIX_TOKENS = 256
TURN_TOKENS = 16
POLICIES = ("least_in_flight", "prefix")


async def measure_affinity(num_requests: int) -> dict[str, float]:
    """Share of prompt tokens that came from a cache, by policy; each policy has its own prompts."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", hidden_size=32, num_layers=1)
        specs = [
            EngineSpec(
                engine_id=f"e-{number}",
                kind="embedded",
                model_path=str(model),
                log_path=str(Path(folder) / f"{number}.log"),
            )
            for number in range(NUM_ENGINES)
        ]
        engines = await asyncio.gather(*map(LocalLauncher().launch, specs))
        try:
            return {
                policy: await _share(policy, engines, num_requests, seed)
                for seed, policy in enumerate(POLICIES)
            }
        finally:
            await asyncio.gather(*(engine.stop(10.0) for engine in engines))


async def _share(policy: str, engines: list[RunningEngine], num_requests: int, seed: int) -> float:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(256) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    host = RouterHost(RouterConfig.model_validate({"policy": policy}))
    endpoint = await host.start()
    members = [
        Backend(f"e-{n}", engine.endpoint, access=engine.access) for n, engine in enumerate(engines)
    ]
    try:
        await host.set_members(1, members)
        await host.set_gate("open", weight_version=seed + 1)
        prompts = [
            [*rng.choice(prefixes), *(rng.randrange(256) for _ in range(TURN_TOKENS))]
            for _ in range(num_requests)
        ]
        total = cached = 0
        limit = asyncio.Semaphore(4)
        async with aiohttp.ClientSession(endpoint.url) as client:

            async def generate(ids: list[int]) -> None:
                nonlocal total, cached
                body = {
                    "input_ids": ids,
                    "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
                }
                async with limit, client.post("/generate", json=body) as reply:
                    reply.raise_for_status()
                    meta = (await reply.json())["meta_info"]
                total += meta["prompt_tokens"]
                cached += meta["cached_tokens"]

            await asyncio.gather(*map(generate, prompts))
    finally:
        await host.stop(1.0)
    return round(cached / total, 4)
