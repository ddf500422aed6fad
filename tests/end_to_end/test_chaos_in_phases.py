"""Real engines under load that die, freeze, drop connections or answer 502 in mid-phase.

Every request ends exactly once, the step goes on without the engine, it comes back, and the next
step works.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout.config import RolloutConfig
from rollout.handle import DeploymentHandle, ServerHandle
from rollout.local import launch_local
from tests.support.fault_proxy import FAULTS, ProxiedLauncher
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(240)]
# The request that each phase sends to every engine.
PATHS = {
    "pause": "/pause_generation",
    "flush": "/flush_cache",
    "release": "/release_memory_occupation",
    "resume": "/resume_memory_occupation",
    "update": "/update_weights_from_tensor",
    "verify": "/weights_checker",
    "continue": "/continue_generation",
}
IN_DEFAULT_RUN = ("kill", "release")
CASES = [
    pytest.param(
        fault,
        phase,
        marks=[] if (fault, phase) == IN_DEFAULT_RUN else [pytest.mark.chaos],
        id=f"{fault}-{phase}",
    )
    for phase in PATHS
    for fault in FAULTS
]
NUM_CLIENTS = 4
_BUDGETS = {
    f"{phase}_timeout_s": 8.0
    for phase in ("pause", "flush", "release", "resume", "update", "verify", "continue")
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engines.embedded.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def weights(model_path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model_path / "model.safetensors")


@pytest.fixture(scope="module")
def launcher() -> ProxiedLauncher:
    return ProxiedLauncher()


@pytest.fixture(scope="module")
def deployment(
    model_path: Path, launcher: ProxiedLauncher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    config = RolloutConfig.from_dict(
        {
            "log_dir": str(tmp_path_factory.mktemp("logs")),
            "servers": {
                "policy": {
                    "model_path": str(model_path),
                    "groups": {"main": {"num_engines": 2, "engine": {"cpus": 0.5}}},
                    "lifecycle": _BUDGETS,
                    "health": {"probe_interval_s": 0.5, "max_restarts": 100, "backoff_s": 0.1},
                }
            },
        }
    )
    handle = launch_local(config, launcher=launcher)
    try:
        yield handle
    finally:
        handle.stop()


class Load:
    """Clients that ask one request after the other."""

    def __init__(self, url: str) -> None:
        self.ends: Counter[str] = Counter()
        self.num_asked = 0
        self._url = url
        self._is_over = False

    async def client(self, session: aiohttp.ClientSession) -> None:
        while not self._is_over:
            self.num_asked += 1
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 24}}
            async with session.post(f"{self._url}/generate", json=body) as answer:
                told = await answer.json()
                reason = told["meta_info"]["finish_reason"]["type"] if answer.ok else "error"
                self.ends[f"{answer.status} {reason}"] += 1

    def end(self) -> None:
        self._is_over = True


def serving(policy: ServerHandle) -> list[str]:
    engines = policy.status().result(30).groups[0].engines
    return [one.engine_id for one in engines if one.state == "serving"]


@pytest.mark.parametrize(("fault", "phase"), CASES)
async def test_a_step_goes_on_when_a_real_engine_fails_in_it(
    deployment: DeploymentHandle,
    launcher: ProxiedLauncher,
    weights: dict[str, Any],
    fault: str,
    phase: str,
) -> None:
    policy = deployment["policy"]
    proxy = launcher.proxies["main-1"]
    load = Load(policy.url)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_CLIENTS):
                clients.create_task(load.client(session))
            await asyncio.sleep(0.2)
            proxy.strike(PATHS[phase], fault)
            await policy.offload()
            await policy.onload(weights)
            assert proxy.num_struck == 1
            assert "main-0" in serving(policy)
            load.end()
        # Each was answered, and once: a client asks again only after its answer.
        assert sum(load.ends.values()) == load.num_asked
        assert load.ends["200 length"] > 0
    if len(serving(policy)) < 2:
        await asyncio.to_thread(_wait_until_back, policy)
        await policy.offload()
        await policy.onload(weights)
    assert serving(policy) == ["main-0", "main-1"]


def _wait_until_back(policy: ServerHandle) -> None:
    """Recovery has started it again; it lacks what was pushed."""

    def is_back() -> bool:
        engines = policy.status().result(30).groups[0].engines
        return not any(one.fenced_because for one in engines)

    assert wait_until(is_back, 90)
