"""A real SGLang engine checks the push path, and finds a name map that exchanges two tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rollout
from rollout.runtime.local import launch_local
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
KEY, VALUE = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "kv")


def exchanged(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A wrong name map: nothing but the contents shows it, for SGLang joins the two in one."""
    return [({KEY: VALUE, VALUE: KEY}.get(name, name), tensor)]


def test_a_right_path_is_proved_and_a_wrong_name_map_never_serves(
    models: list[Path], tmp_path: Path
) -> None:
    server: dict[str, Any] = {"health": {"recover": False}}
    config = real_config(models[0], tmp_path, {"main": one_engine()}, **server)
    tensors = load_file(models[0] / "model.safetensors")
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        policy.checks.push_path(tensors).result(200)
        status = policy.status().result(30)
        assert (status.gate, status.weight_version) == ("open", 1)
        with pytest.raises(rollout.LifecycleError, match="hold pushed weights"):
            policy.checks.push_path(tensors).result(30)
        policy.push(tensors).result(200)
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        with pytest.raises(rollout.PhaseFailed, match=r"layers\.0\.self_attn\.qkv_proj"):
            policy.checks.push_path(tensors, name_map=exchanged).result(200)
        status = policy.status().result(30)
        assert status.gate == "closed"
        assert [engine.state for engine in status.groups[0].engines] == ["fenced"]
