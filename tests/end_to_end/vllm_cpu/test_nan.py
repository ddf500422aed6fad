"""A real vLLM engine with NaN in its weights: its gate stays closed, and no token is a sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout import GenerationFailed, PhaseFailed, RolloutConfig, SamplingParams, WeightMismatch
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.real_policy import one_engine, push_nonfinite

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
NORM = "model.norm.weight"
SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.0)
PROMPT = [60, 61, 62]


@pytest.fixture(scope="module")
def deployment(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two servers, of which one has no sentinel."""
    server = {
        "model_path": str(models[0]),
        "groups": {"main": one_engine("vllm")},
        "health": {"recover": False},
    }
    servers = {"asked": server, "unasked": server | {"lifecycle": {"sentinel": False}}}
    config = {"log_dir": str(tmp_path_factory.mktemp("logs")), "servers": servers}
    with launch_local(RolloutConfig.from_dict(config)) as launched:
        yield launched


def broken(model: Path) -> dict[str, Any]:
    tensors = load_file(model / "model.safetensors")
    return {**tensors, NORM: torch.full_like(tensors[NORM], torch.nan)}


def test_the_sentinel_fences_an_engine_that_computes_nan(
    deployment: DeploymentHandle, models: list[Path]
) -> None:
    policy = deployment["asked"]
    with pytest.raises(WeightMismatch, match=f"values of tensor '{NORM}' are NaN"):
        policy.serve_weights(broken(models[0]))
    with pytest.raises(PhaseFailed, match="sentinel's text prompt that are not finite numbers"):
        push_nonfinite(policy, broken(models[0]), 1)
    assert policy.status().result(30).gate == "closed"


def test_without_the_sentinel_no_token_of_nan_is_a_sample(
    deployment: DeploymentHandle, models: list[Path]
) -> None:
    policy = deployment["unasked"]
    before = policy.generate(PROMPT, SAMPLING).result(60)
    push_nonfinite(policy, broken(models[0]), 1)
    with pytest.raises(GenerationFailed, match="log-probs that are not numbers"):
        policy.generate(PROMPT, SAMPLING).result(60)
    policy.serve_weights(load_file(models[0] / "model.safetensors")).result(120)
    after = policy.generate(PROMPT, SAMPLING).result(60)
    assert (after.output_ids, after.weight_version) == (before.output_ids, "2")
