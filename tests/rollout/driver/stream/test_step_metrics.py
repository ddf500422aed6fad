"""Metrics of a step: always finite, and right."""

import math

import pytest

from engines.protocol import VersionSpan
from rollout.core.samples import Sample, SampleGroup, SampleStatus
from rollout.driver.stream.options import RolloutOptions
from rollout.driver.stream.step_metrics import (
    StepStats,
    is_repetitive,
    lags,
    length_histogram,
    step_metrics,
)
from tests.support.driving import SAMPLING, always, driving, engines, prompts, push, source
from tests.support.virtual_time import virtual_time


@pytest.mark.parametrize(
    "groups", [[], [SampleGroup(0, [])], [SampleGroup(0, [Sample([1], status="failed")])]]
)
def test_an_empty_step_has_metrics(groups) -> None:
    figures = step_metrics(groups, StepStats())
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["rollout/num_groups"] == len(groups)


def test_the_metrics_are_those_of_the_samples() -> None:
    def sample(version: int, reward: float, **fields) -> Sample:
        span = (VersionSpan(str(version), 0, 2),)
        return Sample([1], [2, 3], [0.0, 0.0], weight_versions=span, reward=reward, **fields)

    groups = [
        SampleGroup(0, [sample(4, 1.0), sample(4, 1.0)]),
        SampleGroup(1, [sample(5, 0.0), sample(3, 1.0, status=SampleStatus.TRUNCATED)]),
    ]
    stats = StepStats(num_parked=3, elapsed_s=2.0, slot_s=6.0, num_slots=4)
    stats.rejected.update(zero_std=2, short=1)
    figures = step_metrics(groups, stats, weight_version=5)
    assert figures["rollout/reward/mean"] == 0.75
    assert figures["rollout/tokens_per_s"] == 4.0
    assert figures["rollout/engine_busy_share"] == 0.75
    assert figures["rollout/truncated_ratio"] == 0.25
    assert figures["rollout/zero_std_groups"] == 1
    assert figures["rollout/rejected_groups"] == 3
    assert figures["rollout/rejected/zero_std"] == 2
    assert figures["rollout/partial_samples"] == 3
    assert [figures[f"rollout/version_lag/{lag}"] for lag in (0, 1, 2)] == [1, 2, 1]


def test_lags_of_unknown_versions_are_left_out() -> None:
    assert lags([Sample([1])], 5) == {}


@pytest.mark.parametrize(
    ("text", "is_so"), [("a" * 199, False), ("ab" * 200, True), ("\ud800" * 300, True)]
)
def test_a_text_that_repeats_itself_is_repetitive(text: str, is_so: bool) -> None:
    assert is_repetitive(text) is is_so


@virtual_time
async def test_a_driver_reports_the_metrics_of_every_step() -> None:
    calls = []
    async with driving(
        engines(0.1),
        always(1.0),
        max_in_flight=8,
        on_metrics=lambda *figures: calls.append(figures),
    ) as (driver, client):
        data, options = source(100), RolloutOptions(max_version_lag=3)
        for step in range(2):
            await driver.rollout(
                step, data, num_groups=4, group_size=2, sampling=SAMPLING, options=options
            )
            await push(client, step + 1, 3.0)
    (first, figures), (second, later) = calls
    assert (first, second) == (0, 1)
    assert figures["rollout/seconds"] == pytest.approx(1.0)
    assert figures["rollout/tokens_per_s"] == pytest.approx(80.0)
    assert figures["rollout/engine_busy_share"] == pytest.approx(1.0)
    assert later["rollout/boundary_s"] == pytest.approx(3.0)
    assert later["rollout/version_lag/0"] == 8


@virtual_time
async def test_the_boundary_is_measured_between_lists_of_prompts_too() -> None:
    found = []
    async with driving(
        engines(0.1), always(1.0), on_metrics=lambda _, metrics: found.append(metrics)
    ) as (driver, client):
        for step in range(2):
            await driver.rollout(step, prompts(2), group_size=2, sampling=SAMPLING)
            await push(client, step + 1, 3.0)
    assert [metrics["rollout/boundary_s"] for metrics in found] == [0.0, pytest.approx(3.0)]
    assert found[1]["server/weight_version"] == 1.0


def test_lengths_are_counted_by_powers_of_two() -> None:
    samples = [Sample([1], [0] * num, [0.0] * num) for num in (1, 2, 3, 4, 5, 64, 65)]
    assert length_histogram(samples) == {"1": 1, "2": 1, "4": 2, "8": 1, "64": 1, "128": 1}


@virtual_time
async def test_a_driver_reports_each_step_to_its_client_without_waiting() -> None:
    async with driving(engines(0.01), always(0.5)) as (driver, client):
        await driver.rollout(7, source(2), num_groups=2, group_size=2, sampling=SAMPLING)
    (report,) = client.reports
    assert report["step"] == 7
    assert report["metrics"]["rollout/reward/mean"] == 0.5
    assert report["lengths"] == {"16": 4}
