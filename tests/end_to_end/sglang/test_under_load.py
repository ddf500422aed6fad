"""Real SGLang is offloaded under load: no engine crashes, no request is lost, no reply is wrong.

64 clients keep two groups busy through the real router while the whole of
pause, flush, release, resume, push, continue is gone through at random moments.  The number of
rounds is ``ROLLOUT_SGLANG_CYCLES``; docs/testing.md has the figures of a long run.
"""

from __future__ import annotations

import asyncio
import os
import time
from random import Random

import pytest

from rollout.core.errors import PhaseFailed
from tests.support.load import Load, has_own_key
from tests.support.real_sglang import RealPolicy
from tests.support.referee import Answer, Referee

NUM_CYCLES = int(os.environ.get("ROLLOUT_SGLANG_CYCLES", "25"))
NUM_CLIENTS = 64

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300 + 20 * NUM_CYCLES)]


async def cycle(policy: RealPolicy, random: Random) -> None:
    """Once around, by whole transitions or verb by verb, with pauses of random length."""
    handle = policy.handle
    await asyncio.sleep(random.uniform(0, 1))
    if random.random() < 0.5:
        async with handle.offloaded() as window:
            await asyncio.sleep(random.uniform(0, 0.2))
            window.push(policy.next_tensors())
        return
    for verb in (
        handle.pause_generation,
        handle.flush_cache,
        handle.release_memory_occupation,
        handle.onload_weights,
        lambda: handle.update_weights(policy.next_tensors()),
        handle.verify,
        handle.onload_kv,
        handle.continue_generation,
    ):
        await verb()
        if random.random() < 0.3:
            await asyncio.sleep(random.uniform(0, 0.1))


async def test_offload_under_load(
    policy: RealPolicy,
    capsys: pytest.CaptureFixture[str],
    record_property,  # type: ignore[no-untyped-def]
) -> None:
    random, referee = Random(20), Referee(policy.weights_of)
    before = policy.identities()
    assert len(before) == 2
    load = Load(policy.handle.url, NUM_CLIENTS, seed=3, lengths=(30, 160))
    findings: list[str] = []
    num_answers, seen, in_flight, sample = 0, set(), [], list[Answer]()
    started = time.monotonic()
    async with load.running():
        for number in range(NUM_CYCLES):
            if number and number % 50 == 0:
                with capsys.disabled():
                    print(f"\n{number} cycles in {time.monotonic() - started:.0f} s", flush=True)
            in_flight.append(load.num_in_flight)
            await cycle(policy, random)
            answers = load.taken()
            num_answers += len(answers)
            seen |= {span.version for one in answers for span in one.spans}
            sample = [*sample, *(one for one in answers if len(one.output) > 20)][-32:]
            findings += await asyncio.to_thread(referee.findings, answers)
            assert not findings, "\n".join(findings[:5])
            assert not load.broken, load.broken[:5]
            assert policy.identities() == before
    took_s = time.monotonic() - started
    answers = load.taken()
    findings += referee.findings(answers)
    assert not findings, "\n".join(findings[:5])

    # Every request ended exactly once, and well.
    assert not load.broken
    assert set(load.ended.values()) == {1}
    assert load.ended.keys() == set(load.asked)
    assert load.statuses.keys() == {200}
    assert load.num_in_flight == 0
    # It was under load, its aborts were seen, and each version answered something.
    assert max(in_flight[1:]) == NUM_CLIENTS
    assert load.kinds["abort"] > NUM_CYCLES
    assert load.num_seams > NUM_CYCLES
    assert len(seen) > 0.5 * NUM_CYCLES
    # And the referee distinguishes the versions.
    assert referee.could_tell(sample, policy.models)
    told = (
        f"{NUM_CYCLES} cycles in {took_s:.0f} s: {len(load.asked)} requests, "
        f"{num_answers + len(answers)} answers of {load.num_tokens} tokens, "
        f"{load.kinds['abort']} aborted and done again, {load.num_seams} gone on by the router"
    )
    record_property("figures", told)
    with capsys.disabled():
        print(f"\n{told}")


async def test_without_the_flush_old_cache_answers_and_is_found_out(policy: RealPolicy) -> None:
    """The check above can fail.  What the router wrote its own cache key into is right even so."""
    referee = Referee(policy.weights_of)
    load = Load(policy.handle.url, 16, seed=5, lengths=(10, 30))
    async with load.running():
        await load.reaches(40)
        policy.sabotage.flush = True
        await policy.handle.serve_weights(policy.next_tensors())
        await load.reaches(load.ended.total() + 60)
    answers = load.taken()
    found = referee.findings(answers)
    assert found
    assert all(f"not of version {policy.handle.weight_version}" in line for line in found)
    assert all(has_own_key(line) for line in found)
    policy.sabotage.flush = False
    await policy.handle.serve_weights(policy.next_tensors())


async def test_without_the_pause_a_release_kills_the_engines(policy: RealPolicy) -> None:
    """The barrier is what keeps them alive: the same cycle without it loses every engine."""
    load = Load(policy.handle.url, NUM_CLIENTS, seed=4, lengths=(8, 400))
    async with load.running():
        await load.reaches(2)  # the others are in the middle
        policy.sabotage.pause = True
        with pytest.raises(PhaseFailed, match="release"):
            await policy.handle.give_memory()
        policy.sabotage.pause = False
    engines = policy.engines()
    assert len(engines) == 2
    for engine in engines:
        # The health check may see the death before the release reports it.
        assert "release" in engine.fence_reason or "its process has ended" in engine.fence_reason
        # The call crashed it, before anything stopped it.
        assert "AssertionError" in policy.log_of(engine.engine_id)
    assert load.broken
    assert set(load.ended.values()) == {1}
