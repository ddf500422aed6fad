"""An embedded engine that holds what it should not gets no request, whatever version it reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.client import EngineClient
from engines.embedded.tiny import make_tiny_model
from engines.protocol import Endpoint
from rollout import RolloutConfig
from rollout.errors import PhaseFailed
from rollout.handle import ServerHandle
from rollout.local import launch_local

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


class Forgetful(EngineClient):
    """Says that each part of a push was taken, and leaves the first out."""

    num_left_out = 1

    async def update_weights_from_disk(self, *about: Any, **more: Any) -> None:
        if self.num_left_out:
            self.num_left_out -= 1
        else:
            await super().update_weights_from_disk(*about, **more)


@contextmanager
def policy(model: Path, folder: Path, client: type[EngineClient], **more: Any) -> Iterator[Any]:
    server = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"kind": "embedded"}}},
        "health": {"recover": False},
        **more,
    }
    config = {"log_dir": str(folder), "servers": {"policy": server}}

    def connect(endpoint: Endpoint, engine_id: str) -> EngineClient:
        return client(endpoint, engine_id=engine_id)

    with launch_local(RolloutConfig.from_dict(config), connect=connect) as deployment:
        yield deployment["policy"]


def test_the_only_engine_that_took_half_a_push_is_fenced_with_the_first_wrong_tensor(
    model: Path, tmp_path: Path
) -> None:
    weights = {
        "bucket_bytes": 100_000,
        "transport": "shared_memory",
        "shared_memory_path": str(tmp_path),
    }
    with policy(model, tmp_path, Forgetful, weights=weights) as server:
        tensors = load_file(model / "model.safetensors")
        new = {name: torch.randn_like(tensor) for name, tensor in tensors.items()}
        with pytest.raises(PhaseFailed, match=r"tensor '.+' is not what the trainer sent") as told:
            server.sync_weights(new, version=1).result(60)
        assert told.value.phase == "verify"
        (engine,) = server.status().result(30).groups[0].engines
        assert engine.state == "fenced"
        first = engine.fenced_because.split("'")[1]
        assert first in tensors


def step(server: ServerHandle, *, lose: bool = False) -> None:
    """An offload and onload, phase by phase."""
    server.offload().result(60)
    server.onload_weights().result(60)
    if lose:
        (engine,) = server.status().result(30).groups[0].engines
        _reset(engine.endpoint)
    server.verify().result(60)
    server.onload_kv().result(60)
    server.continue_generation().result(60)


def _reset(endpoint: Endpoint) -> None:
    import httpx

    body = {"action": "reset_tensors"}
    reply = httpx.post(f"{endpoint.url}/weights_checker", json=body, trust_env=False)
    assert reply.status_code == 200


def test_a_canary_alone_finds_weights_that_came_back_as_garbage(
    model: Path, tmp_path: Path
) -> None:
    how = {"lifecycle": {"verify_by": "canary"}, "weights": {"update": "frozen"}}
    with policy(model, tmp_path, EngineClient, **how) as server:
        step(server)
        assert server.status().result(30).gate == "open"
        with pytest.raises(PhaseFailed, match=r"canary prompt \d, token \d+ has log-prob") as told:
            step(server, lose=True)
        assert told.value.phase == "continue"
        status = server.status().result(30)
        assert status.gate == "closed"
        assert "when the weights were the same" in status.groups[0].engines[0].fenced_because
