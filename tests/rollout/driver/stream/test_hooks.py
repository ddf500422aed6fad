"""Hooks: what they may do, and what happens to the sample if they raise."""

import re

import pytest

from engines.protocol import SamplingParams
from rollout.core.errors import RolloutError
from rollout.core.samples import Sample, SampleStatus, all_samples
from rollout.driver.client.session import Session
from rollout.driver.stream.hooks import Hooks, drop_zero_std
from rollout.driver.stream.options import RolloutOptions
from tests.support.driving import SAMPLING, always, driving, engines, prompts, source
from tests.support.virtual_time import pass_time, virtual_time

ALL_MAY_FAIL = RolloutOptions(max_failed_share=1.0)
BATCH = {"group_size": 2, "sampling": SAMPLING}


def boom(*_):
    raise RuntimeError("boom")


@pytest.mark.parametrize("hook", ["reward", "group_reward", "sample_filter", "group_filter"])
def test_a_hook_that_raises_fails_its_sample_with_the_traceback(hook: str) -> None:
    @virtual_time
    async def run() -> None:
        async with driving(engines(0.01), hooks=Hooks(**{hook: boom})) as (driver, _):
            groups = await driver.rollout(0, prompts(2), options=ALL_MAY_FAIL, **BATCH)
            place = re.escape(f"{__file__}:{boom.__code__.co_firstlineno + 1}")
            said = f"4 of 4 samples failed.*raised RuntimeError.*at {place}\n"
            with pytest.raises(RolloutError, match=said) as caught:
                await driver.rollout(0, prompts(2), **BATCH)
            assert "in boom" in caught.value.__notes__[0]
        for sample in all_samples(groups):
            assert sample.status is SampleStatus.FAILED
            assert hook.replace("_", " ") in sample.error
            assert "in boom" in sample.traceback
            assert len(sample.output_ids) == 10

    run()


@virtual_time
async def test_a_share_of_failures_below_the_limit_is_accepted() -> None:
    def reward(sample: Sample) -> float:
        return 1.0 if sample.prompt_ids != [3] else boom()

    async with driving(engines(0.01), reward, max_failed_share=0.1) as (driver, _):
        groups = await driver.rollout(0, prompts(10), **BATCH)
    assert [len(group.rewards) for group in groups] == [2, 2, 0] + [2] * 7


@virtual_time
async def test_a_failed_reward_of_a_source_is_retried_with_the_next_batch() -> None:
    fails = True

    def reward(sample: Sample) -> float:
        return boom() if fails and sample.prompt_ids == [2] else 1.0

    async with driving(engines(0.01), reward) as (driver, client):
        data = source(100)
        with pytest.raises(RolloutError, match="2 of 8"):
            await driver.rollout(0, data, num_groups=4, **BATCH)
        fails = False
        groups = await driver.rollout(0, data, num_groups=4, **BATCH)
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
    assert [group.metadata["number"] for group in groups] == [1, 2, 3, 4]
    assert len(client.requests) == 10


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "good"])
def test_a_reward_that_is_not_finite_fails_its_sample(value) -> None:
    @virtual_time
    async def run() -> None:
        async with driving(engines(0.01), always(value)) as (driver, _):
            with pytest.raises(
                RolloutError, match=r"reward returned .*, and must return a finite number"
            ):
                await driver.rollout(0, prompts(1), **BATCH)

    run()


@virtual_time
async def test_an_async_reward_has_a_deadline_and_is_tried_again() -> None:
    tries: list[int] = []

    async def reward(sample: Sample) -> float:
        tries.append(1)
        if len(tries) < 3:
            await pass_time(100.0)
        return 0.5

    hooks = Hooks(reward=reward, reward_timeout_s=2.0, reward_tries=3)
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        groups = await driver.rollout(0, prompts(1), group_size=1, sampling=SAMPLING)
    assert groups[0].rewards == [0.5]
    assert len(tries) == 3


@virtual_time
async def test_a_reward_that_never_returns_fails_with_a_message() -> None:
    async def reward(sample: Sample) -> float:
        await pass_time(1e6)
        return 0.0

    hooks = Hooks(reward=reward, reward_timeout_s=2.0, reward_tries=2)
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        with pytest.raises(RolloutError, match="reward did not return within its limit of 2 s"):
            await driver.rollout(0, prompts(1), **BATCH)


@virtual_time
async def test_a_group_reward_sees_all_siblings_at_once() -> None:
    hooks = Hooks(group_reward=lambda group: [float(i) for i in range(len(group))])
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        groups = await driver.rollout(0, prompts(2), group_size=3, sampling=SAMPLING)
    assert [group.rewards for group in groups] == [[0.0, 1.0, 2.0]] * 2


@virtual_time
async def test_a_group_reward_of_the_wrong_length_fails_the_group() -> None:
    async with driving(engines(0.01), hooks=Hooks(group_reward=lambda group: [1.0])) as (d, _):
        with pytest.raises(RolloutError, match="a reward for each of 2 samples, not 1"):
            await d.rollout(0, prompts(1), **BATCH)


@virtual_time
async def test_a_sample_filter_takes_samples_out_of_their_group() -> None:
    rewards = iter([0.0, 1.0, 1.0])
    hooks = Hooks(reward=lambda s: next(rewards), sample_filter=lambda s: bool(s.reward))
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        groups = await driver.rollout(0, prompts(1), group_size=3, sampling=SAMPLING)
    assert groups[0].rewards == [1.0, 1.0]


@virtual_time
async def test_groups_without_variance_are_dropped_and_replaced() -> None:
    def reward(sample: Sample) -> float:
        return float(id(sample) % 2**16) if sample.metadata["number"] % 2 else 1.0

    hooks = Hooks(reward=reward, group_filter=drop_zero_std)
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        data = source(100)
        groups = await driver.rollout(0, data, num_groups=3, **BATCH)
        assert driver.stream_of(data).stats.rejected == {"zero_std": 2}
    assert [group.metadata["number"] for group in groups] == [1, 3, 5]


@virtual_time
async def test_post_processing_may_change_the_rewards_of_the_batch() -> None:
    def centre(groups) -> None:
        for sample in all_samples(groups):
            sample.reward = (sample.reward or 0.0) - 0.5

    hooks = Hooks(reward=always(1.0), post_process=centre)
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        groups = await driver.rollout(0, prompts(1), **BATCH)
    assert groups[0].rewards == [0.5, 0.5]


@virtual_time
async def test_post_processing_that_raises_fails_its_batch_and_loses_nothing() -> None:
    async with driving(engines(0.01), hooks=Hooks(post_process=boom)) as (driver, _):
        data = source(9)
        with pytest.raises(RolloutError, match="post_process raised"):
            await driver.rollout(0, data, num_groups=2, **BATCH)
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []


async def two_turns(session: Session) -> None:
    first = await session.generate(SamplingParams(max_new_tokens=4))
    session.observe([900 + len(first), 901], " tool ")
    await session.generate()


@virtual_time
async def test_turns_keep_their_tokens_and_the_tools_are_masked() -> None:
    async with driving(engines(0.01), hooks=Hooks(generate=two_turns)) as (driver, client):
        groups = await driver.rollout(0, prompts(1), group_size=1, sampling=SAMPLING)
    sample = groups[0].samples[0]
    assert sample.mask == [1] * 4 + [0] * 2 + [1] * 6
    assert sample.output_ids[4:6] == [904, 901]
    assert [(s.start, s.end) for s in sample.weight_versions] == [(0, 4), (6, 12)]
    first, second = client.requests
    assert second.input_ids == [*first.input_ids, *sample.output_ids[:6]]
    assert second.sampling.max_new_tokens == 6
    assert first.affinity == second.affinity != ""


@virtual_time
async def test_a_session_that_is_cut_off_by_the_end_of_a_batch_continues_its_turns() -> None:
    hooks = Hooks(generate=two_turns)
    of = engines(0.01, 0.03, 0.05)
    async with driving(of, hooks=hooks) as (driver, _):
        data, options = source(100), RolloutOptions(over_sampling=3.0)
        num_trained = 0
        for step in range(3):
            groups = await driver.rollout(step, data, options=options, num_groups=3, **BATCH)
            assert {tuple(sample.mask) for sample in all_samples(groups)} == {
                (1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1)
            }
            num_trained += sum(sum(sample.mask) for sample in all_samples(groups))
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
        samples = [one for item in stream._queue.all() for one in item.samples]
    num_pending = sum(sum(sample.mask) for sample in samples)
    assert num_pending > 0
    assert sum(engine.num_output_tokens for engine in of) == num_trained + num_pending


@virtual_time
async def test_a_session_whose_hook_raises_fails_with_its_tokens() -> None:
    async def generate(session: Session) -> None:
        await session.generate(SamplingParams(max_new_tokens=4))
        boom()

    async with driving(engines(0.01), hooks=Hooks(generate=generate)) as (driver, _):
        groups = await driver.rollout(0, prompts(1), options=ALL_MAY_FAIL, **BATCH)
    sample = groups[0].samples[0]
    assert "generate raised RuntimeError('boom')" in sample.error
    assert len(sample.output_ids) == 4


@virtual_time
async def test_a_session_that_breaks_its_sample_fails_it() -> None:
    async def generate(session: Session) -> None:
        await session.generate()
        session.sample.output_ids.append(5)

    async def nothing(session: Session) -> None:
        return

    for hook, message in (
        (generate, "11 output ids but 10 log-probs"),
        (nothing, "without a turn"),
    ):
        async with driving(engines(0.01), hooks=Hooks(generate=hook)) as (driver, _):
            with pytest.raises(RolloutError, match=message):
                await driver.rollout(0, prompts(1), **BATCH)


@virtual_time
async def test_turns_together_stay_within_the_budget() -> None:
    async def talks(session: Session) -> None:
        while session.num_left:
            await session.generate(SamplingParams(max_new_tokens=3))
            session.observe([7])

    async with driving(engines(0.01), hooks=Hooks(generate=talks)) as (driver, _):
        groups = await driver.rollout(0, prompts(1), **BATCH)
    assert {sum(sample.mask) for sample in all_samples(groups)} == {10}
