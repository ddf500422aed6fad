"""Our own processes are killed over Ray, in each phase, and the run goes on.

The engines stay, but that of a killed engine actor: it ends, and comes back.

An engine that is stopped (SIGSTOP) holds a command under way until an actor is killed.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engines.process.guard import RECORD, TOKEN_VARIABLE, folder_path
from rollout import RolloutConfig, launch
from rollout.config.run_dir import JOURNAL_FILE, RunFolder
from rollout.control.server.journal import read
from rollout.core.errors import RolloutError
from rollout.core.types import EngineStatus
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from tests.support.cpu_engines import cpu_config
from tests.support.processes import shared_memory_of, wait_until
from tests.support.ray_worlds import RayWorld

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(300),
]
HEALTH = {"probe_interval_s": 0.5, "probe_timeout_s": 3.0, "backoff_s": 0.1}
TIMEOUT_S = 90.0


class Run:
    """A run with two engines, and what a test does to it."""

    def __init__(
        self, world: RayWorld, deployment: DeploymentHandle, weights: dict[str, Any]
    ) -> None:
        self.world = world
        self.policy: ServerHandle = deployment["policy"]
        self.weights = weights
        self.journal = RunFolder.of(deployment.config).of_server("policy") / JOURNAL_FILE
        self.version = self.policy.weight_version
        self.reasons: set[str] = set()
        (group,) = self.policy.status().result(TIMEOUT_S).groups
        self.is_sglang = group.kind == "sglang"

    def engines(self) -> list[EngineStatus]:
        (group,) = self.policy.status().result(TIMEOUT_S).groups
        return list(group.engines)

    def pids(self) -> list[int | None]:
        return [one.pid for one in self.engines()]

    def asleep(self) -> dict[str, int]:
        """The pids of the standbys that another server would take over, by engine."""
        entries = read(self.journal).engines
        return {one.engine_id: one.processes[0].pid for one in entries if one.is_asleep}

    def are_well(self) -> bool:
        engines = self.engines()
        self.reasons |= {one.fence_reason for one in engines if one.fence_reason}
        return not any(one.fence_reason or one.is_stale for one in engines)

    def push(self) -> None:
        self.policy.push(self.weights).result(TIMEOUT_S)
        self.version += 1

    def reach(self, phase: str) -> None:
        """Go to a phase at rest, from serving."""
        if phase == "offloaded":
            self.policy.offload().result(TIMEOUT_S)

    def has_got(self, command: str) -> bool:
        """Whether the other engine, of SGLang, has carried out what it was sent with the first."""
        method = {
            "release_memory_occupation": "release_memory",
            "onload_weights": "resume_memory",
        }.get(command)
        log = self.journal.parent / "main-1.log"
        calls = re.findall(r"POST /(\w+)_occupation", log.read_text())
        return not (self.is_sglang and method) or calls[-1:] == [method]

    def interrupt(self, command: str, role: str) -> None:
        """Kill while an engine holds a command under way.

        The call ends with an error.  Ray repeats one that a server has lost, unless it is a push.
        """
        calls = {
            "pause_generation": self.policy.offload,
            "release_memory_occupation": self.policy.phases.release_memory_occupation,
            "onload_weights": self.policy.phases.onload_weights,
            "update_weights": lambda: self.policy.phases.update_weights(self.weights),
        }
        if command == "release_memory_occupation":
            self.policy.phases.pause_generation().result(TIMEOUT_S)
            self.policy.phases.flush_cache().result(TIMEOUT_S)
        elif command in ("onload_weights", "update_weights"):
            self.policy.offload().result(TIMEOUT_S)
        if command == "update_weights":
            self.policy.phases.onload_weights().result(TIMEOUT_S)
        pid = self.pids()[0]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            pending = calls[command]()
            assert wait_until(lambda: read(self.journal).doing == command, TIMEOUT_S)
            assert wait_until(lambda: self.has_got(command), TIMEOUT_S)
            self.world.crash_newest(role)
        finally:
            os.kill(pid, signal.SIGCONT)
        if role == SERVER and command != "update_weights":
            pending.result(TIMEOUT_S)
            return
        with pytest.raises(RolloutError, match="again"):
            pending.result(TIMEOUT_S)

    def kill(self, *roles: str) -> None:
        """SIGKILL at the same time; returns when others have taken their place."""
        before = {role: self.world.pids(role) for role in roles}
        for role in roles:
            self.world.crash_newest(role)
        for role, pids in before.items():
            assert wait_until(
                lambda role=role, pids=pids: (
                    len(self.world.pids(role)) == len(pids) and self.world.pids(role) != pids
                ),
                TIMEOUT_S,
            ), f"no other {role}"

    def check_serves(self) -> None:
        """All engines serve the published version, and no other one."""
        assert wait_until(self.are_well, TIMEOUT_S), self.engines()
        assert [one.weight_version for one in self.engines()] == [self.version] * 2
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
        served = set()
        for _ in range(8):
            reply = httpx.post(f"{self.policy.url}/generate", json=body, trust_env=False)
            assert reply.status_code == 200, reply.text
            served.add(reply.headers["x-weight-version"])
        assert served == {str(self.version)}


@pytest.fixture(scope="module")
def run(ray_cluster: RayWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Each test hands it back serving."""
    with launched(ray_cluster, tmp_path_factory.mktemp("kills")) as made:
        yield made


@contextmanager
def launched(world: RayWorld, folder: Path, kind: str = "embedded", **group: Any) -> Iterator[Run]:
    from safetensors.torch import load_file

    from rollout.testing.tiny_model import make_tiny_model

    model_path = make_tiny_model(folder / "model")
    engine = cpu_config(kind, cpus=0.5)
    policy = {
        "model_path": str(model_path),
        "groups": {"main": {"num_engines": 2, "engine": engine} | group},
        "health": HEALTH,
        "weights": {"store": {"spare_bytes": 0}},
    }
    config = RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})
    with launch(config, backend="ray") as deployment:
        made = Run(world, deployment, load_file(model_path / "model.safetensors"))
        made.push()
        yield made


GROUP, ENGINE, STORE = "ServerGroupActor", "EngineActor", "StoreAgentActor"
SERVER = "RolloutServerActor"  # with its groups
OURS = [(GROUP,), (STORE,), (SERVER,), (SERVER, STORE)]


@pytest.mark.parametrize("phase", ["serving", "offloaded"])
@pytest.mark.parametrize("roles", OURS, ids="+".join)
def test_at_rest_the_engines_stay(run: Run, roles: tuple[str, ...], phase: str) -> None:
    run.reach(phase)
    before, owners = run.pids(), run.world.pids(ENGINE)
    run.kill(*roles)
    assert wait_until(run.are_well, TIMEOUT_S), run.engines()
    if phase == "serving":
        run.check_serves()
    run.push()
    run.check_serves()
    assert run.pids() == before, run.reasons
    assert run.world.pids(ENGINE) == owners


@pytest.mark.parametrize("others", [(), (GROUP,), (SERVER,)], ids="+".join)
def test_the_engine_of_a_killed_actor_ends_and_comes_back_with_the_published_weights(
    run: Run, others: tuple[str, ...]
) -> None:
    check_the_lost_one_comes_back(run, lambda: run.kill(ENGINE, *others))


def test_so_does_one_whose_actor_is_killed_through_ray(run: Run) -> None:
    ray = run.world.ray
    (name,) = [
        (one["name"], one["namespace"])
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["name"].endswith("policy/main-1/0")
    ]
    check_the_lost_one_comes_back(run, lambda: ray.kill(ray.get_actor(*name)))


def check_the_lost_one_comes_back(run: Run, kill: Callable[[], None]) -> None:
    before = run.pids()
    in_memory = {pid: files_of(pid) for pid in before}
    assert all(in_memory.values())
    kill()
    assert wait_until(lambda: run.pids() != before and run.are_well(), TIMEOUT_S), run.engines()
    run.check_serves()
    assert all(one.is_verified for one in run.engines())
    (lost,) = {*before} - {*run.pids()}
    assert not Path(f"/proc/{lost}").exists()
    assert {pid for pid, files in in_memory.items() if any(map(Path.exists, files))} == (
        {*before} - {lost}
    )
    run.push()
    run.check_serves()


def files_of(pid: int | None) -> list[Path]:
    """The shared memory of an engine, its guard's record among it."""
    assert pid is not None
    token = psutil.Process(pid).environ()[TOKEN_VARIABLE]
    mapped = shared_memory_of(pid)
    of_the_trainer = {path for path in mapped if "rollout-push-" in str(path)}
    return [Path(folder_path(token), RECORD), *(mapped - of_the_trainer)]


@pytest.mark.parametrize("role", [GROUP, SERVER])
@pytest.mark.parametrize(
    "command", ["pause_generation", "release_memory_occupation", "onload_weights"]
)
def test_a_command_under_way_is_called_again_and_the_engines_stay(
    run: Run, command: str, role: str
) -> None:
    before = run.pids()
    run.interrupt(command, role)
    if command != "onload_weights":
        run.policy.offload().result(TIMEOUT_S)
    run.push()
    run.check_serves()
    assert run.pids() == before


def test_a_group_is_lost_while_another_server_takes_over(run: Run) -> None:
    """An engine that is stopped holds the takeover until its group is killed."""
    before, groups = run.pids(), run.world.pids(GROUP)
    pid = before[0]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        run.kill(SERVER)
        assert wait_until(lambda: bool(now := run.world.pids(GROUP)) and now != groups, TIMEOUT_S)
        run.kill(GROUP)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert wait_until(run.are_well, TIMEOUT_S), run.engines()
    run.check_serves()
    run.push()
    run.check_serves()
    assert run.pids() == before, run.reasons


@pytest.mark.chaos
@pytest.mark.sglang
def test_engines_of_sglang_stay_though_they_do_not_report_their_memory(
    ray_cluster: RayWorld, tmp_path: Path
) -> None:
    """``pytest -m chaos tests/end_to_end/test_actor_kills.py``; ``test_take_over.py`` is short."""
    with launched(ray_cluster, tmp_path, "sglang") as run:
        before = run.pids()
        run.reach("offloaded")
        for role in (GROUP, SERVER):
            run.kill(role)
            assert wait_until(run.are_well, TIMEOUT_S), run.engines()
        run.push()
        run.check_serves()
        for command in ("release_memory_occupation", "onload_weights"):
            for role in (GROUP, SERVER):
                run.interrupt(command, role)
                if command == "release_memory_occupation":
                    run.policy.offload().result(TIMEOUT_S)
                run.push()
                run.check_serves()
        assert run.pids() == before, run.reasons


@pytest.mark.chaos
def test_a_standby_stays_too_and_takes_the_place_of_an_engine_that_dies_then(
    ray_cluster: RayWorld, tmp_path: Path
) -> None:
    """``pytest -m chaos tests/end_to_end/test_actor_kills.py -k standby``."""
    with launched(ray_cluster, tmp_path, standby=1) as run:
        for phase, role in (("serving", GROUP), ("serving", SERVER), ("offloaded", SERVER)):
            assert wait_until(lambda: len(run.asleep()) == 2, TIMEOUT_S), run.engines()
            slept = run.asleep()["main-0"]
            run.reach(phase)
            run.kill(role)
            assert wait_until(run.are_well, TIMEOUT_S), run.engines()
            died = run.pids()[0]
            assert died is not None
            os.kill(died, signal.SIGKILL)
            killed_s = time.monotonic()
            assert wait_until(lambda died=died: run.pids()[0] != died, TIMEOUT_S), run.engines()
            assert run.pids()[0] == slept
            print(f"{phase}, {role}: in its place after {time.monotonic() - killed_s:.1f} s")
            run.push()
            run.check_serves()


@pytest.mark.parametrize("role", [GROUP, SERVER])
def test_half_a_push_never_serves(run: Run, role: str) -> None:
    run.interrupt("update_weights", role)
    run.push()
    run.check_serves()
