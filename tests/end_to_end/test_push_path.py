"""An embedded engine checks the push path, and finds a name map that exchanges two tensors."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from rollout import PhaseFailed, RolloutConfig
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model

pytestmark = [pytest.mark.embedded, pytest.mark.slow]
KEY, VALUE = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "kv")


def generate(url: str) -> list[int]:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    reply = httpx.post(f"{url}/generate", json=body, timeout=30, trust_env=False)
    ids: list[int] = reply.raise_for_status().json()["output_ids"]
    return ids


def exchanged(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A wrong name map: names and shapes are those of the model."""
    return [({KEY: VALUE, VALUE: KEY}.get(name, name), tensor)]


@pytest.mark.parametrize("transport", ["shared_memory", "by_value"])
def test_a_right_path_is_proved_and_a_wrong_name_map_never_serves(
    transport: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "tiny", architecture="qwen3")
    tensors = load_file(model / "model.safetensors")
    server = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"kind": "embedded"}}},
        "health": {"recover": False},
        "weights": {"transport": transport, "shared_memory_path": str(tmp_path)},
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        before = generate(policy.url)
        policy.checks.push_path(tensors).result(60)
        assert generate(policy.url) == before
        assert policy.status().result(30).weight_version == 1
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        with pytest.raises(PhaseFailed, match="weights differ") as caught:
            policy.checks.push_path(tensors, name_map=exchanged).result(60)
        assert KEY in str(caught.value)
        assert VALUE in str(caught.value)
        status = policy.status().result(30)
        assert status.gate == "closed"
        assert [engine.state for engine in status.groups[0].engines] == ["fenced"]
