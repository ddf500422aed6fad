"""Engines that are lost with their actors come back, over the stub and over Ray itself."""

import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.fake.http_fake import HttpFakeLauncher
from rollout.config import RolloutConfig
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.builders import push, write_checkpoint
from tests.support.processes import wait_until
from tests.support.ray_worlds import World
from tests.support.served_fakes import TIMEOUT_S

HEALTH = {"probe_interval_s": 0.2, "probe_timeout_s": 1.0, "probes_to_dead": 2}


@pytest.fixture
def policy(world: World, tmp_path: Path) -> Iterator[ServerHandle]:
    server = {
        "model_path": write_checkpoint(tmp_path),
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded"}}},
        "health": HEALTH,
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    handle = world.load("launch").launch_ray(config, launcher=HttpFakeLauncher())
    try:
        yield handle["policy"]
    finally:
        handle.stop()


def engines(policy: ServerHandle) -> dict[str, EngineStatus]:
    (group,) = policy.status().result(TIMEOUT_S).groups
    return {one.engine_id: one for one in group.engines}


def test_an_engine_whose_actor_crashed_comes_back_and_joins_at_the_next_push(
    world: World, policy: ServerHandle
) -> None:
    before = engines(policy)
    world.crash_newest("EngineActor")
    assert wait_until(
        lambda: any(one.endpoint != before[name].endpoint for name, one in engines(policy).items()),
        TIMEOUT_S,
    )
    policy.offload().result(TIMEOUT_S)
    policy.push(push(1)).result(TIMEOUT_S)
    after = engines(policy)
    assert [one.weight_version for one in after.values()] == [1, 1]
    assert not any(one.fence_reason or one.is_stale for one in after.values())
    assert world.live_actors().count("EngineActor") == 2


class Later:
    """The server of a later launch."""


@pytest.mark.parametrize("has_name_again", [False, True])
def test_engines_end_when_their_server_is_gone_for_good(
    world: World, policy: ServerHandle, has_name_again: bool
) -> None:
    """As when the driver dies and the placement group is another's."""
    (name,) = [
        (one["name"], one["namespace"])
        for one in world.load("engine_launcher").list_named_actors(all_namespaces=True)
        if one["name"].startswith("rollout-")
    ]
    endpoints = [one.endpoint for one in engines(policy).values()]
    world.ray.kill(world.ray.get_actor(*name))
    later: list[Any] = []
    if has_name_again:
        assert wait_until(partial(_takes_name, world, later, *name), TIMEOUT_S)
    assert wait_until(lambda: "EngineActor" not in world.live_actors(), TIMEOUT_S)
    for actor in later:
        world.ray.kill(actor)
    for endpoint in endpoints:
        with (
            pytest.raises(ConnectionRefusedError),
            socket.create_connection((endpoint.host, endpoint.port)),
        ):
            pass


def _takes_name(world: World, later: list[Any], name: str, namespace: str) -> bool:
    """The name is free a moment after the kill."""
    actor_class = world.ray.remote(num_cpus=0)(Later)
    with contextlib.suppress(ValueError):
        later.append(actor_class.options(name=name, namespace=namespace).remote())
        return True
    return False
