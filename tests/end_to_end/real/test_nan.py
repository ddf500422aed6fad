"""A real engine with NaN in its weights: its gate stays closed, and no token is a sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rollout import GenerationFailed, PhaseFailed, RolloutConfig, SamplingParams, WeightMismatch
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.engine_keys import Keys
from tests.support.kinds import not_for
from tests.support.real_policy import one_engine, push_nonfinite

pytestmark = pytest.mark.timeout(600)
NORM = "model.norm.weight"
PROMPT = [60, 61, 62]
SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.0)
# With NaN, SGLang gives no log-probs, and vLLM gives NaN.
SEEN_BY_THE_SENTINEL = {"sglang": "sentinel", "vllm": "text prompt that are not finite numbers"}
BODY: dict[str, Any] = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": 4, "temperature": 0},
    "return_logprob": True,
}


@pytest.fixture(scope="module")
def deployment(
    kind: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    """Two servers, of which one has no sentinel."""
    server = {
        "model_path": str(models[0]),
        "groups": {"main": one_engine(kind)},
        "health": {"recover": False},
    }
    unasked = server | {"verify": {"by": "version", "sentinel": False}}
    servers = {"asked": server, "unasked": unasked}
    config = {"log_dir": str(tmp_path_factory.mktemp("logs")), "servers": servers}
    with launch_local(RolloutConfig.from_dict(config)) as launched:
        yield launched


def broken(model: Path) -> dict[str, Any]:
    tensors = load_file(model / "model.safetensors")
    return {**tensors, NORM: torch.full_like(tensors[NORM], torch.nan)}


def test_the_sentinel_fences_an_engine_that_computes_nan(
    kind: str, deployment: DeploymentHandle, models: list[Path]
) -> None:
    policy = deployment["asked"]
    with pytest.raises(WeightMismatch, match=f"values of tensor '{NORM}' are NaN"):
        policy.push(broken(models[0]))
    with pytest.raises(PhaseFailed, match=SEEN_BY_THE_SENTINEL[kind]):
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
    policy.push(load_file(models[0] / "model.safetensors")).result(120)
    headers = {"x-token-failover": "on"}
    url = f"{policy.url}/generate"
    after = httpx.post(url, json=BODY, headers=headers, timeout=60, trust_env=False).json()
    assert tuple(after["output_ids"]) == before.output_ids
    assert after["meta_info"]["weight_version"] == "2"


@not_for("vllm")
def test_sglang_itself_answers_200_with_null(
    deployment: DeploymentHandle, models: list[Path]
) -> None:
    policy = deployment["unasked"]
    push_nonfinite(policy, broken(models[0]), 3)
    (engine,) = policy.status().result(30).groups[0].engines
    url = f"{engine.endpoint.url}/generate"
    own = httpx.post(url, json=BODY, timeout=60, trust_env=False, auth=Keys(engine))
    logprobs = own.raise_for_status().json()["meta_info"]["output_token_logprobs"]
    assert {entry[0] for entry in logprobs} == {None}
