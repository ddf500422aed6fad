"""A real SGLang engine with NaN in its weights: it answers 200, and no token of it is a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rollout import GenerationFailed, SamplingParams, WeightMismatch
from rollout.runtime.local import launch_local
from tests.support.real_policy import one_engine, push_nonfinite, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.0)
BODY: dict[str, Any] = {
    "input_ids": [60, 61, 62],
    "sampling_params": {"max_new_tokens": 4, "temperature": 0},
    "return_logprob": True,
}


def test_null_log_probs_are_an_engines_failure(models: list[Path], tmp_path: Path) -> None:
    tensors = load_file(models[0] / "model.safetensors")
    name = "model.norm.weight"
    broken = {**tensors, name: torch.full_like(tensors[name], torch.nan)}
    config = real_config(
        models[0],
        tmp_path,
        {"main": one_engine()},
        health={"recover": False},
        # Either would find it before the gate opens.
        lifecycle={"verify_by": "version", "sentinel": False},
    )
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        before = policy.generate([60, 61, 62], SAMPLING).result(60)
        with pytest.raises(WeightMismatch, match=f"values of tensor '{name}' are NaN"):
            policy.serve_weights(broken)

        push_nonfinite(policy, broken, 1)
        (engine,) = policy.status().result(30).groups[0].engines
        own = httpx.post(f"{engine.endpoint.url}/generate", json=BODY, timeout=60, trust_env=False)
        logprobs = own.raise_for_status().json()["meta_info"]["output_token_logprobs"]
        assert {entry[0] for entry in logprobs} == {None}

        with pytest.raises(GenerationFailed, match="log-probs that are not numbers"):
            policy.generate([60, 61, 62], SAMPLING).result(60)
        policy.serve_weights(tensors, 2).result(120)
        headers = {"x-token-failover": "on"}
        url = f"{policy.url}/generate"
        fine = httpx.post(url, json=BODY, headers=headers, timeout=60, trust_env=False).json()
        assert tuple(fine["output_ids"]) == before.output_ids
        assert fine["meta_info"]["weight_version"] == "2"
