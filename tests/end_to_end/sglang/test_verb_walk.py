"""A random sequence of a server's verbs over real SGLang: what serves holds what was pushed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from rollout.core.types import ServerStatus
from tests.engines.embedded.reference import greedy
from tests.support.real_policy import RealPolicy, one_engine, real_policy
from tests.support.verb_walk import VerbWalk

pytestmark = [pytest.mark.clock, pytest.mark.sglang, pytest.mark.chaos, pytest.mark.timeout(7200)]

NUM_STEPS = int(os.environ.get("ROLLOUT_SGLANG_STEPS", "200"))
SEED = int(os.environ.get("ROLLOUT_SGLANG_SEED", "1"))
PROMPT, NUM_TOKENS = list(range(60, 84)), 12
# A start on two busy cores, and the command that it waits for.
MOST_WAIT_S = 300.0
HEALTH = {
    "probe_interval_s": 1.0,
    "probe_timeout_s": 5.0,
    "max_restarts": 1000,
    "backoff_s": 0.1,
    "max_backoff_s": 0.1,
}
CALLS = {
    "offload": "offload",
    "serve": "serve",
    "pause_generation": "phases.pause_generation",
    "flush_cache": "phases.flush_cache",
    "release_memory_occupation": "phases.release_memory_occupation",
    "onload_weights": "phases.onload_weights",
    "verify": "phases.verify",
    "onload_kv": "phases.onload_kv",
    "continue_generation": "phases.continue_generation",
}
PUSHES = {"push": "push", "update_weights": "phases.update_weights"}


class SGLangRig:
    """Real engines, whose greedy tokens show the weights that they hold."""

    def __init__(self, policy: RealPolicy, session: aiohttp.ClientSession) -> None:
        self._policy = policy
        self._session = session

    async def call(self, verb: str, push: Any = None, engine_id: str = "") -> None:
        server = self._policy.handle
        if verb in PUSHES:
            await attrgetter(PUSHES[verb])(server)(push)
        elif verb == "remove":
            await server.engines.remove(engine_id)
        elif verb == "add":
            await server.engines.add(engine_id)
        else:
            await attrgetter(CALLS[verb])(server)()

    def push(self, version: int, contents: int) -> Any:
        return self._policy.handle.phases.make_push(self._policy.tensors_of(contents), version)

    async def status(self) -> ServerStatus:
        return await self._policy.handle.status()

    async def kill(self, engine_ids: Collection[str]) -> None:
        for engine in self._policy.engines():
            if engine.engine_id in engine_ids and engine.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(engine.pid, signal.SIGKILL)

    def plan_fault(self, engine_id: str, random: Random) -> str:
        return ""

    def clear_faults(self) -> None:
        """None are planned."""

    async def wait(self) -> None:
        """Until no command runs and no engine is down, or the trainer has the memory."""
        await asyncio.sleep(3.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_WAIT_S):
                while not _is_calm(await self.status()):  # noqa: ASYNC110  of another process
                    await asyncio.sleep(1.0)

    async def held(self, contents: int) -> dict[str, bool]:
        expected = greedy(self._policy.weights_of(contents), PROMPT, NUM_TOKENS)
        async with self._session.get(f"{self._policy.handle.url}/engines") as reply:
            engines = (await reply.json())["engines"]
        held = {}
        for engine in engines:
            if engine["state"] == "serving":
                with suppress(aiohttp.ClientError):  # it was killed just now
                    held[engine["engine_id"]] = await self._tokens(engine["url"]) == expected
        return held

    async def _tokens(self, url: str) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        async with self._session.post(f"{url}/generate", json=body) as reply:
            tokens: list[int] = (await reply.json())["output_ids"]
            return tokens


def _is_calm(status: ServerStatus) -> bool:
    engines = [engine for group in status.groups for engine in group.engines]
    return not status.lock_owner and (
        status.phase == "offloaded" or not any(engine.fence_reason for engine in engines)
    )


async def test_what_real_engines_serve_is_what_was_pushed_and_there_is_no_dead_end(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"main": one_engine() | {"num_engines": 2}}
    timeout = aiohttp.ClientTimeout(total=120)
    with real_policy(models, tmp_path, groups, health=HEALTH) as policy:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            walk = VerbWalk(SGLangRig(policy, session), Random(SEED))
            await walk.run(NUM_STEPS)
    with capsys.disabled():
        num_done = sum(line.endswith(": done") for line in walk.log)
        print(f"\n{NUM_STEPS} steps, {num_done} commands done")
