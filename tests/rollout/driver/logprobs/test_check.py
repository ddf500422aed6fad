"""A driver's check of log-probs: one line of a training loop."""

import logging
import random

import pytest

from rollout.core.errors import LogprobMismatch
from rollout.core.samples import SampleGroup, all_samples
from tests.support.driving import SAMPLING, driving, engines, prompts
from tests.support.small_policy import new_policy

NEW = new_policy(random.Random(1))


def groups_of(*policies: tuple[str, bool]) -> list[SampleGroup]:
    """What engines return in step 5; those with True have a swapped tensor."""
    draw, made = random.Random(2), []
    for engine_id, is_faulty in policies:
        policy = NEW.with_swapped_rows() if is_faulty else NEW
        samples = [policy.sample(draw, engine_id=engine_id, version="5") for _ in range(4)]
        for sample in samples:
            sample.metadata["rollout_id"] = 5
        made.append(SampleGroup(0, samples))
    return made


FINE = groups_of(("main-0", False), ("main-1", False))
FAULTY = groups_of(("main-0", False), ("main-1", True))


def trainer_logprobs(groups: list[SampleGroup]) -> list[list[float]]:
    return [NEW.logprobs(sample) for sample in all_samples(groups)]


async def test_a_mismatch_is_logged_and_reported_with_its_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = []
    async with driving(
        engines(0.001), on_metrics=lambda step, metrics: seen.append((step, metrics))
    ) as (driver, client):
        with caplog.at_level(logging.WARNING):
            assert (await driver.check_logprobs(FINE, trainer_logprobs(FINE))).mismatch is None
            assert not caplog.messages
            report = await driver.check_logprobs(FAULTY, trainer_logprobs(FAULTY))
    assert report.mismatch is not None
    assert report.mismatch.engine_id == "main-1"
    assert [report.mismatch.why] == caplog.messages
    assert [step for step, _ in seen] == [5, 5]
    assert [metrics["logprob_gap/is_mismatch"] for _, metrics in seen] == [0.0, 1.0]
    assert seen[1][1]["logprob_gap/engine/main-1"] > 1 > seen[1][1]["logprob_gap/engine/main-0"]
    assert client.reports[1]["logprob_gaps"] == report.histograms


async def test_a_mismatch_stops_the_loop_if_wanted_and_is_reported_before() -> None:
    async with driving(engines(0.001)) as (driver, client):
        await driver.check_logprobs(FINE, trainer_logprobs(FINE), on_mismatch="raise")
        with pytest.raises(LogprobMismatch, match="engine main-1 with weight version 5"):
            await driver.check_logprobs(FAULTY, trainer_logprobs(FAULTY), on_mismatch="raise")
    assert len(client.reports) == 2


async def test_the_samples_of_a_rollout_are_checked_as_they_come() -> None:
    async with driving(engines(0.001, 0.001)) as (driver, _):
        groups = await driver.rollout(3, prompts(4), group_size=2, sampling=SAMPLING)
        # A fake engine reports -1 for every token.
        report = await driver.check_logprobs(groups, [[-1.0] * 10] * 8, temperature=1.0)
        with pytest.raises(ValueError, match="8 samples"):
            await driver.check_logprobs(groups, [[-1.0] * 10])
        with pytest.raises(ValueError, match="on_mismatch = 'stop'"):
            await driver.check_logprobs(groups, [], on_mismatch="stop")  # type: ignore[arg-type]
    assert set(report.by_engine) == {"fake-0", "fake-1"}
    assert report.mismatch is None
