"""Deltas to real engines: every bit arrives, and whatever is wrong with one is never served."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engines.http.client import EngineClient
from rollout import RolloutConfig, launch
from rollout.core.errors import RolloutError
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.routes.trainer_groups import BroadcastPush, BroadcastRoot
from rollout.weights.tensors import bytes_fingerprint
from tests.support import random_deltas
from tests.support.delta_faults import REFUSED, Faults
from tests.support.engine_keys import request_to
from tests.support.fault_proxy import ProxiedLauncher
from tests.support.push_settings import with_settings
from tests.support.random_deltas import changed, sent

pytestmark = [pytest.mark.embedded, pytest.mark.slow]
VERSIONS = iter(range(100, 1000))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def launcher() -> ProxiedLauncher:
    return ProxiedLauncher()


@pytest.fixture(scope="module")
def deployment(
    model_path: Path, launcher: ProxiedLauncher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    config = config_of(model_path, tmp_path_factory.mktemp("logs"), {"recover": False})
    with launch_local(config, launcher=launcher) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def recovering(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    health = {"probe_interval_s": 0.5, "max_restarts": 100, "backoff_s": 0.1, "max_backoff_s": 0.5}
    with launch_local(config_of(model_path, tmp_path_factory.mktemp("logs"), health)) as deployment:
        yield deployment


def config_of(model_path: Path, log_dir: Path, health: dict[str, Any]) -> RolloutConfig:
    group = {"engine": {"kind": "embedded"}, "needs_offload": False}
    groups = {"one": group, "other": group}
    server = {"model_path": str(model_path), "groups": groups, "health": health}
    return RolloutConfig.from_dict({"log_dir": str(log_dir), "servers": {"policy": server}})


@pytest.fixture
def weights(model_path: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(model_path)
    return {name: torch.randn_like(value) for name, value in model.state_dict().items()}


def engines(deployment: DeploymentHandle) -> list[Any]:
    groups = deployment["policy"].status().result().groups
    return [engine for group in groups for engine in group.engines]


def asked(engine: Any, path: str, body: Any) -> Any:
    request = request_to(engine, path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def assert_held(deployment: DeploymentHandle, weights: dict[str, torch.Tensor]) -> None:
    """Every engine has exactly these bits, by its own word."""
    for engine in engines(deployment):
        checksums = asked(engine, "/weights_checker", {})["ranks"][0]["checksums"]
        assert checksums == {name: bytes_fingerprint(name, weights[name]) for name in checksums}


@pytest.mark.parametrize("stream", [False, True], ids=["copied", "streamed"])
@pytest.mark.parametrize("transport", ["by_value", "shared_memory", "distributed", "disk"])
def test_what_has_changed_is_sent_and_every_engine_holds_every_bit(
    deployment: DeploymentHandle,
    weights: dict[str, torch.Tensor],
    shm: Path,
    tmp_path: Path,
    transport: str,
    stream: bool,
) -> None:
    settings = {"stream": stream, "disk_path": str(tmp_path / "disk" / "{version}")}
    policy = with_settings(deployment, shm, transport=transport, encoding="delta", **settings)
    first = next(VERSIONS)
    whole = sent(policy.push(weights, version=first).result(60))
    assert whole.route == transport
    assert whole.density is None
    for share in (0.01, 0.0, 0.9, 0.02):
        weights = changed(weights, share)
        report = policy.push(weights, version=next(VERSIONS)).result(60)
        assert_held(deployment, weights)
        stage = sent(report)
        assert stage.route == f"{transport} delta"
        assert 0 < report.paused_s <= sum(report.phase_s.values()) + 1
        assert stage.density == pytest.approx(share, abs=0.01)
        assert stage.num_bytes < whole.num_bytes * 1.01
        if share < 0.1:
            assert stage.num_bytes < whole.num_bytes / 10
    policy.close()
    assert list(shm.iterdir()) == []
    if transport == "disk":  # the checkpoint of the first
        assert [file.name for file in (tmp_path / "disk").iterdir()] == [str(first)]


def test_auto_sends_whole_tensors_after_a_push_that_changed_most(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path
) -> None:
    policy = with_settings(deployment, shm, transport="by_value", encoding="auto")
    routes = []
    for share in (0.01, 0.01, 0.9, 0.01):
        weights = changed(weights, share)
        report = policy.push(weights, version=next(VERSIONS)).result(60)
        routes.append(sent(report).route)
        assert_held(deployment, weights)
    assert routes == ["by_value", "by_value delta", "by_value delta", "by_value"]


def test_engines_that_hold_the_push_of_another_trainer_get_whole_tensors(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor], shm: Path
) -> None:
    one = with_settings(deployment, shm, transport="by_value", encoding="delta")
    other = with_settings(deployment, shm, transport="by_value", encoding="delta")
    routes = []
    for policy in (one, one, other, one, one):
        weights = changed(weights, 0.01)
        report = policy.push(weights, version=next(VERSIONS)).result(60)
        routes.append(sent(report).route.removeprefix("by_value").strip())
        assert_held(deployment, weights)
    assert routes == ["", "delta", "", "", "delta"]


@pytest.mark.parametrize("has_backup", [False, True])
def test_after_an_offload_a_delta_needs_weights_that_survived_it(
    model_path: Path, weights: dict[str, torch.Tensor], tmp_path: Path, has_backup: bool
) -> None:
    engine = {"kind": "embedded", "weights_cpu_backup": has_backup}
    server = {
        "model_path": str(model_path),
        "groups": {"main": {"engine": engine}},
        "weights": {"transport": "by_value", "encoding": "delta"},
        "health": {"recover": False},
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    with launch(config, backend="local") as deployment:
        policy = deployment["policy"]
        routes = []
        for _ in range(3):
            with policy.offloaded() as window:
                weights = changed(weights, 0.01)
                window.push(weights)
            routes.append(sent(window.report).route)
            assert window.report.paused_s > 0
            assert_held(deployment, weights)
    assert routes == (
        ["by_value", "by_value delta", "by_value delta"] if has_backup else ["by_value"] * 3
    )


def test_deltas_of_experts_and_of_tied_weights_arrive_with_no_wrong_bit(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "moe", architecture="qwen3_moe", tie_embeddings=True)
    server = {
        "model_path": str(path),
        "groups": {"main": {"engine": {"kind": "embedded"}, "needs_offload": False}},
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    tensors = load_file(path / "model.safetensors")
    assert any(".experts.0." in name for name in tensors)
    assert "lm_head.weight" not in tensors
    with launch_local(config) as deployment:
        handle = random_deltas.pushed_by_deltas(deployment["policy"])
        random_deltas.check(handle, tensors, lambda now: assert_held(deployment, now), 150)


def test_random_deltas_arrive_with_no_wrong_bit(
    deployment: DeploymentHandle, weights: dict[str, torch.Tensor]
) -> None:
    handle = random_deltas.pushed_by_deltas(deployment["policy"])
    first = dict(weights)
    num = random_deltas.check(handle, first, lambda now: assert_held(deployment, now))
    assert num >= random_deltas.NUM


# -- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "nth"), [("lose", 2), pytest.param("drop", 1, marks=pytest.mark.chaos)]
)
def test_a_broadcast_that_one_engine_is_not_asked_for_ends_in_time_and_is_not_served(
    deployment: DeploymentHandle,
    launcher: ProxiedLauncher,
    weights: dict[str, torch.Tensor],
    shm: Path,
    fault: str,
    nth: int,
) -> None:
    """The request is lost whole, in the middle of a push, or at its begin with its connection.

    ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_delta_pushes.py``
    """
    settings = {"transport": "distributed", "encoding": "delta", "group_timeout_s": 8}
    policy = with_settings(deployment, shm, **settings)
    policy.push(weights).result(60)
    weights = changed(weights, 0.01)
    proxy = launcher.proxies["one-0"]
    num_struck = proxy.num_struck
    proxy.strike("/update_weights_from_distributed", fault, nth)
    with pytest.raises(RolloutError, match=r"broadcast in .* failed"):
        policy.push(weights).result(60)
    assert proxy.num_struck == num_struck + 1
    assert policy.status().result(30).gate != "open"
    assert not any(engine.is_verified for engine in engines(deployment))
    report = policy.push(weights).result(60)
    assert sent(report).route == "distributed"
    assert_held(deployment, weights)
    weights = changed(weights, 0.01)
    report = policy.push(weights).result(60)
    assert sent(report).route == "distributed delta"
    assert_held(deployment, weights)
    policy.close()


def faulty(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    for name in ("update_weights_from_tensor", "update_weights_from_disk"):
        around = faults.around(getattr(EngineClient, name))
        monkeypatch.setattr(EngineClient, name, around)
    monkeypatch.setattr(BroadcastRoot, "send", faults.around_send(BroadcastRoot.send))
    monkeypatch.setattr(BroadcastPush, "parts", faults.around_parts(BroadcastPush.parts))
    return faults


FAULTS = [
    ("by_value", fault) for fault in (*REFUSED, "lost", "killed", "another content of the base")
]
FAULTS += [("disk", fault) for fault in ("flipped", "cut", "lost")]
FAULTS += [("distributed", fault) for fault in ("flipped", "lost")]


@pytest.mark.parametrize(("transport", "fault"), FAULTS)
def test_a_wrong_delta_is_refused_or_fenced_and_whole_tensors_follow(
    recovering: DeploymentHandle,
    weights: dict[str, torch.Tensor],
    shm: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    fault: str,
) -> None:
    faults = faulty(monkeypatch)
    settings = {"encoding": "delta", "disk_path": str(tmp_path / "disk" / "{version}")}
    policy = with_settings(recovering, shm, transport=transport, **settings)
    policy.push(weights, version=next(VERSIONS)).result(60)
    weights = changed(weights, 0.01)
    faults.fault, faults.engines, version = fault, engines(recovering), next(VERSIONS)
    with pytest.raises(RolloutError) as told:
        policy.push(weights, version=version).result(60)
    assert faults.num_done
    is_refused = "nothing was updated" in str(told.value) or "payload" in str(told.value)
    assert is_refused is (fault in REFUSED), told.value
    status = policy.status().result(30)
    assert status.gate != "open"
    assert f"weight_version={version}, is_verified=True" not in str(status)
    faults.fault = ""
    weights = changed(weights, 0.01)
    report = policy.push(weights, version=next(VERSIONS)).result(60)
    assert sent(report).route == transport
    assert_held(recovering, weights)
    weights = changed(weights, 0.01)
    report = policy.push(weights, version=next(VERSIONS)).result(60)
    assert sent(report).route == f"{transport} delta"
    assert_held(recovering, weights)
    policy.close()


def test_a_delta_that_comes_twice_changes_nothing_more(
    deployment: DeploymentHandle,
    weights: dict[str, torch.Tensor],
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = faulty(monkeypatch)
    policy = with_settings(deployment, shm, transport="by_value", encoding="delta")
    policy.push(weights, version=next(VERSIONS)).result(60)
    faults.fault = "repeated"
    weights = changed(weights, 0.01)
    policy.push(weights, version=next(VERSIONS)).result(60)
    assert faults.num_done > 1
    assert_held(deployment, weights)
    policy.close()
