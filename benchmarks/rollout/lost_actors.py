"""Kills of our own actors over Ray, with requests in flight over fake engines.

After the kill a client sends a request of one token until it is answered, then the training loop
calls ``pause_generation`` until it succeeds.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp

import rollout
from rollout.core.errors import ActorLost
from tests.support.builders import write_checkpoint
from tests.support.processes import kill_listener, wait_until
from tests.support.ray_worlds import RayWorld, ray_world

NUM_TOKENS, IN_FLIGHT = 256, 32
ROLES = {
    "none": "",
    "router": "RouterActor",
    "group": "ServerGroupActor",
    "server": "RolloutServerActor",
}
IDS = itertools.count()


def measure(folder: Path, num_kills: int) -> dict[str, dict[str, float]]:
    """By role: medians and the slowest of the seconds from the kill, and what was lost in all.

    ``serving_s`` is until the first answer, ``command_s`` until ``pause_generation`` has succeeded.
    ``none`` is the same without a kill.
    """
    folder.mkdir()
    engine = {"kind": "fake", "gpus": 0, "options": {"token-s": 0.02}}
    policy = {
        "model_path": write_checkpoint(folder),
        "groups": {"main": {"num_engines": 2, "engine": engine}},
        "router": {"token_failover": "on"},
        "health": {"probe_interval_s": 0.5},
    }
    config = rollout.RolloutConfig.from_dict(
        {"log_dir": str(folder), "servers": {"policy": policy}}
    )
    with ray_world() as world, rollout.launch(config, backend="ray") as deployment:
        return {role: _of_role(deployment["policy"], world, role, num_kills) for role in ROLES}


def _of_role(
    policy: rollout.ServerHandle, world: RayWorld, role: str, num_kills: int
) -> dict[str, float]:
    kills = [asyncio.run(_kill(policy, world, role)) for _ in range(num_kills)]
    result: dict[str, float] = {"kills": num_kills}
    for name in ("serving_s", "command_s"):
        result[name] = statistics.median(one[name] for one in kills)
        result[f"worst_{name}"] = max(one[name] for one in kills)
    for name in ("lost_requests", "lost_tokens"):
        result[name] = sum(one[name] for one in kills)
    return result


async def _kill(policy: rollout.ServerHandle, world: RayWorld, role: str) -> dict[str, float]:
    name, before = ROLES[role], len(world.live_actors())
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(policy.url, timeout=timeout) as session:
        asked = [asyncio.create_task(_ask(session, NUM_TOKENS)) for _ in range(IN_FLIGHT)]
        await asyncio.sleep(NUM_TOKENS * 0.01)  # half of their tokens
        killed_s = time.monotonic()
        if role == "router":
            kill_listener(policy.url)
        elif name:
            world.crash_newest(name)
        await _ask(session, 1)
        serving_s = time.monotonic() - killed_s
        await _pause(policy)
        command_s = time.monotonic() - killed_s
        await policy.serve()
        replies = await asyncio.gather(*asked)
    assert wait_until(lambda: len(world.live_actors()) == before, 60)
    lost = [one for one in replies if len(one.get("output_ids", ())) != NUM_TOKENS]
    again = sum(one["meta_info"]["num_recomputed_tokens"] for one in replies if one not in lost)
    return {
        "serving_s": serving_s,
        "command_s": command_s,
        "lost_requests": len(lost),
        "lost_tokens": again,
    }


async def _ask(session: aiohttp.ClientSession, num_tokens: int) -> dict[str, Any]:
    """The reply of a client that sends the same request again if its router is lost."""
    body = {
        "rid": f"kill-{next(IDS)}",
        "input_ids": list(range(1, 65)),
        "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
    }
    while True:
        try:
            async with session.post("/generate", json=body) as reply:
                if reply.status == 200:
                    answer: dict[str, Any] = await reply.json()
                    return answer
                if reply.status != 503:  # which a router answers that has just started
                    return {}
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.01)


async def _pause(policy: rollout.ServerHandle) -> None:
    while True:
        try:
            await policy.phases.pause_generation()
            return
        except ActorLost:  # it asks to call again
            continue
