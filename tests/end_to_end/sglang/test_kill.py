"""``kill -9`` of a real SGLang engine while 233 requests run: all are answered, and rightly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import aiohttp
import pytest

from rollout.core.types import EngineStatus
from tests.end_to_end.sglang.openai_asking import AskingOpenAI
from tests.engines.embedded.reference import greedy
from tests.support.generate_asking import TOKENS, AskingGenerate, counters, text_of
from tests.support.load import PROMPTS
from tests.support.processes import shared_memory_of, wait_until
from tests.support.real_policy import RealPolicy, process_of
from tests.support.referee import Referee
from tests.support.waits import until_begun

pytestmark = [pytest.mark.exec, pytest.mark.sglang, pytest.mark.timeout(400)]

NUM = 200
# One after so many of those, which is an odd number of requests: both engines get every kind.
EVERY = 6
NUM_OPENAI = NUM // EVERY
NUM_FEW = 40
MOST_STOPS = 32
"""SGLang refuses more."""


def stops_that_begin(policy: RealPolicy) -> list[str]:
    """Stop strings of which most tokens may be the beginning: those are not safe to keep."""
    path = policy.weights_of(policy.handle.weight_version)
    drawn = Counter(token for prompt in PROMPTS for token in greedy(path, list(prompt), TOKENS))
    return [text_of([token]) + "\n" for token, _ in drawn.most_common(MOST_STOPS)]


async def test_all_requests_of_every_route_are_answered_though_an_engine_is_killed(
    policy: RealPolicy,
    capsys: pytest.CaptureFixture[str],
    record_property: Any,
) -> None:
    # A version that is on no disk: who is started again waits for the next one.
    await policy.handle.push(policy.next_tensors())
    engine = policy.engines()[0]
    assert engine.pid is not None
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=NUM + NUM_OPENAI)
    async with aiohttp.ClientSession(
        policy.handle.url, connector=connector, timeout=timeout
    ) as session:
        before = await counters(session)
        asking = AskingGenerate(session, stops_that_begin(policy))
        openai = AskingOpenAI(session, policy.handle.weight_version)
        asked = []
        for number in range(NUM):
            asked.append(asyncio.create_task(asking.ask(number)))
            if number % EVERY == EVERY - 1:
                asked.append(asyncio.create_task(openai.ask(number // EVERY)))

        def are_on_their_way() -> bool:
            begun = [
                sum(number > 1 for number in one.num_events.values()) for one in (asking, openai)
            ]
            return begun[0] >= NUM // 8 and begun[1] >= NUM_OPENAI // 8

        await until_begun(asked, are_on_their_way)
        files = shared_memory_of(engine.pid)
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.gather(*asked)
        after = await counters(session)

    def counted(what: str) -> float:
        return after[f"router_{what}_total"] - before[f"router_{what}_total"]

    assert len(asking.answers) == NUM
    assert {one.kind for one in asking.answers} == {"length"}
    assert {len(one.output) for one in asking.answers} == {TOKENS}
    findings = Referee(policy.weights_of).findings(asking.answers)
    assert not findings, "\n".join(findings[:5])
    assert counted("failovers") > NUM / 8
    assert counted("tokens_kept") > 0
    # A stream of OpenAI's does not say how many of its tokens were.
    assert counted("tokens_recomputed") >= asking.num_recomputed
    assert counted("broken_replies") == len(openai.begun_chats)
    assert openai.num_failovers > 0
    num_chats = len(openai.chats) + len(openai.begun_chats)
    assert len(openai.completions) + num_chats == NUM_OPENAI
    findings = Referee(policy.weights_of).findings(openai.completions)
    findings += openai.wrong_chats(policy.weights_of(policy.handle.weight_version))
    assert not findings, "\n".join(findings[:5])
    told = (
        f"kill -9 with {NUM + NUM_OPENAI} in flight: {counted('failovers'):.0f} went on elsewhere, "
        f"{counted('tokens_kept'):.0f} tokens kept, {counted('tokens_recomputed'):.0f} recomputed"
    )
    record_property("figures", told)
    with capsys.disabled():
        print(f"\n{told}")

    await check_comes_back(policy, engine)
    assert files
    assert not [file for file in files if file.exists()]


async def check_comes_back(policy: RealPolicy, killed: EngineStatus) -> None:
    """The engine is started again by recovery, and serves after the next push."""

    def is_back() -> bool:
        now = next(one for one in policy.engines() if one.engine_id == killed.engine_id)
        return now.is_stale and now.pid not in (None, killed.pid)

    assert await asyncio.to_thread(wait_until, is_back, 200)
    await policy.handle.push(policy.next_tensors())
    assert policy.is_whole()


@pytest.mark.parametrize(
    "name",
    ["sglang::scheduler", pytest.param("sglang::detokenizer", marks=pytest.mark.chaos)],
)
async def test_no_request_fails_though_another_process_of_an_engine_is_killed(
    policy: RealPolicy, name: str
) -> None:
    """The test before kills its API server."""
    await policy.handle.push(policy.next_tensors())
    killed = policy.engines()[0]
    async with aiohttp.ClientSession(policy.handle.url) as session:
        asking = AskingGenerate(session)
        asked = [asyncio.create_task(asking.ask(number)) for number in range(NUM_FEW)]

        def num_begun() -> int:
            mine = (one for one, its in asking.engine_of.items() if its == killed.engine_id)
            return sum(asking.num_events[number] > 1 for number in mine)

        await until_begun(asked, lambda: num_begun() > 0)
        os.kill(process_of(killed, name), signal.SIGKILL)
        late = range(NUM_FEW, NUM_FEW + NUM_FEW // 4)  # as the engine dies
        await asyncio.gather(*asked, *(asking.ask(number) for number in late))
    assert {one.kind for one in asking.answers} == {"length"}
    assert {len(one.output) for one in asking.answers} == {TOKENS}
    findings = Referee(policy.weights_of).findings(asking.answers)
    assert not findings, "\n".join(findings[:5])
    await check_comes_back(policy, killed)
