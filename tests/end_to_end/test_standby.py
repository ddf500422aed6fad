"""Real engines with standbys die at random under load, also while the trainer has the memory."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rollout import RolloutConfig, launch
from rollout.core.errors import PhaseFailed
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]
NUM_TOKENS = 24
NUM_CLIENTS = 4


def config(model_path: Path, folder: Path, group: dict[str, Any]) -> RolloutConfig:
    policy = {
        "model_path": str(model_path),
        "groups": {"main": group | {"num_engines": 2, "standby": 1}},
        "router": {"token_failover": "on"},
        "weights": {"store": {"spare_bytes": 0}},
        "health": {
            "probe_interval_s": 0.5,
            "probe_timeout_s": 10.0,
            "backoff_s": 0.1,
            "max_restarts": 1000,
        },
    }
    return RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})


def engines(policy: ServerHandle) -> tuple[EngineStatus, ...]:
    (group,) = policy.status().result(60).groups
    return group.engines


def have_standbys(policy: ServerHandle) -> bool:
    return all((one.state, one.standby) == ("serving", "ready") for one in engines(policy))


def engine_processes(model_path: Path) -> list[psutil.Process]:
    """The first process of each engine over this checkpoint, also of those that sleep."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            parent = process.parent()
            is_guarded = parent is not None and parent.name() == "engine-guard"
            if is_guarded and str(model_path) in process.cmdline():
                found.append(process)
    return found


class Load:
    """Clients that ask one request after the other; what is wrong with an answer is kept."""

    def __init__(self, policy: ServerHandle) -> None:
        self.wrong: list[str] = []
        self.num_answers = 0
        self._policy = policy
        self._published = policy.weight_version
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]

    def has_published(self, version: int) -> None:
        self._published = version

    def _ask(self) -> None:
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True},
        }
        with httpx.Client(trust_env=False, timeout=300) as client:
            while not self._ends.is_set():
                least = self._published
                reply = client.post(f"{self._policy.url}/generate", json=body)
                text, version = reply.text, reply.headers.get("x-weight-version", "-1")
                if reply.status_code != 200 or len(reply.json()["output_ids"]) != NUM_TOKENS:
                    self.wrong.append(f"{reply.status_code}: {text[:300]}")
                elif int(version) < least:
                    self.wrong.append(f"version {version}, asked after {least} was published")
                self.num_answers += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for thread in self._threads:
                thread.join()


def again(command: Callable[[], Any]) -> None:
    """Call it until it succeeds: one in which all engines die fails, and goes on when repeated."""
    deadline = time.monotonic() + 120
    while True:
        try:
            command()
            return
        except PhaseFailed:
            assert time.monotonic() < deadline
            time.sleep(0.5)


def all_serve(policy: ServerHandle) -> bool:
    return all(one.state == "serving" for one in engines(policy))


def kill_at_random(model_path: Path, drawn: random.Random) -> None:
    """Kill an engine, a standby or one that boots."""
    process = drawn.choice(engine_processes(model_path))
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def check(model_path: Path, folder: Path, group: dict[str, Any], backend: str, num: int) -> str:
    from safetensors.torch import load_file

    weights, drawn = load_file(model_path / "model.safetensors"), random.Random(num)
    with launch(config(model_path, folder, group), backend=backend) as deployment:
        policy = deployment["policy"]
        policy.serve_weights(weights).result(120)
        assert wait_until(lambda: have_standbys(policy), 240)
        load = Load(policy)
        with load.running():
            for kill in range(num):
                # If both died before a command, it would close the gate.
                assert wait_until(lambda: all_serve(policy), 120), engines(policy)
                if kill % 3:  # while it serves
                    kill_at_random(model_path, drawn)
                    time.sleep(drawn.uniform(0, 2))
                again(lambda: policy.give_memory().result(120))
                if not kill % 3:
                    kill_at_random(model_path, drawn)
                    time.sleep(drawn.uniform(0, 2))
                version = policy.weight_version + 1
                again(lambda version=version: policy.serve_weights(weights, version).result(120))
                load.has_published(version)
            back = wait_until(lambda: have_standbys(policy), 240)
            assert back, engines(policy)
            asked = load.num_answers
            assert wait_until(lambda: load.num_answers > asked + 2 * NUM_CLIENTS, 60)
        assert not load.wrong, load.wrong[:5]
    assert wait_until(lambda: not engine_processes(model_path), 20)
    return f"{num} kills, {load.num_answers} answers"


@pytest.mark.embedded
@pytest.mark.parametrize(
    ("backend", "num"),
    [
        ("local", 3),
        pytest.param("ray", 1, marks=pytest.mark.ray),
        pytest.param("local", 12, marks=pytest.mark.chaos),
        pytest.param("ray", 6, marks=[pytest.mark.ray, pytest.mark.chaos]),
    ],
)
def test_random_kills_lose_no_request_give_no_old_answer_and_leave_no_process(
    request: pytest.FixtureRequest, tmp_path: Path, backend: str, num: int
) -> None:
    """The long runs: ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_standby.py``."""
    from rollout.testing.tiny_model import make_tiny_model

    if backend == "ray":
        request.getfixturevalue("ray_cluster")
    model_path = make_tiny_model(tmp_path / "model")
    print(check(model_path, tmp_path / "logs", {"engine": {"cpus": 0.5}}, backend, num))
