"""A node of a simulated cluster is lost in the middle of things: seen, fenced, gone on without.

One engine on each of three nodes, as processes of their own.  What is lost is a raylet with its
workers, by SIGKILL; the head, with router, group and server, stays.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from engines.launch import LocalLauncher
from engines.process.process_identity import is_running
from rollout.config import RolloutConfig
from rollout.core.errors import PhaseFailed
from rollout.core.types import EngineReport, EngineStatus, StepReport
from rollout.runtime.handle import ServerHandle
from tests.support.builders import push, write_checkpoint
from tests.support.processes import wait_until
from tests.support.ray_worlds import NUM_GPUS, RayWorld
from tests.support.served_fakes import TIMEOUT_S, ServedEngine

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]

HEALTH = {
    "probe_interval_s": 0.5,
    "probe_timeout_s": 2.0,
    "probes_to_dead": 3,
    "max_restarts": 100,
    "backoff_s": 0.2,
    "max_backoff_s": 1.0,
}
# A busy machine may be late with everything, but not by more than this.
SLACK_S = 20.0
SEEN_WITHIN_S = (
    HEALTH["probes_to_dead"] * (HEALTH["probe_interval_s"] + HEALTH["probe_timeout_s"]) + SLACK_S
)
OPTIONS = {"token-s": 0.01}


class Fleet:
    """Three engines on three nodes, and the means to lose one."""

    def __init__(self, world: RayWorld, policy: ServerHandle) -> None:
        self.world = world
        self.policy = policy

    def engines(self) -> dict[str, EngineStatus]:
        (group,) = self.policy.status().result(TIMEOUT_S).groups
        return {one.engine_id: one for one in group.engines}

    def exposed(self) -> list[EngineStatus]:
        """The two engines that are not on the head."""
        added = self.world.added()
        return [one for one in self.engines().values() if one.node_id in added]

    def victim(self) -> EngineStatus:
        return self.exposed()[0]

    def lose_node_of(self, engine: EngineStatus) -> None:
        self.world.lose_node(engine.node_id)

    def is_fenced(self, engine: EngineStatus) -> bool:
        return bool(self.engines()[engine.engine_id].fence_reason)

    def others(self, engine: EngineStatus) -> list[EngineStatus]:
        return [one for one in self.engines().values() if one.engine_id != engine.engine_id]

    def restore(self) -> None:
        """Other nodes for those lost, their engines on them, and all of them serving."""
        while len(self.world.added()) < 2:
            self.world.add_node(CPU=8, GPU=NUM_GPUS)
        assert wait_until(
            lambda: not any(one.fence_reason for one in self.engines().values()), 120
        ), self.engines()
        version = self.policy.status().result(TIMEOUT_S).weight_version
        self.policy.offload().result(60)
        self.policy.push(push(version + 1)).result(60)
        assert {one.state for one in self.engines().values()} == {"serving"}


@pytest.fixture(scope="module")
def fleet(ray_cluster: RayWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """May go on with two engines; each test hands it back with three that serve."""
    folder = tmp_path_factory.mktemp("run")
    engine = {"kind": "fake", "gpus": NUM_GPUS, "options": OPTIONS}
    server = {
        "model_path": write_checkpoint(folder),
        "groups": {"main": {"num_engines": 3, "min_engines": 2, "engine": engine}},
        "health": HEALTH,
    }
    config = RolloutConfig.from_dict(
        {"log_dir": str(folder), "run_id": "spread", "servers": {"policy": server}}
    )
    with ray_cluster.more_nodes(2, CPU=8, GPU=NUM_GPUS):
        handle = ray_cluster.load("launch").launch_ray(config, launcher=LocalLauncher())
        try:
            fleet = Fleet(ray_cluster, handle["policy"])
            assert len({one.node_id for one in fleet.engines().values()}) == 3
            yield fleet
        finally:
            handle.stop()


class Clients:
    """Threads that generate through the router, one request after the other, until stopped."""

    def __init__(self, url: str, num: int) -> None:
        self.ends: list[tuple[float, int]] = []
        self._url = url
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num)]

    def _run(self) -> None:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 20}}
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            while not self._done.is_set():
                answer = client.post("/generate", json=body)
                self.ends.append((time.monotonic(), answer.status_code))

    def __enter__(self) -> "Clients":
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for one in self._threads:
            one.join(60)

    def after(self, moment: float) -> list[int]:
        return [status for ended, status in self.ends if ended > moment]


def test_in_a_rollout_step_the_others_go_on_and_no_request_is_without_an_end(fleet: Fleet) -> None:
    victim = fleet.victim()
    with Clients(fleet.policy.url, 6) as clients:
        assert wait_until(lambda: len(clients.ends) >= 12, 30)
        lost = time.monotonic()
        fleet.lose_node_of(victim)
        assert wait_until(lambda: fleet.is_fenced(victim), SEEN_WITHIN_S)
        seen_after_s = time.monotonic() - lost
        moment = time.monotonic()
        assert wait_until(lambda: len(clients.after(moment)) >= 30, 30)
    assert seen_after_s < SEEN_WITHIN_S
    # What was on the lost engine failed; before and afterwards, nothing did.
    assert set(clients.after(moment)[6:]) == {200}
    failed = [status for _, status in clients.ends if status != 200]
    assert len(failed) <= 6, failed
    status = fleet.policy.status().result(TIMEOUT_S)
    assert (status.phase, status.gate) == ("serving", "open")
    assert [one.state for one in fleet.others(victim)] == ["serving"] * 2
    assert wait_until(
        lambda: (
            "has no room" in fleet.engines()[victim.engine_id].fence_reason
            or "is dead" in fleet.engines()[victim.engine_id].fence_reason
        ),
        30,
    )
    assert not any(is_running(one) for one in victim.processes)
    fleet.restore()


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param("pause_generation", marks=pytest.mark.chaos),
        pytest.param("flush_cache", marks=pytest.mark.chaos),
        "release_memory_occupation",
    ],
)
def test_in_an_offload_the_others_give_their_memory_back(fleet: Fleet, operation: str) -> None:
    victim = fleet.victim()
    with held(victim, operation):
        offloading = fleet.policy.offload()
        entered(victim, operation)
        fleet.lose_node_of(victim)
        report = offloading.result(SEEN_WITHIN_S)
    assert [one.engine_id for one in failures(report)] == [victim.engine_id]
    assert [one.state for one in fleet.others(victim)] == ["offloaded"] * 2
    assert fleet.is_fenced(victim)
    assert not any(is_running(one) for one in victim.processes)
    version = fleet.policy.status().result(TIMEOUT_S).weight_version + 1
    assert fleet.policy.push(push(version)).result(60).weight_version == version
    assert generate(fleet.policy) == 200
    fleet.restore()


@pytest.mark.chaos
def test_a_push_that_too_few_engines_survive_fails_and_the_gate_stays_shut_until_it_is_repeated(
    fleet: Fleet,
) -> None:
    victims = fleet.exposed()
    version = fleet.policy.status().result(TIMEOUT_S).weight_version + 1
    fleet.policy.offload().result(60)
    operation = "update_weights_from_tensor"
    with held(victims[0], operation), held(victims[1], operation):
        pushing = fleet.policy.push(push(version))
        for victim in victims:
            entered(victim, operation)
        for victim in victims:
            fleet.lose_node_of(victim)
        with pytest.raises(PhaseFailed, match="1 of 3 engines left, 2 needed") as caught:
            pushing.result(SEEN_WITHIN_S)
    lost = {one.engine_id for one in victims}
    assert {one.engine_id for one in caught.value.failures} == lost
    status = fleet.policy.status().result(TIMEOUT_S)
    assert (status.gate, status.phase) == ("closed", "weights_updated")
    assert generate(fleet.policy) == 503
    with pytest.raises(PhaseFailed, match="1 of 3 engines left"):
        fleet.policy.push(push(version)).result(60)
    # Ray places the bundles of a run that it has lost all together or not at all.
    for _ in victims:
        fleet.world.add_node(CPU=8, GPU=NUM_GPUS)
    # In the middle of an onload just as many are started as it needs to go on.
    assert wait_until(lambda: sum(fleet.is_fenced(one) for one in victims) <= 1, 120)
    assert fleet.policy.push(push(version)).result(60).weight_version == version
    assert generate(fleet.policy) == 200
    fleet.restore()


@pytest.mark.chaos
def test_an_engine_whose_actor_and_guard_fail_is_ended_on_its_node_before_another_starts(
    fleet: Fleet,
) -> None:
    victim = fleet.victim()
    (identity,) = victim.processes
    guard = psutil.Process(psutil.Process(identity.pid).ppid())
    actor = owner_of(guard)
    # The guard cannot end the engine any more, and the actor that commands it is gone.
    guard.suspend()
    os.kill(actor, signal.SIGKILL)
    was_running: list[bool] = []

    def is_replaced() -> bool:
        now = fleet.engines()[victim.engine_id]
        if now.processes == victim.processes or now.fence_reason:
            return False
        was_running.append(is_running(identity))
        return True

    assert wait_until(is_replaced, 120), fleet.engines()
    assert was_running == [False]
    assert not guard.is_running()
    assert fleet.engines()[victim.engine_id].node_id == victim.node_id
    version = fleet.policy.status().result(TIMEOUT_S).weight_version
    fleet.policy.offload().result(60)
    fleet.policy.push(push(version + 1)).result(60)


def owner_of(guard: psutil.Process) -> int:
    """The worker whose actor started it: the last argument of a guard."""
    return int(guard.cmdline()[-1])


@contextmanager
def held(engine: EngineStatus, operation: str) -> Iterator[None]:
    served = ServedEngine(engine)
    try:
        served.hold(operation)
        yield
    finally:
        served.close()


def entered(engine: EngineStatus, operation: str) -> None:
    served = ServedEngine(engine)
    served.wait_entered(operation)
    served.close()


def failures(report: StepReport) -> list[EngineReport]:
    return [one for phase in report.reports for one in phase.failures]


def generate(policy: ServerHandle) -> int:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    answer = httpx.post(policy.url + "/generate", json=body, timeout=30, trust_env=False)
    return answer.status_code
