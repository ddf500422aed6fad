"""What SGLang's log-probs are of: with and without the temperature, always before top-p."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import rollout
from engines.protocol import GenerateReply
from rollout.driver.logprobs.gap_cause import GapCause
from rollout.driver.logprobs.token_logprobs import token_logprobs
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
PROMPT = [11, 12, 13]
SAMPLING = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def handle(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    """A group with SGLang's default, and one with log-probs without the temperature."""
    groups = {
        "default": one_engine(),
        "original": one_engine(env={"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}),
    }
    config = real_config(models[0], tmp_path_factory.mktemp("logprobs"), groups)
    with launch_local(config) as deployment:
        yield deployment["policy"]


@pytest.fixture(scope="module")
def model(models: list[Path]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()


def sampled(handle: ServerHandle, **sampling: Any) -> dict[str, list[rollout.Sample]]:
    """Samples of both engines, by engine."""
    params = rollout.SamplingParams(**SAMPLING, **sampling)
    replies = handle.generate([PROMPT] * 16, params).result(120)
    found: dict[str, list[rollout.Sample]] = {"default-0": [], "original-0": []}
    for reply in replies:
        found[reply.engine_id].append(sample_of(reply))
    assert all(found.values())
    return found


def sample_of(reply: GenerateReply) -> rollout.Sample:
    assert reply.output_logprobs is not None
    return rollout.Sample(
        PROMPT,
        list(reply.output_ids),
        list(reply.output_logprobs),
        weight_versions=reply.weight_versions,
        logprob_kind=reply.logprob_kind,
    )


def trainers(model: Any, samples: list[rollout.Sample], temperature: float) -> list[Any]:
    rows = []
    for sample in samples:
        ids = torch.tensor([[*PROMPT, *sample.output_ids]])
        with torch.no_grad():
            logits = model(ids).logits
        values = token_logprobs(logits[:, :-1], ids[:, 1:], temperature=temperature)
        rows.append(values[0, len(PROMPT) - 1 :])
    return rows


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_they_are_at_the_temperature_or_at_one_and_never_cut(
    handle: ServerHandle, model: Any, top_p: float
) -> None:
    samples = sampled(handle, temperature=0.5, top_p=top_p)
    for engine_id, at in (("default-0", 0.5), ("original-0", 1.0)):
        rows = trainers(model, samples[engine_id], at)
        report = rollout.compare_logprobs(samples[engine_id], rows, temperature=at)
        assert report.mismatch is None
        assert report.overall.largest < 1e-3
    wrong = rollout.compare_logprobs(
        samples["default-0"], trainers(model, samples["default-0"], 1.0)
    )
    assert wrong.mismatch is not None
    assert wrong.mismatch.cause is GapCause.TEMPERATURE


def test_greedy_counts_as_temperature_one(handle: ServerHandle, model: Any) -> None:
    samples = sampled(handle, temperature=0.0)
    for of_engine in samples.values():
        rows = trainers(model, of_engine, 1.0)
        assert rollout.compare_logprobs(of_engine, rows).overall.largest < 1e-3


@pytest.mark.parametrize(
    ("sampling", "default", "original"),
    [
        ({"temperature": 0.5, "top_p": 0.7, "top_k": 5, "min_p": 0.1}, "full", "raw"),
        ({"top_p": 0.5}, "full", "full"),
        ({"repetition_penalty": 2.0}, "cut", "cut"),
        ({"presence_penalty": 1.5}, "cut", "cut"),
        ({"logit_bias": {40: 4.0}}, "cut", "cut"),
    ],
    ids=repr,
)
def test_a_reply_says_of_which_distribution_they_are(
    handle: ServerHandle, model: Any, sampling: dict[str, Any], default: str, original: str
) -> None:
    samples = sampled(handle, **sampling)
    for engine_id, kind in (("default-0", default), ("original-0", original)):
        of_engine = samples[engine_id]
        assert {sample.logprob_kind for sample in of_engine} == {kind}
        temperature = sampling.get("temperature", 1.0)
        rows = trainers(model, of_engine, temperature)
        report = rollout.compare_logprobs(of_engine, rows, temperature=temperature, limit=0.001)
        if kind == "full":
            assert report.overall.largest < 1e-3
        else:
            assert report.mismatch is not None
            cause = GapCause.CUT if kind == "cut" else GapCause.TEMPERATURE
            assert report.mismatch.cause is cause
