"""Every way a push can take, to real engines of two groups, and what is left of it afterwards."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.embedded.tiny import make_tiny_model
from rollout import RolloutConfig, launch
from rollout.handle import DeploymentHandle, ServerHandle
from rollout.weights.tensors import bytes_fingerprint

pytestmark = pytest.mark.embedded
TRANSPORTS = ["tensor", "shared_memory", "distributed", "disk"]
VERSIONS = iter(range(1, 1000))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def deployment(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    group = {"engine": {"kind": "embedded"}}
    config = {
        "log_dir": str(tmp_path_factory.mktemp("logs")),
        "servers": {
            "policy": {
                "model_path": str(model_path),
                "groups": {"shares": group, "keeps": {**group, "needs_offload": False}},
                "health": {"recover": False},
            }
        },
    }
    with launch(RolloutConfig.from_dict(config), backend="local") as deployment:
        yield deployment


@pytest.fixture
def weights(model_path: Path) -> dict[str, torch.Tensor]:
    """New ones, other than any before."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path)
    return {name: torch.randn_like(value) for name, value in model.state_dict().items()}


def with_settings(deployment: DeploymentHandle, shm: Path, **weights: Any) -> ServerHandle:
    """The same server, pushed to in another way."""
    policy = deployment["policy"]
    config = deployment.config.servers["policy"]
    settings = {"bucket_bytes": 100_000, "shared_memory_path": str(shm), **weights}
    changed = config.weights.model_validate({**config.weights.model_dump(), **settings})
    return ServerHandle(
        "policy", config.model_copy(update={"weights": changed}), policy._target, policy._caller
    )


def held(deployment: DeploymentHandle) -> list[dict[str, str]]:
    """Fingerprints of each engine, by its own word."""
    found = []
    for group in deployment["policy"].status().result().groups:
        for engine in group.engines:
            request = urllib.request.Request(
                f"{engine.endpoint.url}/weights_checker", b"{}", {"Content-Type": "text/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                found.append(json.load(response)["ranks"][0]["checksums"])
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_engine_of_every_group_holds_what_was_pushed(
    deployment: DeploymentHandle,
    weights: dict[str, torch.Tensor],
    shm: Path,
    tmp_path: Path,
    transport: str,
    stream: bool,
) -> None:
    disk_path = str(tmp_path / "{version}")
    policy = with_settings(deployment, shm, transport=transport, stream=stream, disk_path=disk_path)
    version = next(VERSIONS)
    report = policy.sync_weights(weights, version=version).result(60)
    assert report.weight_version == version
    one, other = held(deployment)
    assert one == other == {name: bytes_fingerprint(name, weights[name]) for name in one}
    engines = [engine for group in policy.status().result().groups for engine in group.engines]
    assert [engine.weight_version for engine in engines] == [version, version]
    policy.close()
    assert list(shm.iterdir()) == []
