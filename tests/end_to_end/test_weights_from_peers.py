"""A killed engine gets the current policy from the engine beside it: no push, no store."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout import RolloutConfig, launch
from rollout.handle import ServerHandle
from rollout.types import EngineStatus
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]
HEALTH = {
    "probe_interval_s": 0.5,
    "probe_timeout_s": 1.0,
    "probes_to_dead": 3,
    "weights_from_peers": True,
}


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    from engines.embedded.tiny import make_tiny_model

    return make_tiny_model(tmp_path / "model", "qwen3_moe")


@pytest.fixture
def weights(model_path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    # Not what engines start from: who answers with these has them from a push, or a peer.
    return {
        name: tensor * 1.5 for name, tensor in load_file(model_path / "model.safetensors").items()
    }


def engines(policy: ServerHandle) -> list[EngineStatus]:
    return list(policy.status().result(30).groups[0].engines)


def greedy(engine: EngineStatus) -> list[int]:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    url = f"{engine.endpoint.url}/generate"
    reply = httpx.post(url, json=body, trust_env=False, timeout=60)
    reply.raise_for_status()
    ids: list[int] = reply.json()["output_ids"]
    return ids


def test_a_killed_engine_serves_again_what_was_pushed_before(
    model_path: Path, weights: dict[str, Any], tmp_path: Path
) -> None:
    settings = {
        "model_path": str(model_path),
        "groups": {"main": {"num_engines": 2, "engine": {"cpus": 0.5}}},
        "health": HEALTH,
    }
    config = RolloutConfig.from_dict(
        {"log_dir": str(tmp_path / "logs"), "servers": {"policy": settings}}
    )
    with launch(config, backend="local") as deployment:
        policy = deployment["policy"]
        at_start = greedy(engines(policy)[0])
        policy.sync_weights(weights).result(60)
        before, other = engines(policy)
        pushed = greedy(other)
        assert pushed != at_start
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)

        def is_back() -> bool:
            now = engines(policy)[0]
            return now.pid != before.pid and now.state == "serving"

        assert wait_until(is_back, 60)
        now = engines(policy)[0]
        assert now.weight_version == policy.weight_version == 1
        assert greedy(now) == pushed
