"""The driver over real SGLang, in each of its modes, while weights are pushed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rollout
from rollout.core.samples import Sample, all_samples
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.stream.options import RolloutOptions
from tests.support.load import PROMPTS
from tests.support.real_policy import RealPolicy
from tests.support.referee import Answer, Referee, Span

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

NUM_STEPS = 3
SAMPLING = rollout.SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
MODES = {
    "sync": RolloutOptions(),
    "partial": RolloutOptions(over_sampling=2.5),
    "one_ahead": RolloutOptions(mode="one_ahead", max_version_lag=4),
    "async": RolloutOptions(mode="async", over_sampling=2.0, max_version_lag=4),
}


def answer(sample: Sample) -> Answer:
    return Answer(
        rid=str(sample.metadata.get("number", "")),
        prompt=tuple(sample.prompt_ids),
        output=tuple(sample.output_ids),
        logprobs=tuple(sample.output_logprobs),
        spans=tuple(Span(int(one.version), one.start, one.end) for one in sample.weight_versions),
        kind=sample.status.value,
    )


@pytest.fixture
def driver(policy: RealPolicy) -> Iterator[rollout.Driver]:
    with rollout.Driver(policy.handle.url, lambda sample: 1.0, max_in_flight=16) as driver:
        yield driver


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_loses_and_repeats_nothing(
    policy: RealPolicy, driver: rollout.Driver, mode: str
) -> None:
    rows = [{"input_ids": [*prompt, 10 + i], "number": i} for i, prompt in enumerate(PROMPTS * 8)]
    data, referee = PromptData(rows, seed=1), Referee(policy.weights_of)
    seen: list[int] = []
    for step in range(NUM_STEPS):
        groups = driver.rollout(
            step,
            data,
            options=MODES[mode],
            weight_version=policy.handle.weight_version,
            num_groups=4,
            group_size=2,
            sampling=SAMPLING,
        ).result(120)
        samples = list(all_samples(groups))
        assert len(samples) == 8
        for sample in samples:
            sample.check()
            assert len(sample.output_ids) == SAMPLING.max_new_tokens
        assert not referee.findings([answer(sample) for sample in samples])
        seen += [group.metadata["number"] for group in groups]
        policy.handle.push(policy.next_tensors()).result(120)
    assert len(seen) == len(set(seen)) == 4 * NUM_STEPS
