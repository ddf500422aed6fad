"""Kills around real engines: driver and guards, and the actors that control them under Ray."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engines.process.engine_records import clear_crashed
from engines.process.guard import RECORD, TOKEN_VARIABLE, folder_path
from rollout.runtime.handle import ServerHandle
from tests.support.contract import CPU_OPTIONS
from tests.support.processes import Program, kill_listener, program, shared_memory_of, wait_until
from tests.support.ray_worlds import RayWorld, set_up_ray
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

START_S = 180
DRIVER = """
import json, sys, threading
import rollout

config = rollout.RolloutConfig.from_dict(json.loads(sys.argv[1]))
policy = rollout.launch(config, backend=sys.argv[2])["policy"]
if sys.argv[3] == "offloaded":
    policy.offload().result()
print("reached", flush=True)
threading.Event().wait()
"""


def group(kind: str) -> dict[str, Any]:
    if kind == "sglang":
        return one_engine() | {"needs_offload": True}
    engine = {"kind": kind, "options": CPU_OPTIONS[kind]}
    return {"num_engines": 1, "needs_offload": True, "engine": engine}


def engines_of(driver: Program) -> list[psutil.Process]:
    """The main process of each engine: the child of a guard."""
    found = []
    for pid in driver.descendants():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if psutil.Process(process.ppid()).name() == "engine-guard":
                found.append(process)
    return found


def files_of(engine: psutil.Process) -> set[Path]:
    record = Path(folder_path(engine.environ()[TOKEN_VARIABLE]), RECORD)
    return {record, *shared_memory_of(engine.pid)}


def kill_with_guards(driver: Program, engines: list[psutil.Process]) -> None:
    """A guard that is stopped does not see the driver end."""
    guards = [psutil.Process(engine.ppid()) for engine in engines]
    for guard in guards:
        guard.suspend()
    driver.process.kill()
    driver.process.wait(10)
    for guard in guards:
        guard.kill()


@contextmanager
def short_folder() -> Iterator[str]:
    """Ray makes sockets in it, and their paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="rr", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.parametrize("phase", ["serving", "offloaded"])
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("embedded", marks=pytest.mark.embedded),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def test_nothing_of_an_engine_remains_after_its_driver_and_guard_were_killed(
    kind: str,
    backend: str,
    phase: str,
    models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = real_config(models[0], tmp_path, {"main": group(kind)}).model_dump(mode="json")
    with short_folder() as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        set_up_ray(monkeypatch)
        with program("-c", DRIVER, json.dumps(config), backend, phase) as driver:
            driver.wait_for("reached", START_S)
            (engine,) = engines_of(driver)
            files = files_of(engine)
            assert kind != "sglang" or any("sglang_loads" in file.name for file in files)
            kill_with_guards(driver, [engine])

            def is_clear() -> bool:
                clear_crashed()  # as each launch does
                return not (driver.descendants() or any(file.exists() for file in files))

            assert wait_until(is_clear, 60), (driver.descendants(), files)


class Client:
    """Asks without a pause, in a thread, and keeps the last status."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses: list[int] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join(60)

    def _ask(self) -> None:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        while not self._ends.wait(0.02):
            try:
                reply = httpx.post(f"{self.url}/generate", json=body, timeout=60, trust_env=False)
                self.statuses.append(reply.status_code)
            except httpx.TransportError:
                self.statuses.append(0)

    def serves_again(self) -> bool:
        """Whether the next replies are good ones."""
        begun = len(self.statuses)
        wait_until(lambda: len(self.statuses) >= begun + 3, 60)
        return self.statuses[begun:][:3] == [200] * 3


def pids(policy: ServerHandle) -> set[int | None]:
    return {one.pid for one in policy.status().result(30).groups[0].engines}


def are_well(policy: ServerHandle) -> bool:
    engines = policy.status().result(30).groups[0].engines
    return not any(one.fence_reason or one.is_stale for one in engines)


@pytest.mark.sglang
@pytest.mark.ray
def test_real_engines_outlive_the_router_and_the_group_that_are_killed_while_they_serve(
    ray_cluster: RayWorld, models: list[Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    health = {"probe_interval_s": 0.5, "probe_timeout_s": 5.0, "backoff_s": 0.2}
    config = real_config(models[0], tmp_path, {"main": group("sglang")}, health=health)
    handle = ray_cluster.load("launch").launch_ray(config)
    try:
        policy = handle["policy"]
        before = pids(policy)
        with Client(policy.url) as client:
            for version, actor in enumerate(("RouterActor", "ServerGroupActor"), start=1):
                assert wait_until(client.serves_again, 60)
                if actor == "RouterActor":
                    kill_listener(policy.url)
                else:
                    ray_cluster.crash_newest(actor)
                assert wait_until(
                    lambda actor=actor: actor in ray_cluster.live_actors() and are_well(policy), 60
                ), policy.status().result(30)
                assert wait_until(client.serves_again, 60), client.statuses[-20:]
                assert pids(policy) == before
                policy.offload().result(60)
                policy.push(load_file(models[version % 2] / "model.safetensors")).result(60)
                assert policy.weight_version == version
            assert wait_until(client.serves_again, 60)
        assert all(psutil.pid_exists(pid) for pid in before if pid)
        files = {file for pid in before if pid for file in shared_memory_of(pid)}
    finally:
        handle.stop()
    assert not [file for file in files if file.exists()]
