"""``kill -9`` of a process of a real vLLM engine under load: all requests are answered rightly.

The API server outlives its engine core, or a worker, for some seconds, and answers every request
with an error.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from engines.process.guard import RECORD
from rollout.core.types import EngineStatus
from tests.support.generate_asking import AskingGenerate, counters
from tests.support.processes import shared_memory_of, sockets_of, wait_until
from tests.support.real_policy import (
    TWO_WORKERS,
    RealPolicy,
    one_engine,
    process_of,
    real_policy,
    saved_every_4_tokens,
)
from tests.support.referee import Referee
from tests.support.waits import until_begun

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM = 64
NUM_LATE = 16
"""Requests that come as the engine dies."""
# So many that the engine still computes when the clients have read the first: on free cores it had
# made all of 48 by then.
TOKENS = 256
BACK_WITHIN_S = 400


@pytest.mark.parametrize("name", ["", "VLLM::EngineCore"], ids=["server", "core"])
async def test_all_requests_are_answered_though_an_engine_is_killed_and_it_comes_back_verified(
    policy: RealPolicy, name: str
) -> None:
    await check_kill(policy, name)


@pytest.fixture
def parallel(models: list[Path], tmp_path: Path) -> Iterator[RealPolicy]:
    """The first engine has two workers."""
    groups = {"left": one_engine("vllm", **TWO_WORKERS), "right": one_engine("vllm")}
    with saved_every_4_tokens(), real_policy(models, tmp_path, groups) as policy:
        yield policy


@pytest.mark.chaos
async def test_so_they_are_though_one_of_two_tensor_parallel_workers_is_killed(
    parallel: RealPolicy,
) -> None:
    """``make test-chaos PYTEST_ARGS=tests/end_to_end/vllm_cpu/test_kill.py``."""
    await check_kill(parallel, "VLLM::Worker_TP1")


async def check_kill(policy: RealPolicy, name: str) -> None:
    # A version that is on no disk: an engine that starts again waits for the next one.
    await policy.handle.push(policy.next_tensors())
    killed = policy.engines()[0]
    assert killed.pid is not None
    files = sockets_of(killed.pid)
    [folder] = {one.parent for one in files}
    kept = {path.name for path in folder.iterdir() if path.is_file()} - {".held", RECORD}
    assert {name[: len("vllm_dist_")] for name in kept} == {"vllm_dist_"}  # where its ranks meet
    files |= {folder, *shared_memory_of(killed.pid)}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(policy.handle.url, timeout=timeout) as session:
        before = await counters(session)
        asking = AskingGenerate(session, num_tokens=TOKENS)
        # First those that are streamed, so that each engine gets half of them.
        numbers = [*range(0, NUM, 2), *range(1, NUM, 2)]
        asked = [asyncio.create_task(asking.ask(number)) for number in numbers]

        def num_begun() -> int:
            mine = (one for one, name in asking.engine_of.items() if name == killed.engine_id)
            return sum(asking.num_events[number] > 1 for number in mine)

        await until_begun(asked, lambda: num_begun() >= NUM // 8)
        os.kill(process_of(killed, name), signal.SIGKILL)
        asked += [asyncio.create_task(asking.ask(number)) for number in range(NUM, NUM + NUM_LATE)]
        await asyncio.gather(*asked)
        after = await counters(session)

        counted = {name: after[name] - before[name] for name in after}
        assert len(asking.answers) == NUM + NUM_LATE
        assert {one.kind for one in asking.answers} == {"length"}
        assert {len(one.output) for one in asking.answers} == {TOKENS}
        findings = Referee(policy.weights_of).findings(asking.answers)
        assert not findings, "\n".join(findings[:5])
        assert counted["router_failovers_total"] > NUM / 8
        assert counted["router_tokens_kept_total"] > 0
        assert counted["router_broken_replies_total"] == 0

        def engine() -> EngineStatus:
            return next(one for one in policy.engines() if one.engine_id == killed.engine_id)

        def is_back() -> bool:
            return engine().is_stale and engine().pid not in (None, killed.pid)

        assert await asyncio.to_thread(wait_until, is_back, BACK_WITHIN_S), engine()
        assert not [file for file in files if file.exists()]
        await policy.handle.push(policy.next_tensors())
        assert policy.is_whole()
        # It computes with what was pushed.
        again = AskingGenerate(session)
        await asyncio.gather(*(again.ask(number) for number in range(12)))
        assert not Referee(policy.weights_of).findings(again.answers)
        assert {one.spans[-1].version for one in again.answers} == {policy.handle.weight_version}
