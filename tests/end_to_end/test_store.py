"""A killed engine comes back with the current policy, from the store, without the trainer."""

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout import RolloutConfig, launch
from rollout.core.errors import LifecycleError
from rollout.core.types import EngineStatus, StoreStatus
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.weights.store.agents import LocalAgents
from rollout.weights.store.node.agent import StoreAgent
from rollout.weights.store.transfer.unit_client import AgentClient
from rollout.weights.store.transfer.unit_server import AgentServer
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", request.param)


@pytest.fixture(scope="module")
def weights(model_path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    # Not what engines start from: who answers with these has them from a push.
    return {
        name: tensor * 1.5 for name, tensor in load_file(model_path / "model.safetensors").items()
    }


@pytest.fixture(scope="module")
def deployment(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    with launched(model_path, tmp_path_factory.mktemp("logs")) as handle:
        yield handle


@contextmanager
def launched(model_path: Path, folder: Path, **weights: Any) -> Iterator[DeploymentHandle]:
    """One engine and a store; both are gone afterwards."""
    health = {"probe_interval_s": 0.5, "probe_timeout_s": 1.0, "probes_to_dead": 3}
    run_id = f"store-{uuid.uuid4().hex[:8]}"
    config = RolloutConfig.from_dict(
        {
            "run_id": run_id,
            "log_dir": str(folder),
            "servers": {
                "policy": {
                    "model_path": str(model_path),
                    "groups": {
                        "main": {"num_engines": 1, "engine": {"kind": "embedded", "cpus": 0.5}}
                    },
                    "health": health,
                    "weights": {"store": {"spare_bytes": 0, "unit_bytes": 20_000}, **weights},
                }
            },
        }
    )
    with launch(config, backend="local") as handle:
        yield handle
    assert not list(Path("/dev/shm").glob(f"rollout-store-*/{run_id}.*"))


def the_engine(policy: ServerHandle) -> EngineStatus:
    return policy.status().result(30).groups[0].engines[0]


def is_back(policy: ServerHandle, before: EngineStatus) -> bool:
    now = the_engine(policy)
    return now.pid != before.pid and now.state == "serving"


def store(policy: ServerHandle) -> StoreStatus:
    found = policy.status().result(30).store
    assert found is not None
    return found


def greedy(policy: ServerHandle) -> list[int]:
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
    }
    reply = httpx.post(f"{policy.url}/generate", json=body, trust_env=False, timeout=60)
    reply.raise_for_status()
    assert reply.headers["x-weight-version"] == str(policy.weight_version)
    ids: list[int] = reply.json()["output_ids"]
    return ids


def test_the_only_engine_is_killed_and_answers_as_before_without_a_push(
    deployment: DeploymentHandle,
    weights: dict[str, Any],
    record_property: Callable[[str, Any], None],
) -> None:
    policy = deployment["policy"]
    at_start = greedy(policy)
    policy.push(weights).result(60)
    assert wait_until(lambda: store(policy).version == policy.weight_version, 20)
    pushed = greedy(policy)
    assert pushed != at_start
    before = the_engine(policy)
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    killed = time.monotonic()
    assert wait_until(lambda: is_back(policy, before), 60)
    record_property("figures", f"serves again after {time.monotonic() - killed:.2f} s")
    assert greedy(policy) == pushed


def test_what_was_pushed_serves_again_after_an_offload_without_the_trainer(
    model_path: Path, weights: dict[str, Any], tmp_path: Path
) -> None:
    with launched(model_path, tmp_path) as deployment:
        policy = deployment["policy"]
        at_start = greedy(policy)
        policy.offload().result(60)
        with pytest.raises(LifecycleError, match=r"keeps nothing, .* engine\.weights_cpu_backup"):
            policy.serve().result(60)
        assert policy.status().result(30).phase == "offloaded"
        policy.push(weights, version=4).result(60)
        pushed = greedy(policy)
        assert pushed != at_start
        for _ in range(2):  # at once: the store may still write it
            policy.offload().result(60)
            report = policy.serve().result(60)
            assert (report.weight_version, policy.weight_version) == (4, 4)
            assert the_engine(policy).is_verified
            assert greedy(policy) == pushed
        with policy.offloaded():
            pass  # a window without a push
        assert greedy(policy) == pushed


def test_what_is_not_pushed_survives_an_offload_and_a_kill_without_the_trainer(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    from rollout.testing.tiny_model import make_tiny_model

    model_path = make_tiny_model(tmp_path / "model", "llama")
    pushed = load_file(model_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    del pushed[name]
    with launched(model_path, tmp_path, not_pushed=["model.layers.0.mlp.up*"]) as deployment:
        policy = deployment["policy"]
        at_start = greedy(policy)
        with policy.offloaded(lambda: pushed):
            pass
        assert greedy(policy) == at_start  # all weights are those of the checkpoint
        assert wait_until(lambda: store(policy).version == policy.weight_version, 20)
        before = the_engine(policy)
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        assert wait_until(lambda: is_back(policy, before), 60)
        assert greedy(policy) == at_start


def test_a_killed_engine_gets_every_bit_from_a_node_that_was_sent_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    from rollout.testing.tiny_model import make_tiny_model
    from tests.support.random_deltas import changed, checksums_of, fingerprints

    servers: list[AgentServer] = []
    agents_here = LocalAgents.agents

    def agents_elsewhere(self: LocalAgents) -> dict[str, Any]:
        found = {}
        for node, agent in agents_here(self).items():
            assert isinstance(agent, StoreAgent)
            servers.append(AgentServer(agent))
            client = AgentClient(node, servers[-1].address, agent.settings.token)
            monkeypatch.setattr(client, "_has_its_files", lambda: False)
            found[node] = client
        return found

    monkeypatch.setattr(LocalAgents, "agents", agents_elsewhere)
    model_path = make_tiny_model(tmp_path / "model", "qwen3")
    weights = load_file(model_path / "model.safetensors")
    settings = {"transport": "by_value", "encoding": "delta", "bucket_bytes": 100_000}
    with launched(model_path, tmp_path, **settings) as deployment:
        policy = deployment["policy"]
        sent = []
        for _ in range(3):
            weights = changed(weights, 0.01)
            policy.push(weights).result(60)
            assert wait_until(lambda: store(policy).version == policy.weight_version, 20)
            sent.append(store(policy).sent_bytes)
        assert max(sent[1:]) < 0.1 * sent[0]
        before = the_engine(policy)
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        assert wait_until(lambda: is_back(policy, before), 60)
        held = checksums_of(the_engine(policy), "embedded")
        assert held == fingerprints(weights, held)
    for server in servers:
        server.close()
