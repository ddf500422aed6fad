"""Real engines that die or freeze in mid-rollout: the rest serve, and they come back."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout import RolloutConfig, launch
from rollout.core.types import EngineStatus
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from tests.support.processes import wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(120)]
HEALTH = {"probe_interval_s": 0.5, "probe_timeout_s": 1.0, "probes_to_dead": 3}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout.testing.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def weights(model_path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(model_path / "model.safetensors")


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    config = RolloutConfig.from_dict(
        {
            "log_dir": str(tmp_path_factory.mktemp("logs")),
            "servers": {
                "policy": {
                    "model_path": str(model_path),
                    "groups": {
                        "main": {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}
                    },
                    "health": HEALTH,
                }
            },
        }
    )
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with launch(config, backend=request.param) as handle:
        yield handle


on_either = pytest.mark.parametrize(
    "deployment",
    ["local", pytest.param("ray", marks=pytest.mark.ray)],
    indirect=True,
)
on_this_machine = pytest.mark.parametrize("deployment", ["local"], indirect=True)


@pytest.fixture
def policy(deployment: DeploymentHandle) -> ServerHandle:
    return deployment["policy"]


def engine(policy: ServerHandle, engine_id: str) -> EngineStatus:
    (group,) = policy.status().result(30).groups
    return next(one for one in group.engines if one.engine_id == engine_id)


def routed(policy: ServerHandle, engine_id: str) -> str:
    """The engine's state as the router has it."""
    engines = httpx.get(f"{policy.url}/engines", trust_env=False).json()["engines"]
    return next(one["state"] for one in engines if one["engine_id"] == engine_id)


class Load:
    """Requests one after another, until stopped: which engine replied, at which version."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ends = threading.Event()
        self.answers: list[tuple[int, str, str]] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]

    def _run(self) -> None:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}
        with httpx.Client(trust_env=False, timeout=60) as client:
            while not self._ends.is_set():
                reply = client.post(f"{self._url}/generate", json=body)
                told = reply.headers
                self.answers.append(
                    (reply.status_code, told.get("x-engine-id", ""), told.get("x-weight-version"))
                )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def load_on(policy: ServerHandle) -> Iterator[Load]:
    load = Load(policy.url)
    load.start()
    try:
        assert wait_until(lambda: len(load.answers) > 10, 20)
        yield load
    finally:
        load.end()


def seconds_until(is_so: Callable[[], bool], timeout_s: float) -> float:
    started = time.monotonic()
    assert wait_until(is_so, timeout_s)
    return time.monotonic() - started


@on_either
def test_an_engine_that_is_killed_in_mid_rollout_comes_back_and_joins_after_the_next_push(
    policy: ServerHandle, weights: dict[str, Any], record_property: Callable[[str, Any], None]
) -> None:
    policy.push(weights).result(60)
    version = policy.weight_version
    before = engine(policy, "main-0")
    assert before.pid is not None
    with load_on(policy) as load:
        os.kill(before.pid, signal.SIGKILL)
        detect_s = seconds_until(lambda: routed(policy, "main-0") != "serving", 10)
        out_since = len(load.answers)
        restart_s = seconds_until(lambda: engine(policy, "main-0").is_stale, 60)
        time_served = load.answers[out_since:]
    assert engine(policy, "main-0").pid != before.pid
    assert {who for status, who, _ in time_served if status == 200} <= {"main-1"}
    # Only what was on it when it died may have failed.
    assert Counter(status for status, _, _ in load.answers)[502] <= 3
    assert {status for status, _, _ in load.answers} <= {200, 502}
    assert routed(policy, "main-0") == "fenced"

    started = time.monotonic()
    policy.push(weights).result(60)
    rejoin_s = time.monotonic() - started
    assert routed(policy, "main-0") == "serving"
    with load_on(policy) as load:
        assert wait_until(lambda: any(who == "main-0" for _, who, _ in load.answers), 20)
    assert {(status, at) for status, _, at in load.answers} == {(200, str(version + 1))}
    told = f"detect {detect_s:.2f} s, restart {restart_s:.2f} s, rejoin {rejoin_s:.2f} s"
    record_property("figures", told)
    print(told)


@on_this_machine
def test_an_engine_that_is_frozen_is_found_killed_and_replaced(
    policy: ServerHandle, weights: dict[str, Any], record_property: Callable[[str, Any], None]
) -> None:
    before = engine(policy, "main-1")
    assert before.pid is not None
    os.kill(before.pid, signal.SIGSTOP)
    try:
        detect_s = seconds_until(lambda: routed(policy, "main-1") != "serving", 20)
        restart_s = seconds_until(lambda: engine(policy, "main-1").is_stale, 60)
    finally:
        with suppress(ProcessLookupError):
            os.kill(before.pid, signal.SIGCONT)
    assert routed(policy, "main-0") == "serving"
    with pytest.raises(ProcessLookupError):
        os.kill(before.pid, 0)
    policy.offload().result(60)
    policy.push(weights).result(60)
    assert routed(policy, "main-1") == "serving"
    assert engine(policy, "main-1").weight_version == policy.weight_version
    told = f"detect {detect_s:.2f} s, restart {restart_s:.2f} s"
    record_property("figures", told)
    print(told)
