"""Engines that somebody else launched, driven by actors: over the stub and over Ray."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engines.launch import LocalLauncher
from engines.process.tcp_ports import reserve_port
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.builders import push
from tests.support.processes import Program, program, wait_until
from tests.support.ray_worlds import World
from tests.support.served_fakes import TIMEOUT_S, config

HEALTH = {"probe_interval_s": 0.2, "probe_timeout_s": 2.0}


@pytest.fixture(scope="module")
def theirs() -> Iterator[tuple[str, Program]]:
    with reserve_port() as reserved:
        port = reserved.port
    with program("-m", "engines.fake", "--port", str(port)) as engine:
        engine.wait_for("listens", TIMEOUT_S)
        yield f"http://127.0.0.1:{port}", engine


@pytest.fixture
def policy(world: World, theirs: tuple[str, Program], tmp_path: Path) -> Iterator[ServerHandle]:
    url, _ = theirs
    httpx.post(f"{url}/update_weight_version", json={"new_version": "0"}, trust_env=False)
    groups = {"theirs": {"engine": {"kind": "attached", "urls": [url]}}}
    whole = config(tmp_path, groups, health=HEALTH, run_id="attached")
    handle = world.load("launch").launch_ray(whole, launcher=LocalLauncher())
    try:
        yield handle["policy"]
    finally:
        handle.stop()


def engine_of(policy: ServerHandle) -> EngineStatus:
    (group,) = policy.status().result(TIMEOUT_S).groups
    return group.engines[0]


def test_an_attached_engine_needs_no_bundle_and_is_driven_like_any_other(
    world: World, policy: ServerHandle, theirs: tuple[str, Program]
) -> None:
    url, engine = theirs
    found = engine_of(policy)
    assert (found.endpoint.url, found.pid, found.processes) == (url, None, ())
    assert "EngineActor" not in world.live_actors()
    policy.offload().result(TIMEOUT_S)
    assert policy.push(push(1)).result(TIMEOUT_S).weight_version == 1
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}
    answer = httpx.post(policy.url + "/generate", json=body, timeout=30, trust_env=False)
    assert answer.json()["meta_info"]["weight_version"] == "1"
    assert engine.process.poll() is None


def test_an_attached_engine_is_taken_over_when_its_group_is_lost_and_runs_on_when_we_go(
    world: World, policy: ServerHandle, theirs: tuple[str, Program]
) -> None:
    url, engine = theirs
    world.crash_newest("ServerGroupActor")
    assert wait_until(
        lambda: "ServerGroupActor" in world.live_actors() and not engine_of(policy).fence_reason,
        TIMEOUT_S,
    )
    policy.offload().result(TIMEOUT_S)
    assert policy.push(push(1)).result(TIMEOUT_S).weight_version == 1
    assert engine_of(policy).endpoint.url == url
    assert engine.process.poll() is None
