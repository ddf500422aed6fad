"""Kinds of failed samples: where each is set, saved, counted, and kept, masked or dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from engines.fake import FakeEngine
from engines.fake.engine.faults import reject
from engines.protocol import SamplingParams
from rollout.core.errors import RolloutError
from rollout.core.samples import Sample, SampleFailure, SampleStatus, all_samples
from rollout.driver.client.generation_client import FailureKind, kind_of_refusal
from rollout.driver.client.session import Session
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.sample_rows import groups_of, sample_rows
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import ExpectedFailure, RolloutOptions
from tests.support.driving import SAMPLING, always, driving, engines, numbers, prompts, source
from tests.support.virtual_time import virtual_time
from tests.support.waits import forever

BATCH: dict[str, Any] = {"group_size": 2, "sampling": SAMPLING}
ALL_MAY_FAIL = RolloutOptions(max_failed_share=1.0)
CONTEXT = 64


def boom(*_: object) -> Any:
    raise ValueError("boom")


async def late(*_: object) -> float:
    await forever()
    return 1.0


async def long_turns(session: Session) -> None:
    """Two turns, between which the tool of every second prompt has too much to say."""
    await session.generate(SamplingParams(max_new_tokens=3))
    num = 70_000 if session.sample.prompt_ids[0] % 2 == 0 else 2
    session.observe([7] * num, "x" * num)
    await session.generate(SamplingParams(max_new_tokens=3))


def small() -> list[FakeEngine]:
    return [FakeEngine("fake-0", token_s=0.01, context_length=CONTEXT)]


HOOKS: dict[SampleFailure, list[Hooks]] = {
    SampleFailure.TOO_LONG: [Hooks()],
    SampleFailure.TIMEOUT: [
        Hooks(reward=late, reward_timeout_s=1.0),
        Hooks(group_reward=late, reward_timeout_s=1.0),
    ],
    SampleFailure.GENERATE_ERROR: [Hooks(generate=boom)],
    SampleFailure.REWARD_ERROR: [
        Hooks(reward=boom),
        Hooks(reward=always(float("nan"))),
        Hooks(group_reward=boom),
    ],
    SampleFailure.FILTER_ERROR: [
        Hooks(sample_filter=boom),
        Hooks(group_filter=boom),
        Hooks(post_process=boom),
    ],
    SampleFailure.ENGINE: [Hooks()],
}
CASES = [(failure, hooks) for failure, several in HOOKS.items() for hooks in several]


@pytest.mark.parametrize(("failure", "hooks"), CASES)
def test_each_kind_is_set_where_a_sample_fails_counted_saved_and_in_the_error(
    failure: SampleFailure, hooks: Hooks
) -> None:
    @virtual_time
    async def run() -> None:
        of = small()
        if failure is SampleFailure.ENGINE:
            of[0].faults.strike("generate", reject(400, "no"))
        prompt = Prompt(tuple(range(CONTEXT + 1)) if failure is SampleFailure.TOO_LONG else (1,))
        batch: dict[str, Any] = {"group_size": 1, "sampling": SAMPLING}
        seen: list[Mapping[str, float]] = []
        settings: Any = {"hooks": hooks, "on_metrics": lambda step, metrics: seen.append(metrics)}
        async with driving(of, **settings) as (driver, _):
            (group,) = await driver.rollout(0, [prompt], options=ALL_MAY_FAIL, **batch)
            assert seen[-1][f"rollout/failed/{failure}"] == 1
            if failure is SampleFailure.ENGINE:
                of[0].faults.strike("generate", reject(400, "no"))
            with pytest.raises(RolloutError, match=rf"1 of 1 samples failed \({failure}: 1\)"):
                await driver.rollout(0, [prompt], **batch)
        assert [sample.failure for sample in group] == [failure]
        assert groups_of(sample_rows([group])) == [group]

    run()


def test_every_kind_has_a_row() -> None:
    assert set(HOOKS) == set(SampleFailure)
    assert set(get_args(ExpectedFailure)) == set(SampleFailure) - {SampleFailure.FILTER_ERROR}


@pytest.mark.parametrize(
    "text",
    [
        "prompt of 70006 tokens plus max_new_tokens 3 is 70009, more than the context length of 64",
        "The input (70006 tokens) is longer than the model's context length (4096 tokens).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "The decoder prompt (length 70006) is longer than the maximum model length of 4096.",
        "This model's maximum context length is 4096 tokens.",
    ],
)
def test_the_refusals_of_every_kind_of_engine_are_known(text: str) -> None:
    assert kind_of_refusal(f'HTTP 400: {{"error": "{text}"}}') is FailureKind.TOO_LONG
    assert kind_of_refusal("HTTP 400: top_k is 0") is FailureKind.REFUSED


@virtual_time
async def test_a_turn_over_the_context_keeps_the_turns_before_it_and_nothing_else() -> None:
    """A tool's message that no engine takes is no reason to keep 70 000 ids."""
    async with driving(small(), always(1.0), hooks=Hooks(generate=long_turns)) as (driver, _):
        groups = await driver.rollout(0, prompts(4), options=ALL_MAY_FAIL, **BATCH)
    for number, group in enumerate(groups, 1):
        for sample in group:
            sample.check()
            if number % 2:
                assert (sample.failure, len(sample.output_ids)) == (None, 8)
            else:
                assert (sample.failure, len(sample.output_ids)) == (SampleFailure.TOO_LONG, 3)
                assert "context length" in sample.error
                assert sample.mask == [1] * 3
                assert "x" not in sample.text


@virtual_time
async def test_a_hook_may_go_on_after_a_turn_over_the_context() -> None:
    async def shortens(session: Session) -> None:
        try:
            await long_turns(session)
        except RolloutError:
            assert session.sample.failure is SampleFailure.TOO_LONG
            session.observe([8], "y")
            await session.generate(SamplingParams(max_new_tokens=3))

    async with driving(small(), always(1.0), hooks=Hooks(generate=shortens)) as (driver, _):
        (group,) = await driver.rollout(0, [Prompt((2,))], **BATCH)
    for sample in group:
        assert (sample.failure, sample.error, sample.reward) == (None, "", 1.0)
        assert sample.mask == [1, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("act", ["keep", "mask", "drop"])
@pytest.mark.parametrize("is_source", [False, True])
def test_a_kind_that_is_named_is_kept_masked_or_dropped_and_costs_no_batch(
    act: Any, is_source: bool
) -> None:
    def reward(sample: Sample) -> float:
        """Raises for the first sample of each prompt, and for all of the third."""
        number = sample.prompt_ids[0]
        is_first = number not in rewarded
        rewarded.add(number)
        return boom() if is_first or number == 3 else 1.0

    @virtual_time
    async def run() -> None:
        options = RolloutOptions(when_failed={"reward_error": act})
        async with driving(engines(0.01), reward) as (driver, client):
            of: Any = source(6) if is_source else prompts(5)
            more = {"num_groups": 4} if is_source else {}
            groups = await driver.rollout(0, of, options=options, **BATCH, **more)
            if is_source:
                stream = driver.stream_of(of)
                assert stream.auditor.findings(stream.pending) == []
        metrics = client.reports[-1]["metrics"]
        failed = [one for one in all_samples(groups) if one.status is SampleStatus.FAILED]
        if act == "drop":
            assert numbers(groups) == ([1, 2, 4, 5])
            assert (len(failed), list(map(len, groups))) == (0, [1] * 4)
            assert metrics["rollout/rejected/no sample left"] == 1
            assert metrics["rollout/failed/reward_error"] == 6
        else:
            assert numbers(groups) == [1, 2, 3, 4, 5][: 4 if is_source else 5]
            assert len(failed) == len(groups) + 1 == metrics["rollout/failed/reward_error"]
            assert {flag for sample in failed for flag in sample.mask} == {int(act == "keep")}
            assert all(sample.reward is None for sample in failed)

    rewarded: set[int] = set()
    run()


@virtual_time
async def test_other_kinds_than_the_named_still_fail_the_batch() -> None:
    def reward(sample: Sample) -> float:
        return boom() if sample.prompt_ids == [1] else 1.0

    options = RolloutOptions(when_failed={"too_long": "drop"})
    async with driving(small(), reward) as (driver, _):
        of = [Prompt(tuple(range(CONTEXT + 1))), Prompt((1,)), Prompt((2,))]
        with pytest.raises(RolloutError, match=r"2 of 4 samples failed \(reward_error: 2\)"):
            await driver.rollout(0, of, options=options, **BATCH)


@virtual_time
async def test_post_process_that_raises_fails_the_batch_whatever_kinds_are_named() -> None:
    every: Any = dict.fromkeys(get_args(ExpectedFailure), "drop")
    hooks = Hooks(reward=always(1.0), post_process=boom)
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        with pytest.raises(RolloutError, match=r"4 of 4 samples failed \(filter_error: 4\)"):
            await driver.rollout(0, prompts(2), options=RolloutOptions(when_failed=every), **BATCH)


@pytest.mark.parametrize(
    "when_failed", [{"filter_error": "keep"}, {"too_long": "ignore"}, {"overlong": "drop"}]
)
def test_a_kind_or_an_act_that_there_is_not_is_refused(when_failed: Any) -> None:
    with pytest.raises(ValueError, match="when_failed"):
        RolloutOptions(when_failed=when_failed)


def test_members_name_kinds_too() -> None:
    options = RolloutOptions(when_failed={SampleFailure.TOO_LONG: "drop"})  # type: ignore[dict-item]
    assert options.when_failed == {"too_long": "drop"}


# -- a list call that failed ---------------------------------------------------------------------


@virtual_time
async def test_a_failed_list_call_gives_what_was_finished() -> None:
    """One reward of 250 that raises costs a caller none of the others."""

    def reward(sample: Sample) -> float:
        return boom() if sample.prompt_ids == [7] and not failed.add(7) else 1.0

    failed: Any = set()
    async with driving(engines(0.001, 0.001), reward) as (driver, _):
        with pytest.raises(RolloutError, match="samples failed") as caught:
            await driver.rollout(0, prompts(125), **BATCH)
    groups = caught.value.groups
    assert numbers(groups) == [number for number in range(1, 126) if number != 7]
    assert all(len(group.rewards) == len(group) == 2 for group in groups)
    assert groups_of(sample_rows(groups)) == groups


@virtual_time
async def test_a_list_call_that_filters_ended_gives_what_was_finished() -> None:
    hooks = Hooks(reward=lambda sample: float(sample.prompt_ids[0] < 3), group_filter=drop_few)
    options = RolloutOptions(max_rejected=1)
    async with driving(engines(0.01), hooks=hooks, max_in_flight=2) as (driver, _):
        with pytest.raises(RolloutError, match="filters dropped 2 groups") as caught:
            await driver.rollout(0, prompts(8), options=options, **BATCH)
    assert set(numbers(caught.value.groups)) >= {1, 2}
    assert all(sample.reward is not None for sample in all_samples(caught.value.groups))


def drop_few(group: Any) -> bool:
    return group.metadata["number"] not in (3, 4)


@virtual_time
async def test_the_error_of_a_source_has_no_groups_because_the_next_call_has_them() -> None:
    def reward(sample: Sample) -> float:
        return boom() if sample.prompt_ids == [2] and len(calls) < 4 else 1.0

    calls: list[int] = []
    async with driving(engines(0.01), reward) as (driver, client):
        data = source(4)
        with pytest.raises(RolloutError, match="samples failed") as caught:
            await driver.rollout(0, data, num_groups=3, **BATCH)
        assert caught.value.groups == ()
        num = len(client.requests)
        calls += [0] * 4
        assert numbers(await driver.rollout(0, data, num_groups=3, **BATCH)) == [1, 2, 3]
        assert len(client.requests) == num + 2
