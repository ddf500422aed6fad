"""Routed experts of embedded engines with a mixture: over a kill, and in the driver's samples."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

import rollout
from rollout.driver import padded
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support.busy_engines import busy_engines

pytest.importorskip("torch")
pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]
PROMPT = [11, 12, 13]
NUM_LAYERS, PER_TOKEN = 2, 2
GREEDY = rollout.SamplingParams(max_new_tokens=300, temperature=0.0, ignore_eos=True)


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[ServerHandle]:
    model = make_tiny_model(tmp_path / "moe", architecture="qwen3_moe", num_layers=NUM_LAYERS)
    group = {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}
    server = {
        "model_path": str(model),
        "groups": {"main": group},
        "health": {"recover": False},  # no engine is starting when the run ends
    }
    config = {"log_dir": str(tmp_path), "servers": {"policy": server}}
    with rollout.launch(rollout.RolloutConfig.from_dict(config)) as deployment:
        yield deployment["policy"]


def test_experts_are_the_same_when_their_engine_is_killed_and_reach_the_driver(
    policy: ServerHandle,
) -> None:
    whole = policy.generate(PROMPT, GREEDY, routed_experts=True).result(60)
    assert whole.routed_experts is not None
    assert len(whole.routed_experts) == 4 * NUM_LAYERS * PER_TOKEN * (3 + 300 - 1)
    short = rollout.SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    with rollout.Driver(policy.url, reward=lambda sample: 1.0, routed_experts=True) as driver:
        prompts = [rollout.Prompt(tuple(PROMPT))]
        (group,) = driver.rollout(1, prompts, group_size=2, sampling=short).result(60)
    row = 4 * NUM_LAYERS * PER_TOKEN
    for sample in group:
        assert sample.routed_experts == whole.routed_experts[: row * (3 + 20 - 1)]
    batch = padded([group])["routed_experts"]
    assert batch.shape == (2, 3 + 20, NUM_LAYERS * PER_TOKEN)
    assert batch[1, :-1].tobytes() == whole.routed_experts[: row * (3 + 20 - 1)]
    assert (batch[:, -1] == -1).all()
    check_session(policy)
    stream = iter(policy.stream(PROMPT, GREEDY, routed_experts=True))
    assert any(len(part.output_ids) > 20 for part in stream)
    (busy,) = busy_engines(policy)
    os.kill(busy.pid, signal.SIGKILL)
    *_, reply = stream
    assert reply.num_failovers == 1
    assert reply.output_ids == whole.output_ids
    assert reply.routed_experts == whole.routed_experts


def check_session(policy: ServerHandle) -> None:
    """A branch of two turns has the experts of all of its tokens but the last."""
    options = {"temperature": 0, "max_tokens": 12, "model": "policy"}
    extra = {"return_routed_experts": True}
    with policy.session() as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
        history = [{"role": "user", "content": "one"}]
        for _ in range(2):
            reply = client.chat.completions.create(messages=history, extra_body=extra, **options)
            history += [reply.choices[0].message, {"role": "user", "content": "two"}]
        (sample,) = session.samples().result(60)
    ids = sample.prompt_ids + sample.output_ids
    one_more = rollout.SamplingParams(max_new_tokens=1)
    replayed = policy.generate(ids[:-1], one_more, routed_experts=True).result(60)
    assert sample.routed_experts == replayed.routed_experts
