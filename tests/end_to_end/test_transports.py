"""Every transport of a push, to real engines of two groups, and its leftovers afterwards."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.protocol.errors import EngineRejected
from rollout import RolloutConfig, launch
from rollout.core.errors import ConfigError, WeightMismatch, WeightsUnavailable
from rollout.runtime.handle import DeploymentHandle
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.format.manifest import read_checkpoint_manifest
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.broadcast import leave_group
from rollout.weights.routes.shared_memory import ByPath
from rollout.weights.routes.trainer_groups import BroadcastRoot
from rollout.weights.tensors import bytes_fingerprint
from tests.support.engine_keys import client_of, request_to
from tests.support.push_settings import with_settings

pytestmark = pytest.mark.embedded
TRANSPORTS = ["by_value", "shared_memory", "distributed", "disk"]
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


def held(deployment: DeploymentHandle) -> list[dict[str, str]]:
    """Fingerprints of each engine, by its own word."""
    found = []
    for group in deployment["policy"].status().result().groups:
        for engine in group.engines:
            request = request_to(engine, "/weights_checker", b"{}")
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
    report = policy.push(weights, version=version).result(60)
    assert report.weight_version == version
    one, other = held(deployment)
    assert one == other == {name: bytes_fingerprint(name, weights[name]) for name in one}
    engines = [engine for group in policy.status().result().groups for engine in group.engines]
    assert [engine.weight_version for engine in engines] == [version, version]
    policy.close()
    assert list(shm.iterdir()) == []


def test_engines_that_pack_at_each_load_get_all_buckets_in_one(
    deployment: DeploymentHandle,
    weights: dict[str, torch.Tensor],
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    why_loads_cost = "rollout.weights.ranks.trainer_rank.why_loads_cost"
    monkeypatch.setattr(why_loads_cost, lambda kinds, config: "it packs")
    policy = with_settings(deployment, shm, stream=True)
    for _ in range(2):
        policy.push(weights, version=next(VERSIONS)).result(60)
        for engine in held(deployment):
            assert engine == {name: bytes_fingerprint(name, weights[name]) for name in engine}
        files = list(shm.rglob("*.safetensors"))
        assert len(files) > 1
        assert not any(file.is_symlink() for file in files)  # the joined folder is gone
        weights = {name: tensor + 1 for name, tensor in weights.items()}
    assert caplog.text.count("engines load all buckets of a push in one call: it packs") == 1
    policy.close()
    assert list(shm.iterdir()) == []


def test_what_does_not_fit_is_refused_and_the_engines_serve_on(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path
) -> None:
    before = held(deployment)
    policy = with_settings(deployment, shm)
    name = "model.norm.weight"
    for wrong, words in (
        ({**weights, name: weights[name][:-1].clone()}, "has shape"),
        ({**weights, "model.nurm.weight": weights[name].clone()}, "did you mean 'model.norm"),
        ({key: value for key, value in weights.items() if key != name}, "lacks 1 of"),
        ({**weights, name: weights[name].long()}, "is int64"),
    ):
        with pytest.raises(WeightMismatch, match=words):
            policy.push(wrong, version=next(VERSIONS)).result(60)
    assert held(deployment) == before
    assert deployment["policy"].status().result().gate == "open"
    assert list(shm.iterdir()) == []


def test_a_window_pushes_a_copy_that_outlives_the_trainers_tensors(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path
) -> None:
    policy = with_settings(deployment, shm, stream=True)
    wanted = {name: bytes_fingerprint(name, value) for name, value in weights.items()}
    with policy.offloaded() as window:
        window.push(weights, version=next(VERSIONS))
        for value in weights.values():
            value.zero_()
    assert held(deployment) == [{name: wanted[name] for name in one} for one in held(deployment)]
    with pytest.raises(ConfigError, match="reads the tensors while engines load them"):
        with_settings(deployment, shm, transport="distributed").phases.make_push(weights)
    policy.close()


def test_pushes_reuse_the_memory_of_those_before(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path
) -> None:
    policy = with_settings(deployment, shm, transport="shared_memory")
    seen = []
    for _ in range(2):
        policy.push(weights, version=next(VERSIONS)).result(60)
        seen.append(sorted((file.stat().st_ino, file.name) for file in shm.rglob("*.safe*")))
    assert seen[0] == seen[1] != []
    policy.close()


def test_names_of_the_trainers_own_are_mapped(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path
) -> None:
    policy = with_settings(deployment, shm)
    fused = {f"trainer.{name}": value for name, value in weights.items() if "proj" not in name}
    fused |= {"trainer.all": torch.cat([v.view(-1) for n, v in weights.items() if "proj" in n])}

    def name_map(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name != "trainer.all":
            yield name.removeprefix("trainer."), tensor
            return
        for key, value in weights.items():
            if "proj" in key:
                part, tensor = tensor[: value.numel()], tensor[value.numel() :]
                yield key, part.view(value.shape)

    policy.push(fused, version=next(VERSIONS), name_map=name_map).result(60)
    for engine in held(deployment):
        assert engine == {name: bytes_fingerprint(name, weights[name]) for name in engine}
    policy.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_name_map_that_makes_another_type_than_planned_is_refused_and_the_engines_serve_on(
    deployment: DeploymentHandle,
    weights: dict[str, torch.Tensor],
    shm: Path,
    tmp_path: Path,
    transport: str,
) -> None:
    disk_path = str(tmp_path / "{version}")
    policy = with_settings(deployment, shm, transport=transport, disk_path=disk_path)
    policy.push(weights, version=next(VERSIONS)).result(60)
    before, version = held(deployment), policy.status().result().weight_version
    name = "model.norm.weight"

    def name_map(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield key, tensor if key != name or tensor.is_meta else tensor.bfloat16()

    with pytest.raises(WeightMismatch, match=rf"'{name}' is bfloat16 \[64\], not float32 \[64\]"):
        policy.push(weights, version=next(VERSIONS), name_map=name_map).result(60)
    status = policy.status().result()
    assert (held(deployment), status.gate, status.weight_version) == (before, "open", version)
    policy.close()


class ByHand(ByPath):
    """A transport of a user's own: here it only counts, and sends as another does."""

    num_sent = 0

    async def send(self, target: Any, packed: Any, stage: Any) -> None:
        type(self).num_sent += 1
        await super().send(target, packed, stage)


def test_a_carrier_of_ones_own_is_a_transport(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path, model_path: Path
) -> None:
    policy = deployment["policy"]
    manifest = read_checkpoint_manifest(model_path)
    assert manifest is not None
    push = WeightPush(next(VERSIONS), manifest, [{"path": str(model_path)}], ByHand())
    assert policy.push(push).result(60).weight_version == push.version
    assert ByHand.num_sent == 2


# -- broadcasts in which somebody is missing -----------------------------------------------------


async def test_a_missing_peer_frees_the_engine_that_waits_at_the_deadline(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path
) -> None:
    """Alone it would wait for a minute, and SGLang, which has no deadline, for thirty."""
    status = deployment["policy"].status().result()
    engine = client_of(status.groups[0].engines[0])
    root = BroadcastRoot("alone", "gloo", join_timeout_s=1, send_timeout_s=1)
    terms = root.terms(2)
    started = time.monotonic()
    waiting = asyncio.create_task(
        engine.init_weights_update_group(rank_offset=1, group_name="alone", backend="gloo", **terms)
    )
    with pytest.raises(WeightsUnavailable, match=r"not all 2 ranks .* within 1 s"):
        await asyncio.to_thread(root.join)
    with pytest.raises(EngineRejected, match="could not join"):
        await waiting
    assert time.monotonic() - started < 30
    await engine.aclose()
    policy = with_settings(deployment, shm, transport="distributed")
    report = await policy.push(weights, version=next(VERSIONS))
    assert report.phase_s["update_weights"] < 30
    policy.close()


async def test_an_engine_that_does_not_receive_ends_the_broadcast_in_time(
    deployment: DeploymentHandle,
) -> None:
    status = deployment["policy"].status().result()
    engine = client_of(status.groups[0].engines[0])
    root = BroadcastRoot("deaf", "gloo", join_timeout_s=20, send_timeout_s=1)
    terms = root.terms(1)
    joining = asyncio.create_task(
        engine.init_weights_update_group(rank_offset=1, group_name="deaf", backend="gloo", **terms)
    )
    await asyncio.to_thread(root.join)
    await joining
    with pytest.raises(WeightsUnavailable, match="broadcast in deaf failed"):
        # More than sockets take by themselves.
        await asyncio.to_thread(root.send, [torch.zeros(1 << 22)])
    await leave_group(engine, "deaf")  # if it has not left by itself
    await engine.aclose()


def test_a_transaction_over_servers_uses_a_broadcast(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path
) -> None:
    """Its push is made as that of one server: engines load each bucket while the next is made."""
    policy = with_settings(deployment, shm, transport="distributed")
    run = DeploymentHandle(
        deployment.config, {"policy": policy}, deployment._deployment, deployment._loop
    )
    report = run.push({"policy": weights}).result(60)["policy"]
    one, other = held(deployment)
    assert one == other == {name: bytes_fingerprint(name, weights[name]) for name in one}
    assert report.weight_version == policy.weight_version
    policy.close()
