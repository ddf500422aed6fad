"""Cached prefixes without the keys of their versions: only the flush keeps old ones out."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import rollout
from rollout.runtime.local import launch_local
from tests.support.models import plain_models
from tests.support.real_policy import Sabotage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_an_engine_that_is_not_flushed_is_fenced_before_the_gate_opens(tmp_path: Path) -> None:
    models = plain_models(tmp_path, 3)
    group = {
        "needs_offload": False,
        "engine": {"kind": "embedded", "options": {"dtype": "float32"}},
    }
    policy = {"model_path": str(models[0]), "groups": {"main": group}, "health": {"recover": False}}
    config = rollout.RolloutConfig.from_dict(
        {"log_dir": str(tmp_path), "servers": {"policy": policy}}
    )
    sabotage = Sabotage(keys=True)
    with launch_local(config, connect=sabotage.connect) as deployment:
        server = deployment["policy"]
        server.push(load_file(models[1] / "model.safetensors")).result(60)
        assert server.status().result(30).gate == "open"
        sabotage.flush = True
        with pytest.raises(
            rollout.PhaseFailed,
            match=r"272 tokens of the sentinel's text prompt came from a cache of the weights "
            r"before \(verify.sentinel\)",
        ):
            server.push(load_file(models[2] / "model.safetensors")).result(60)
        assert server.status().result(30).gate == "closed"
