"""The driver over real engines (embedded) and a router, while weights are pushed."""

from collections.abc import Iterator

import pytest

import rollout
from rollout.core.samples import Sample, all_samples
from rollout.driver.client.session import Session
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.evaluation import EvalDataset
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(240)]
SAMPLING = rollout.SamplingParams(max_new_tokens=48, ignore_eos=True)
SIZES = {"num_groups": 4, "group_size": 2, "sampling": SAMPLING}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rollout.ServerHandle]:
    from rollout.testing.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("modes")
    options = {"max-total-tokens": 8192, "log-level": "warning"}
    group = {"num_engines": 1, "engine": {"kind": "embedded", "options": options}}
    config = rollout.RolloutConfig.from_dict(
        {
            "log_dir": str(folder),
            "servers": {
                "policy": {
                    "model_path": str(make_tiny_model(folder / "model")),
                    "groups": {"main": group},
                }
            },
        }
    )
    with rollout.launch(config) as deployment:
        yield deployment["policy"]


@pytest.fixture(scope="module")
def weights(policy: rollout.ServerHandle, tmp_path_factory: pytest.TempPathFactory):
    from transformers import AutoModelForCausalLM

    from rollout.testing.tiny_model import make_tiny_model

    path = make_tiny_model(tmp_path_factory.mktemp("same") / "model")
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32")


def source() -> PromptData:
    return PromptData([{"input_ids": [5 + i, 7, 11], "number": i} for i in range(200)], seed=1)


def check(samples: list[Sample], length: int = 48) -> None:
    for sample in samples:
        sample.check()
        assert sum(sample.mask) == length
        assert all(logprob <= 0 for logprob in sample.output_logprobs)


@pytest.mark.parametrize("mode", ["sync", "one_ahead", "async"])
def test_pushes_in_between_lose_and_repeat_nothing(policy, weights, mode: str) -> None:
    options = RolloutOptions(mode=mode, over_sampling=2.0, max_version_lag=3)
    seen: list[int] = []
    data = source()
    with rollout.Driver(policy.url, lambda sample: 1.0, max_in_flight=12) as driver:
        for step in range(4):
            groups = driver.rollout(
                step, data, options=options, weight_version=policy.weight_version, **SIZES
            ).result(120)
            check(list(all_samples(groups)))
            seen += [group.metadata["number"] for group in groups]
            policy.push(weights.state_dict()).result(60)
        stream = driver._inner.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
    assert len(seen) == len(set(seen)) == 16


def test_greedy_tokens_are_the_same_across_a_cut(policy) -> None:
    greedy = rollout.SamplingParams(max_new_tokens=48, ignore_eos=True, temperature=0.0)
    sizes = {**SIZES, "sampling": greedy}
    prompts = [rollout.Prompt((5 + i, 7, 11)) for i in range(12)]
    whole: dict[int, list[int]] = {}
    with rollout.Driver(policy.url) as driver:
        for group in driver.rollout(0, prompts, group_size=1, sampling=greedy).result(120):
            whole[group.samples[0].prompt_ids[0]] = group.samples[0].output_ids
        rows = [{"input_ids": list(prompt.ids)} for prompt in prompts]
        data = PromptData(rows, seed=None, num_epochs=1)
        options = RolloutOptions(over_sampling=3.0)
        for step in range(3):
            groups = driver.rollout(step, data, options=options, **sizes).result(120)
            for sample in all_samples(groups):
                assert sample.output_ids == whole[sample.prompt_ids[0]]
    assert len(whole) == 12


async def two_turns(session: Session) -> None:
    await session.generate(rollout.SamplingParams(max_new_tokens=8, ignore_eos=True))
    session.observe([3, 4])
    await session.generate()


def test_turns_and_evaluation_run_on_a_real_engine(policy) -> None:
    hooks = Hooks(generate=two_turns, reward=lambda sample: 0.5)
    prompts = [rollout.Prompt((5 + i, 7)) for i in range(3)]
    with rollout.Driver(policy.url, hooks=hooks) as driver:
        groups = driver.rollout(0, prompts, group_size=2, sampling=SAMPLING).result(60)
        check(list(all_samples(groups)))
        assert {tuple(one.mask[8:10]) for one in all_samples(groups)} == {(0, 0)}
        result = driver.evaluate(1, {"K": EvalDataset(prompts, SAMPLING, num_samples=2)}).result(60)
    assert result.metrics["eval/K"] == 0.5
    versions = result.metrics["eval/K/weight_version/min"], policy.weight_version
    assert versions[0] == versions[1] == result.metrics["eval/K/weight_version/max"]
