"""Engines that somebody else launched, driven by actors: over the stub and over Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.launch import LocalLauncher
from engines.process.tcp_ports import reserve_port
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.builders import push
from tests.support.processes import Program, program, wait_until
from tests.support.ray_worlds import World
from tests.support.served_fakes import TIMEOUT_S, config

# A fake engine joins no group of torch.
KEEPING = {"store": {"spare_bytes": 0}, "transport": "by_value"}
HEALTH = {"probe_interval_s": 0.2, "probe_timeout_s": 2.0}


@contextmanager
def started(port: int) -> Iterator[Program]:
    with program("-m", "engines.fake", "--port", str(port)) as engine:
        engine.wait_for("listens", TIMEOUT_S)
        yield engine


@pytest.fixture
def theirs() -> Iterator[tuple[str, Program]]:
    with reserve_port() as reserved:
        port = reserved.port
    with started(port) as engine:
        yield f"http://127.0.0.1:{port}", engine


@pytest.fixture
def policy(
    request: pytest.FixtureRequest, world: World, theirs: tuple[str, Program], tmp_path: Path
) -> Iterator[ServerHandle]:
    url, _ = theirs
    httpx.post(f"{url}/update_weight_version", json={"new_version": "0"}, trust_env=False)
    groups = {"theirs": {"engine": {"kind": "attached", "urls": [url]}}}
    weights = getattr(request, "param", {})
    whole = config(tmp_path, groups, health=HEALTH, run_id="attached", server={"weights": weights})
    handle = world.load("launch").launch_ray(whole, launcher=LocalLauncher())
    try:
        yield handle["policy"]
    finally:
        handle.stop()


def kept(policy: ServerHandle) -> int | None:
    store = policy.status().result(TIMEOUT_S).store
    assert store is not None
    return store.version


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


@pytest.mark.embedded
@pytest.mark.parametrize("policy", [KEEPING], indirect=True)
def test_an_attached_engine_that_was_started_again_has_its_weights_from_the_store(
    policy: ServerHandle, theirs: tuple[str, Program]
) -> None:
    import torch

    url, engine = theirs
    weights = {info.name: torch.rand(info.shape) for info in DEFAULT_TENSORS}
    policy.push(weights, version=1).result(TIMEOUT_S)
    assert wait_until(lambda: kept(policy) == 1, TIMEOUT_S)
    engine.process.kill()
    assert wait_until(lambda: bool(engine_of(policy).fence_reason), TIMEOUT_S)
    with started(int(url.rpartition(":")[2])):
        assert wait_until(lambda: not engine_of(policy).fence_reason, TIMEOUT_S)
        assert engine_of(policy).weight_version == 1
