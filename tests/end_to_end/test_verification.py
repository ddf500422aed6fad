"""An embedded engine that holds what it should not gets no request, whatever version it reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engines.http.client import EngineClient
from engines.protocol import Endpoint
from rollout import RolloutConfig
from rollout.core.errors import PhaseFailed
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.tensors import canary_logprobs
from tests.support.engine_keys import Keys

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


class Forgetful:
    """Makes clients that say that each part of a push was taken, and leave some out.

    Attributes:
        num_left_out: parts that are still to be left out.
    """

    def __init__(self, num_left_out: int = 0) -> None:
        self.num_left_out = num_left_out

    def connect(self, endpoint: Endpoint, engine_id: str) -> EngineClient:
        return _Client(self, endpoint, engine_id)


class _Client(EngineClient):
    def __init__(self, forgetful: Forgetful, endpoint: Endpoint, engine_id: str) -> None:
        super().__init__(endpoint, engine_id=engine_id)
        self._forgetful = forgetful

    async def update_weights_from_disk(self, *about: Any, **more: Any) -> None:
        if self._forgetful.num_left_out:
            self._forgetful.num_left_out -= 1
        else:
            await super().update_weights_from_disk(*about, **more)


@contextmanager
def policy(model: Path, folder: Path, forgetful: Forgetful, **more: Any) -> Iterator[ServerHandle]:
    server = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"kind": "embedded"}}},
        "health": {"recover": False},
        **more,
    }
    config = RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": server}})
    with launch_local(config, connect=forgetful.connect) as deployment:
        yield deployment["policy"]


@pytest.mark.slow
def test_the_only_engine_that_took_half_a_push_is_fenced_with_the_first_wrong_tensor(
    model: Path, tmp_path: Path
) -> None:
    weights = {
        "bucket_bytes": 100_000,
        "transport": "shared_memory",
        "shared_memory_path": str(tmp_path),
    }
    with policy(model, tmp_path, Forgetful(1), weights=weights) as server:
        tensors = load_file(model / "model.safetensors")
        new = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
        with pytest.raises(PhaseFailed, match=r"tensor '.+' is not what the trainer sent") as told:
            server.push(new, version=1).result(60)
        assert told.value.phase == "verify"
        (engine,) = server.status().result(30).groups[0].engines
        assert engine.state == "fenced"
        first = engine.fence_reason.split("'")[1]
        assert first in tensors


@pytest.mark.slow
def test_an_engine_in_another_dtype_is_held_against_the_trainers_own_model(
    model: Path, tmp_path: Path
) -> None:
    """No fingerprint can be: the trainer is float32, the engine bfloat16, and alone."""
    other = make_tiny_model(tmp_path / "other", architecture="qwen3", seed=5)
    trainer: Any = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    tensors = load_file(other / "model.safetensors")
    how = {
        "groups": {"main": {"engine": {"kind": "embedded", "options": {"dtype": "bfloat16"}}}},
        "weights": {"bucket_bytes": 100_000, "shared_memory_path": str(tmp_path)},
    }
    forgetful = Forgetful()
    with policy(model, tmp_path, forgetful, **how) as server:
        told = canary_logprobs(trainer, server.checks.canary_prompts)
        server.checks.expect(told)
        server.push(tensors, version=1).result(60)
        server.push(load_file(model / "model.safetensors"), version=2).result(60)
        forgetful.num_left_out = 1
        server.checks.expect(told)
        with pytest.raises(PhaseFailed, match="by the trainer's own model"):
            server.push(tensors, version=3).result(60)


def step(server: ServerHandle, *, lose: bool = False) -> None:
    """An offload and onload, phase by phase."""
    server.offload().result(60)
    server.phases.onload_weights().result(60)
    if lose:
        (engine,) = server.status().result(30).groups[0].engines
        _reset(engine)
    server.phases.verify().result(60)
    server.phases.onload_kv().result(60)
    server.phases.continue_generation().result(60)


def _reset(engine: EngineStatus) -> None:
    import httpx

    body = {"action": "reset_tensors"}
    url = f"{engine.endpoint.url}/weights_checker"
    reply = httpx.post(url, json=body, trust_env=False, auth=Keys(engine))
    assert reply.status_code == 200


@pytest.mark.slow
def test_a_canary_alone_finds_weights_that_came_back_as_garbage(
    model: Path, tmp_path: Path
) -> None:
    how = {"verify": {"by": "canary"}, "weights": {"update": "frozen"}}
    with policy(model, tmp_path, Forgetful(), **how) as server:
        step(server)
        assert server.status().result(30).gate == "open"
        with pytest.raises(PhaseFailed, match=r"canary prompt \d, token \d+ has log-prob") as told:
            step(server, lose=True)
        assert told.value.phase == "continue_generation"
        status = server.status().result(30)
        assert status.gate == "closed"
        assert "when the weights were the same" in status.groups[0].engines[0].fence_reason
