"""Sampling masks of embedded engines: over a kill, and in the driver's samples and batches."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout
from rollout.driver import packed
from rollout.driver.data.sample_rows import groups_of, sample_rows
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support.busy_engines import busy_engines

pytest.importorskip("torch")
pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]
PROMPT = [11, 12, 13]
DRAWN = rollout.SamplingParams(
    max_new_tokens=300, temperature=0.8, top_k=9, top_p=0.7, ignore_eos=True, sampling_seed=5
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def policy(model: Path, tmp_path: Path) -> Iterator[ServerHandle]:
    server = {
        "model_path": str(model),
        "agents": {"workers": 0},
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}},
        "health": {"recover": False},  # no engine is starting when the run ends
    }
    config = {"log_dir": str(tmp_path), "servers": {"policy": server}}
    with rollout.launch(rollout.RolloutConfig.from_dict(config)) as deployment:
        yield deployment["policy"]


def test_masks_are_the_same_when_their_engine_is_killed_and_reach_the_driver(
    policy: ServerHandle, model: Path
) -> None:
    import torch

    from rollout.driver.logprobs.token_logprobs import token_logprobs
    from tests.engines.embedded.reference import model as reference
    from tests.support.mask_truth import check_masks

    whole = policy.generate(PROMPT, DRAWN, sampling_mask=True).result(60)
    check_masks(PROMPT, whole, DRAWN, lambda version: model)
    assert policy.generate(PROMPT, DRAWN).result(60).sampling_mask is None

    stream = iter(policy.stream(PROMPT, DRAWN, sampling_mask=True))
    assert any(len(part.output_ids) > 20 for part in stream)
    (busy,) = busy_engines(policy)
    os.kill(busy.pid, signal.SIGKILL)
    *_, reply = stream
    assert reply.num_failovers == 1
    assert (reply.output_ids, reply.sampling_mask) == (whole.output_ids, whole.sampling_mask)

    short = rollout.SamplingParams(max_new_tokens=20, temperature=0.8, top_k=9, ignore_eos=True)
    with rollout.Driver(policy.url, reward=lambda sample: 1.0, sampling_mask=True) as driver:
        prompts = [rollout.Prompt(tuple(PROMPT))]
        groups = driver.rollout(1, prompts, group_size=2, sampling=short).result(60)
    assert groups_of(sample_rows(groups)) == groups
    ends = packed(groups)["sampling_mask_ends"].tolist()
    assert ends == [0] * 3 + [9 * n for n in range(1, 21)] + [180] * 3 + [
        180 + 9 * n for n in range(1, 21)
    ]
    for sample in groups[0]:
        with torch.inference_mode():
            ids = torch.tensor(sample.prompt_ids + sample.output_ids)
            logits = reference(model)(ids[None]).logits[0, len(PROMPT) - 1 : -1]
        settings = {"temperature": 0.8, "sampling_mask": sample.sampling_mask}
        found = token_logprobs(logits, ids[len(PROMPT) :], **settings)
        cut = token_logprobs(logits, ids[len(PROMPT) :], temperature=0.8, top_k=9)
        assert found.tolist() == pytest.approx(cut.tolist(), abs=1e-4)
