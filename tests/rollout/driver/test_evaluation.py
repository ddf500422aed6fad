"""Evaluation: every key is there, pass@k follows its definition, one weight version."""

import asyncio
import itertools
import math
import sys

import pytest

from engines.protocol import SamplingParams, VersionSpan
from rollout.core.errors import RolloutError
from rollout.core.samples import Sample, SampleGroup, SampleStatus, all_samples
from rollout.driver.evaluation import (
    EvalDataset,
    EvalPlan,
    EvalResult,
    group_metrics,
    mean_pass_at_k,
    pass_at_k,
)
from tests.support.driving import SAMPLING, always, driving, engines, prompts, push
from tests.support.virtual_time import pass_time, virtual_time

KEYS = [
    "eval/K",
    *(f"eval/K/response_len/{name}" for name in ("mean", "median", "max", "min")),
    "eval/K/repetition_frac",
    "eval/K/truncated_ratio",
    "eval/K/none_reward_ratio",
    "eval/K/pass@1",
    "eval/K/zero_std/num_all_right",
    "eval/K/zero_std/num_all_wrong",
    "eval/K/weight_version/min",
    "eval/K/weight_version/max",
    "eval/K/mixed_version_ratio",
]


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [Sample([1], status=SampleStatus.FAILED, error="no")],
        [Sample([1], [2], [-1.0], reward=1.0)],
        [Sample([1], reward=0.0), Sample([1], status=SampleStatus.ABORTED)],
    ],
)
def test_every_key_is_there_and_finite_whatever_failed(samples: list[Sample]) -> None:
    groups = [SampleGroup(index, [sample]) for index, sample in enumerate(samples)]
    metrics = group_metrics("K", groups)
    assert list(metrics) == KEYS
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_metrics_are_those_of_the_rewarded_samples() -> None:
    span = (VersionSpan("3", 0, 2),)
    samples = [
        Sample([1], [2, 3], [0.0, 0.0], "ab" * 400, span, reward=1.0),
        Sample([1], [2] * 4, [0.0] * 4, status=SampleStatus.TRUNCATED, reward=0.5),
        Sample([1], [2] * 9, [0.0] * 9, status=SampleStatus.FAILED),
    ]
    metrics = group_metrics("K", [SampleGroup(0, samples)], ks=(1, 2))
    assert metrics["eval/K"] == 0.75
    assert metrics["eval/K/response_len/mean"] == 3
    assert metrics["eval/K/response_len/max"] == 4
    assert metrics["eval/K/repetition_frac"] == 0.5
    assert metrics["eval/K/truncated_ratio"] == 0.5
    assert metrics["eval/K/none_reward_ratio"] == pytest.approx(1 / 3)
    assert (metrics["eval/K/pass@1"], metrics["eval/K/pass@2"]) == (0.5, 1.0)
    assert metrics["eval/K/weight_version/min"] == 3


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_with_k_above_the_number_of_samples_is_rejected() -> None:
    with pytest.raises(ValueError, match="pass@3 of 2 samples"):
        pass_at_k(2, 1, 3)
    with pytest.raises(ValueError, match="pass@4 needs as many samples; num_samples is 2"):
        EvalDataset([], ks=(4,), num_samples=2)
    with pytest.raises(ValueError, match="num_samples = 0"):
        EvalDataset([], num_samples=0)


def test_prompts_with_too_few_rewarded_samples_are_left_out_of_pass_at_k() -> None:
    good = SampleGroup(0, [Sample([1], reward=1.0), Sample([1], reward=0.0)])
    half = SampleGroup(1, [Sample([1], reward=0.0), Sample([1])])
    assert mean_pass_at_k([good, half], 2) == 1.0
    assert mean_pass_at_k([half], 2) == 0.0


def test_zero_std_groups_are_counted_by_their_outcome() -> None:
    groups = [
        SampleGroup(i, [Sample([1], reward=reward) for reward in rewards])
        for i, rewards in enumerate([(1.0, 1.0), (0.0, 0.0), (0.0, 0.0), (0.0, 1.0), ()])
    ]
    metrics = group_metrics("K", groups)
    assert metrics["eval/K/zero_std/num_all_right"] == 1
    assert metrics["eval/K/zero_std/num_all_wrong"] == 2


def test_the_line_has_the_format_that_slime_prints() -> None:
    assert EvalResult(8, {"eval/K": 0.5}, {}).line == "[EVAL RESULT] eval 8: {'eval/K': 0.5}"


@pytest.mark.parametrize(
    ("plan", "due"),
    [
        (EvalPlan(2), [0, 2, 4]),
        (EvalPlan(3, before_first=False), [3]),
        (EvalPlan(0), [0]),
    ],
)
def test_an_evaluation_is_due_before_the_first_step_and_every_few(plan, due) -> None:
    assert [step for step in range(5) if plan.is_due(step)] == due


@virtual_time
async def test_data_sets_have_their_own_sampling_samples_and_rewards() -> None:
    async with driving(engines(0.01), always(0.25)) as (driver, client):
        result = await driver.evaluate(
            4,
            {
                "easy": EvalDataset(prompts(3), SamplingParams(2), num_samples=4, ks=(1, 4)),
                "hard": EvalDataset(prompts(2), SamplingParams(5), reward=always(1.0)),
                "none": EvalDataset([]),
            },
        )
    assert result.metrics["eval/easy"] == 0.25
    assert result.metrics["eval/easy/response_len/max"] == 2
    assert result.metrics["eval/hard"] == result.metrics["eval/hard/pass@1"] == 1.0
    assert result.metrics["eval/none"] == 0.0
    assert "eval/easy/pass@4" in result.metrics
    assert result.line.startswith("[EVAL RESULT] eval 4: {'eval/easy': 0.25")
    assert len(client.requests) == 14
    assert len(result.groups["easy"]) == 3


@virtual_time
async def test_failed_samples_do_not_end_an_evaluation() -> None:
    def reward(sample: Sample) -> float:
        return 1.0 if sample.prompt_ids != [1] else float("nan")

    async with driving(engines(0.01), reward) as (driver, _):
        result = await driver.evaluate(0, {"K": EvalDataset(prompts(4), SAMPLING)})
    assert result.metrics["eval/K"] == 1.0
    assert result.metrics["eval/K/none_reward_ratio"] == 0.25


@pytest.mark.parametrize("which", ["first", "last"])
def test_the_first_error_ends_the_other_data_sets_before_it_is_raised(which: str) -> None:
    def leaves(sample: Sample) -> float:
        sys.exit(3)

    @virtual_time
    async def run() -> None:
        fine = EvalDataset(prompts(4), SamplingParams(max_new_tokens=1000))
        datasets = {"fine": fine, "other": fine, "leaves": EvalDataset(prompts(2), reward=leaves)}
        if which == "first":
            datasets = dict(reversed(datasets.items()))
        async with driving(engines(0.01), always(1.0)) as (driver, client):
            before = asyncio.all_tasks()
            with pytest.raises(RolloutError, match=r"reward raised SystemExit\(3\)"):
                await driver.evaluate(0, datasets)
            assert client.num_in_flight == 0
            assert asyncio.all_tasks() == before

    run()


@virtual_time
async def test_a_push_during_an_evaluation_restarts_it() -> None:
    async with driving(engines(0.1, 0.1), always(1.0), max_in_flight=4) as (driver, client):
        client.weight_version = 0
        call = asyncio.create_task(driver.evaluate(0, {"K": EvalDataset(prompts(9), SAMPLING)}))
        await pass_time(1.5)
        await push(client, 1)
        result = await call
    samples = [sample for groups in result.groups.values() for sample in all_samples(groups)]
    assert {version for sample in samples for version in sample.versions} == {1}
    assert result.metrics["eval/K/mixed_version_ratio"] == 0


@virtual_time
async def test_an_evaluation_fails_if_the_weight_version_changes_in_every_try() -> None:
    async with driving(engines(0.1), always(1.0)) as (driver, client):

        async def keep_pushing() -> None:
            for version in itertools.count(1):
                await pass_time(0.35)
                await push(client, version, 0.01)

        pusher = asyncio.create_task(keep_pushing())
        with pytest.raises(RolloutError, match="the weight version changed in each of 3 tries"):
            await driver.evaluate(7, {"K": EvalDataset(prompts(3), SAMPLING)})
        pusher.cancel()
        await asyncio.wait([pusher])
