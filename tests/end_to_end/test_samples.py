"""Samples of embedded engines through a handle: a killed engine, a push, what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rollout
from rollout.core.errors import GenerationFailed
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support.busy_engines import busy_engines

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]
PROMPT = [11, 12, 13]
GREEDY = rollout.SamplingParams(max_new_tokens=200, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture
def policy(model_path: Path, tmp_path: Path) -> Iterator[ServerHandle]:
    group = {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}
    server = {
        "model_path": str(model_path),
        "groups": {"main": group},
        "health": {"recover": False},  # no engine is starting when the run ends
    }
    config = {"log_dir": str(tmp_path), "servers": {"policy": server}}
    with rollout.launch(rollout.RolloutConfig.from_dict(config)) as deployment:
        yield deployment["policy"]


def test_a_sample_is_the_same_when_its_engine_is_killed(policy: ServerHandle) -> None:
    whole = policy.generate(PROMPT, GREEDY, prompt_logprobs=True).result(60)
    assert whole.input_logprobs is not None
    assert len(whole.input_logprobs) == 2
    stream = iter(policy.stream(PROMPT, GREEDY))
    assert any(len(part.output_ids) > 20 for part in stream)
    (busy,) = busy_engines(policy)
    os.kill(busy.pid, signal.SIGKILL)
    *_, reply = stream
    assert reply.num_failovers == 1
    assert reply.output_ids == whole.output_ids
    assert reply.output_logprobs == pytest.approx(whole.output_logprobs, abs=1e-4)
    assert reply.weight_versions == whole.weight_versions


def test_a_sample_across_a_push_has_a_span_of_each_version(
    policy: ServerHandle, model_path: Path
) -> None:
    weights = load_file(model_path / "model.safetensors")
    stream = iter(policy.stream(PROMPT, GREEDY))
    assert any(len(part.output_ids) > 10 for part in stream)
    policy.push({name: one * 1.1 for name, one in weights.items()}).result(60)
    *_, reply = stream
    first, second = reply.weight_versions
    assert (first.version, second.version) == ("0", "1")
    assert (first.start, first.end, second.end) == (0, second.start, 200)
    assert reply.output_logprobs is not None
    assert len(reply.output_logprobs) == 200


def test_what_the_embedded_engine_cannot_do_is_refused(policy: ServerHandle) -> None:
    with pytest.raises(GenerationFailed, match="min_p is not supported by the embedded engine"):
        policy.generate(PROMPT, rollout.SamplingParams(min_p=0.5)).result(60)
    for options in ({"routed_experts": True}, {"top_logprobs": 2}, {"image_data": "a.png"}):
        with pytest.raises(GenerationFailed, match="is not supported"):
            policy.generate(PROMPT, GREEDY, **options).result(60)  # type: ignore[arg-type]
