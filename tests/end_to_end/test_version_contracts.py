"""Weight versions that a caller wants, of embedded engines that get pushes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rollout
from rollout.core.samples import all_samples
from rollout.driver.evaluation import EvalDataset
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support.busy_engines import busy_engines
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(180)]
PROMPT = [11, 12, 13]
SHORT = rollout.SamplingParams(max_new_tokens=4, ignore_eos=True)
LONG = rollout.SamplingParams(max_new_tokens=300, ignore_eos=True)
END_S = 60.0


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture
def policy(
    model_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[ServerHandle]:
    group = {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}
    server: dict[str, Any] = {"model_path": str(model_path), "groups": {"main": group}}
    server["lifecycle"] = {"drain": getattr(request, "param", "abort")}
    config = {"log_dir": str(tmp_path), "servers": {"policy": server}}
    with rollout.launch(rollout.RolloutConfig.from_dict(config)) as deployment:
        yield deployment["policy"]


@pytest.fixture
def push(policy: ServerHandle, model_path: Path) -> Callable[[], Any]:
    weights = load_file(model_path / "model.safetensors")
    scales = iter(range(2, 100))

    def push() -> None:
        scale = 1.0 + next(scales) / 100
        policy.push({name: one * scale for name, one in weights.items()}).result(END_S)

    return push


def until_busy(policy: ServerHandle) -> None:
    assert wait_until(lambda: bool(busy_engines(policy)), END_S)


def versions(*replies: rollout.GenerateReply) -> set[str]:
    return {span.version for reply in replies for span in reply.weight_versions}


def test_a_version_is_had_waited_for_or_refused_with_the_one_that_could_be_had(
    policy: ServerHandle, push: Callable[[], Any]
) -> None:
    assert versions(policy.generate(PROMPT, SHORT, weight_version=0).result(END_S)) == {"0"}
    awaited = policy.generate([PROMPT] * 2, SHORT, min_weight_version=1)
    push()
    assert versions(*awaited.result(END_S)) == {"1"}
    with pytest.raises(rollout.VersionUnavailable) as past:
        policy.generate([PROMPT] * 2, SHORT, weight_version=0).result(END_S)
    assert (past.value.weight_version, list(past.value.failures)) == (1, [0, 1])


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"weight_version": 0}, None),
        ({"max_version_lag": 0}, {"1"}),
        ({"max_version_lag": 1}, {"0", "1"}),
        ({"min_weight_version": 0}, {"0", "1"}),
    ],
)
def test_a_push_during_a_reply_leaves_no_token_that_is_not_wanted(
    policy: ServerHandle, push: Callable[[], Any], options: Any, found: set[str] | None
) -> None:
    # One shows that the other, which begins with it, has tokens.
    shown = iter(policy.stream(PROMPT, LONG))
    reply = policy.generate(PROMPT, LONG, **options)
    assert any(len(part.output_ids) > 20 for part in shown)
    push()
    if found is None:
        with pytest.raises(rollout.VersionUnavailable) as moved:
            reply.result(END_S)
        assert moved.value.weight_version == 1
        return
    whole = reply.result(END_S)
    assert (versions(whole), len(whole.output_ids)) == (found, 300)


def test_a_stream_ends_where_its_version_does(
    policy: ServerHandle, push: Callable[[], Any]
) -> None:
    parts = iter(policy.stream(PROMPT, LONG, weight_version=0))
    assert any(len(part.output_ids) > 20 for part in parts)
    push()
    with pytest.raises(rollout.VersionUnavailable):
        assert {"0"} == versions(*parts)


@pytest.mark.parametrize("policy", ["abort", "retract"], indirect=True)
def test_an_evaluation_and_a_batch_during_pushes(
    policy: ServerHandle, push: Callable[[], Any]
) -> None:
    with rollout.Driver(policy.url, lambda sample: 1.0) as driver:
        prompts = [rollout.Prompt(tuple(PROMPT))] * 4
        started = driver.evaluate(0, {"K": EvalDataset(prompts, LONG)})
        until_busy(policy)
        push()
        result = started.result(END_S)
        of_eval = {v for one in all_samples(result.groups["K"]) for v in one.versions}
        assert of_eval == {1}
        options = rollout.RolloutOptions(max_version_lag=0)
        call = driver.rollout(1, prompts, group_size=2, sampling=LONG, options=options)
        until_busy(policy)
        push()
        samples = list(all_samples(call.result(END_S)))
        assert {version for sample in samples for version in sample.versions} == {2}
        assert {sample.logprob_kind for sample in samples} == {"full"}
