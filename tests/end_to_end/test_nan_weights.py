"""Weights with NaN over an embedded engine: refused, or, where they are allowed, never a sample."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout import GenerationFailed, RolloutConfig, SamplingParams, WeightMismatch
from rollout.rules import health
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model
from tests.support.real_policy import push_nonfinite

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(240)]
NORM = "model.norm.weight"
SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.0)


def test_nan_is_refused_and_an_engine_that_computes_it_gives_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "REPORTS_TO_DEAD", 100)
    model = make_tiny_model(tmp_path / "tiny", architecture="qwen3")
    tensors = load_file(model / "model.safetensors")
    broken = {**tensors, NORM: torch.full_like(tensors[NORM], torch.nan)}
    server = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"kind": "embedded"}}},
        "weights": {"shared_memory_path": str(tmp_path)},
        "verify": {"sentinel": False},  # it would fence the engine before it serves
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        before = policy.generate([5, 6, 7], SAMPLING).result(60)
        with pytest.raises(WeightMismatch, match=f"64 of 64 values of tensor '{NORM}'"):
            policy.push(broken)
        after = policy.generate([5, 6, 7], SAMPLING).result(60)
        assert (after.output_ids, after.weight_version) == (before.output_ids, "0")

        push_nonfinite(policy, broken, 1)
        with pytest.raises(GenerationFailed, match="logits are not numbers"):
            policy.generate([5, 6, 7], SAMPLING).result(60)
        policy.push(tensors, 2).result(60)
        healed = policy.generate([5, 6, 7], SAMPLING).result(60)
        assert (healed.output_ids, healed.weight_version) == (before.output_ids, "2")
