"""A group's actor or the router's is lost: another takes its place, over the stub and over Ray."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import rollout
from engines.fake.http_fake import HttpFakeLauncher
from rollout.config.run_dir import JOURNAL_FILE
from rollout.control.server.group_registry import lost_groups
from rollout.control.server.journal import read
from rollout.core.errors import ActorLost
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.builders import make_group, push
from tests.support.driving import numbers, source
from tests.support.processes import kill_listener, wait_until
from tests.support.ray_worlds import World
from tests.support.served_fakes import TIMEOUT_S, ServedEngine, config, engines_of

HEALTH = {"probe_interval_s": 0.2, "probe_timeout_s": 2.0, "backoff_s": 0.1}


def launched_in(
    world: World, folder: Path, run_id: str = "bereft", **group: Any
) -> Iterator[ServerHandle]:
    whole = config(folder, {"main": {"num_engines": 2} | group}, health=HEALTH, run_id=run_id)
    handle = world.load("launch").launch_ray(whole, launcher=HttpFakeLauncher())
    try:
        yield handle["policy"]
    finally:
        handle.stop()


@pytest.fixture(scope="module")
def policy(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    """Each test hands it back serving."""
    yield from launched_in(world, tmp_path_factory.mktemp("run"))


def engines(policy: ServerHandle) -> dict[str, EngineStatus]:
    (group,) = policy.status().result(TIMEOUT_S).groups
    return {one.engine_id: one for one in group.engines}


def are_where(policy: ServerHandle, before: dict[str, EngineStatus]) -> bool:
    return {name: one.endpoint for name, one in engines(policy).items()} == {
        name: one.endpoint for name, one in before.items()
    }


def are_well(policy: ServerHandle) -> bool:
    return not any(one.fence_reason or one.is_stale for one in engines(policy).values())


def generate(url: str) -> int:
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    try:
        return httpx.post(url + "/generate", json=body, timeout=30, trust_env=False).status_code
    except httpx.TransportError:
        return 0


def num_running(policy: ServerHandle) -> int:
    state = httpx.get(policy.url + "/engines", timeout=30, trust_env=False).json()
    return sum(one["num_in_flight"] for one in state["engines"])


def num_released(engine: ServedEngine) -> int:
    """How often it has answered that its memory is released."""
    return len(engine.requests("/release_memory_occupation"))


def window(policy: ServerHandle) -> int:
    version = policy.status().result(TIMEOUT_S).weight_version + 1
    policy.offload().result(TIMEOUT_S)
    return policy.push(push(version)).result(TIMEOUT_S).weight_version


def test_a_group_lost_while_it_serves_is_replaced_and_its_engines_go_on(
    world: World, policy: ServerHandle
) -> None:
    version = window(policy)
    before = engines(policy)
    world.crash_newest("ServerGroupActor")
    assert wait_until(
        lambda: "ServerGroupActor" in world.live_actors() and are_well(policy), TIMEOUT_S
    )
    after = engines(policy)
    assert are_where(policy, before)
    assert [one.weight_version for one in after.values()] == [version] * 2
    assert generate(policy.url) == 200
    assert window(policy) == version + 1


def test_a_group_lost_while_it_is_offloaded_is_replaced_and_its_engines_stay_asleep(
    world: World, policy: ServerHandle
) -> None:
    version = policy.status().result(TIMEOUT_S).weight_version + 1
    policy.offload().result(TIMEOUT_S)
    before = engines(policy)
    world.crash_newest("ServerGroupActor")
    assert wait_until(
        lambda: "ServerGroupActor" in world.live_actors() and are_well(policy), TIMEOUT_S
    )
    after = engines(policy)
    assert {name: one.released for name, one in after.items()} == {
        name: one.released for name, one in before.items()
    }
    assert policy.status().result(TIMEOUT_S).phase == "offloaded"
    assert policy.push(push(version)).result(TIMEOUT_S).weight_version == version
    assert are_where(policy, before)
    assert generate(policy.url) == 200


@pytest.mark.parametrize("had_it", [True, False], ids=["executed", "not executed"])
def test_a_group_lost_in_a_release_gives_the_memory_without_a_boot(
    world: World, policy: ServerHandle, had_it: bool
) -> None:
    """Engines that had got it stay; the others end, and boot when the memory is theirs."""
    version = policy.status().result(TIMEOUT_S).weight_version + 1
    before = engines(policy)
    with engines_of(policy) as served:
        answered = {name: num_released(one) for name, one in served.items()}

        def release() -> None:
            for one in served.values():
                one.open("release_memory_occupation")
            for name, one in served.items():
                assert wait_until(lambda one=one, num=answered[name]: num_released(one) > num, 10)

        for one in served.values():
            one.hold("release_memory_occupation")
        offloading = policy.offload()
        for one in served.values():
            one.wait_entered("release_memory_occupation")
        world.crash_newest("ServerGroupActor", release if had_it else lambda: None)
        with pytest.raises(ActorLost, match="policy/main"):
            offloading.result(TIMEOUT_S)
        policy.offload().result(TIMEOUT_S)
    assert policy.status().result(TIMEOUT_S).phase == "offloaded"
    assert are_where(policy, before)  # none has booted
    assert policy.push(push(version)).result(TIMEOUT_S).weight_version == version
    assert are_where(policy, before) == had_it
    assert generate(policy.url) == 200


def test_a_group_lost_in_a_command_fails_it_and_the_next_one_goes_on_with_its_engines(
    world: World, policy: ServerHandle
) -> None:
    before = engines(policy)
    with engines_of(policy) as served:
        served["main-0"].hold("flush_cache")
        offloading = policy.offload()
        served["main-0"].wait_entered("flush_cache")
        world.crash_newest("ServerGroupActor")
        with pytest.raises(ActorLost, match="policy/main"):
            offloading.result(TIMEOUT_S)
        served["main-0"].open("flush_cache")
    assert policy.status().result(TIMEOUT_S).gate == "holding"
    with ThreadPoolExecutor() as clients:
        held = clients.submit(generate, policy.url)
        window(policy)
        assert held.result(TIMEOUT_S) == 200
    after = engines(policy)
    assert [one.fence_reason for one in after.values()] == ["", ""]
    assert are_where(policy, before)
    assert generate(policy.url) == 200


def test_a_group_lost_before_the_gate_opens_is_replaced_by_the_command_that_opens_it(
    world: World, policy: ServerHandle
) -> None:
    version = policy.status().result(TIMEOUT_S).weight_version
    before = engines(policy)
    policy.phases.pause_generation().result(TIMEOUT_S)
    world.crash_newest("ServerGroupActor")
    policy.phases.continue_generation().result(TIMEOUT_S)
    status = policy.status().result(TIMEOUT_S)
    assert (status.gate, status.weight_version) == ("open", version)
    assert are_where(policy, before)
    assert generate(policy.url) == 200


def asleep(policy: ServerHandle) -> dict[str, EngineStatus]:
    (group,) = policy.status().result(TIMEOUT_S).groups
    return {one.engine_id: one for one in group.asleep}


@pytest.mark.parametrize(
    "world",
    ["stub", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.chaos])],
    indirect=True,
)
def test_a_standby_of_a_lost_group_takes_a_place_without_a_boot(
    world: World, tmp_path: Path
) -> None:
    """Over Ray: ``pytest -m chaos tests/rollout/runtime/ray/test_lost_actors.py``."""
    launched = contextmanager(launched_in)(world, tmp_path, "bereft2", num_engines=1, standby=1)
    with launched as policy:
        assert wait_until(lambda: bool(asleep(policy)), TIMEOUT_S)
        slept = asleep(policy)["main-0"].endpoint
        (journal,) = tmp_path.rglob(JOURNAL_FILE)
        assert wait_until(
            lambda: [one.url for one in read(journal).engines if one.is_asleep] == [slept.url],
            TIMEOUT_S,
        )
        group, _ = make_group(1, standby=1, health={})
        known = lost_groups(read(journal), {"main": group._settings.group})["main"].known
        assert [one.endpoint for one in known.asleep] == [slept]
        assert [one.endpoint for one in known.engines] == [engines(policy)["main-0"].endpoint]
        for reach in (lambda: generate(policy.url), lambda: policy.offload().result(TIMEOUT_S)):
            reach()
            world.crash_newest("ServerGroupActor")
            assert wait_until(
                lambda: "ServerGroupActor" in world.live_actors() and are_well(policy), TIMEOUT_S
            )
            assert asleep(policy)["main-0"].endpoint == slept
        with engines_of(policy) as served:
            served["main-0"].kill()
        assert wait_until(lambda: engines(policy)["main-0"].endpoint == slept, TIMEOUT_S)
        assert policy.push(push(1)).result(TIMEOUT_S).weight_version == 1
        assert engines(policy)["main-0"].endpoint == slept
        assert generate(policy.url) == 200


# In the stub a router's thread outlives its actor, and keeps the port.
over_ray = pytest.mark.parametrize(
    "world", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)


@over_ray
def test_a_lost_router_is_replaced_on_its_port_and_told_what_the_last_one_knew(
    world: World, policy: ServerHandle
) -> None:
    url = policy.url
    version = window(policy)
    metrics = httpx.get(url + "/engines", trust_env=False).json()["server_metrics"]
    assert metrics["server/weight_version"] == version
    kill_listener(url)
    killed_s = time.monotonic()
    assert wait_until(lambda: generate(url) == 200, TIMEOUT_S)
    print(f"a router serves {time.monotonic() - killed_s:.3f} s after the last one was killed")
    state = httpx.get(url + "/engines", trust_env=False).json()
    assert (state["gate"]["state"], state["gate"]["weight_version"]) == ("open", version), state
    assert state["server_metrics"] == metrics
    assert policy.status().result(TIMEOUT_S).router_url == url
    assert window(policy) == version + 1
    assert generate(url) == 200


@over_ray
def test_a_router_lost_in_an_offload_comes_back_with_its_gate_shut(
    world: World, policy: ServerHandle
) -> None:
    url = policy.url
    version = policy.status().result(TIMEOUT_S).weight_version + 1
    policy.offload().result(TIMEOUT_S)
    kill_listener(url)

    def gate() -> str:
        try:
            state = httpx.get(url + "/engines", timeout=10, trust_env=False).json()
        except httpx.TransportError:
            return "gone"
        return str(state["gate"]["state"])

    assert wait_until(lambda: gate() == "holding", TIMEOUT_S)
    assert policy.push(push(version)).result(TIMEOUT_S).weight_version == version
    assert gate() == "open"
    assert generate(url) == 200


@over_ray
def test_a_router_that_is_lost_twice_comes_back_twice(world: World, policy: ServerHandle) -> None:
    url = policy.url
    version = window(policy)
    before = {name: one.pid for name, one in engines(policy).items()}
    for _ in range(2):
        kill_listener(url)
        assert wait_until(lambda: generate(url) == 200, TIMEOUT_S)
    assert world.live_actors().count("RouterActor") == 1
    assert {name: one.pid for name, one in engines(policy).items()} == before
    assert window(policy) == version + 1


@over_ray
def test_requests_of_a_driver_and_of_a_handle_outlive_a_lost_router(
    world: World, policy: ServerHandle
) -> None:
    """What the lost router had is generated again, and each group is delivered once."""
    sampling = rollout.SamplingParams(max_new_tokens=40)
    data = source(24, num_epochs=1)
    with engines_of(policy) as served, rollout.Driver(policy.url, reward=lambda _: 1.0) as driver:
        for engine in served.values():
            engine.hold("generate")
        batch = {"num_groups": 24, "group_size": 2, "sampling": sampling}
        call = driver.rollout(0, data, **batch)
        replies = policy.generate([[1, 2, 3]] * 8, sampling)
        assert wait_until(lambda: num_running(policy) >= 8, TIMEOUT_S)
        kill_listener(policy.url)
        for engine in served.values():
            engine.open("generate")
        assert numbers(call.result(TIMEOUT_S)) == list(range(1, 25))
        assert [len(one.output_ids) for one in replies.result(TIMEOUT_S)] == [40] * 8
        assert not driver.rollout(1, data, **batch).result(TIMEOUT_S)
        stream = driver._inner.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []


over_ray_for_minutes = pytest.mark.parametrize(
    "world",
    [pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.chaos])],
    indirect=True,
)


@pytest.mark.timeout(240)
@over_ray_for_minutes
def test_a_router_that_hangs_is_ended_and_another_serves(world: Any, policy: ServerHandle) -> None:
    """``pytest -m chaos -k hangs tests/rollout/runtime/ray/test_lost_actors.py``"""
    url = policy.url
    version = window(policy)
    (pid,) = world.pids("RouterActor")
    os.kill(pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    assert wait_until(lambda: not psutil.pid_exists(pid), 90.0)
    assert wait_until(lambda: generate(url) == 200, TIMEOUT_S)
    print(f"a router serves {time.monotonic() - stopped_s:.0f} s after the last one hung")
    assert window(policy) == version + 1


@pytest.mark.timeout(240)
@over_ray_for_minutes
def test_requests_go_on_while_a_server_hangs_and_its_calls_are_late_by_name(
    world: Any, policy: ServerHandle
) -> None:
    url = policy.url
    version = window(policy)
    (pid,) = world.pids("RolloutServerActor")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert generate(url) == 200
        offloading = policy.offload()
        with pytest.raises(TimeoutError, match="no answer within 3 s"):
            offloading.result(3.0)
        assert generate(url) == 200
    finally:
        os.kill(pid, signal.SIGKILL)  # as its user does: Ray starts another, which continues
    offloading.result(TIMEOUT_S)  # repeated there
    assert policy.push(push(version + 1)).result(TIMEOUT_S).weight_version == version + 1
    assert generate(url) == 200
