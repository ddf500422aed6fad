"""Offloads a policy again and again while clients ask it, and judges every answer."""

from __future__ import annotations

import asyncio
import time
from random import Random

from tests.support.load import Load
from tests.support.real_policy import RealPolicy
from tests.support.referee import Answer, Referee

# clock: pauses of random length.

NUM_CLIENTS = 64


async def cycle(policy: RealPolicy, random: Random) -> int:
    """Once around, by whole transitions or verb by verb, with pauses of random length.

    Returns:
        The bytes that the engines have released.
    """
    handle = policy.handle
    await asyncio.sleep(random.uniform(0, 1))
    if random.random() < 0.5:
        async with handle.offloaded() as window:
            await asyncio.sleep(random.uniform(0, 0.2))
            window.push(policy.next_tensors())
        return window.report.freed_bytes
    freed_bytes = 0
    for verb in (
        handle.phases.pause_generation,
        handle.phases.flush_cache,
        handle.phases.release_memory_occupation,
        handle.phases.onload_weights,
        lambda: handle.phases.update_weights(policy.next_tensors()),
        handle.phases.verify,
        handle.phases.onload_kv,
        handle.phases.continue_generation,
    ):
        report = await verb()
        freed_bytes += report.freed_bytes
        if random.random() < 0.3:
            await asyncio.sleep(random.uniform(0, 0.1))
    return freed_bytes


async def offload_under_load(
    policy: RealPolicy, num_cycles: int, least_freed_bytes: int
) -> tuple[Load, str]:
    """Fails if an engine ends, a request is lost, a token is wrong, or memory is not released.

    Args:
        least_freed_bytes: in each cycle, by all engines.

    Returns:
        The clients, and the figures of the run in words.
    """
    random, referee = Random(20), Referee(policy.weights_of)
    before = policy.identities()
    assert len(before) == 2
    load = Load(policy.handle.url, NUM_CLIENTS, seed=3, lengths=(30, 160))
    findings: list[str] = []
    num_answers, seen, in_flight, sample = 0, set(), [], list[Answer]()
    started = time.monotonic()
    async with load.running():
        for number in range(num_cycles):
            if number and number % 50 == 0:
                print(f"{number} cycles in {time.monotonic() - started:.0f} s", flush=True)
            in_flight.append(load.num_in_flight)
            assert await cycle(policy, random) >= least_freed_bytes
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

    figures = (
        f"{num_cycles} cycles in {took_s:.0f} s: {len(load.asked)} requests, "
        f"{num_answers + len(answers)} answers of {load.num_tokens} tokens, "
        f"{load.kinds['abort']} aborted and done again, {load.num_seams} gone on by the router"
    )
    # Every request ended exactly once, and well.
    assert not load.broken
    assert set(load.ended.values()) == {1}
    assert load.ended.keys() == set(load.asked)
    assert load.statuses.keys() == {200}
    assert load.num_in_flight == 0
    # It was under load, was interrupted, and each version answered something.
    assert max(in_flight[1:]) == NUM_CLIENTS
    assert load.num_seams > num_cycles, figures
    assert len(seen) > 0.5 * num_cycles, figures
    # And the referee distinguishes the versions.
    assert referee.could_tell(sample, policy.models)
    return load, figures
