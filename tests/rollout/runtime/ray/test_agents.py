"""Workers of agents as actors: lost ones serve at their addresses again, and a stop ends them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.fake.http_fake import HttpFakeLauncher
from rollout.config.run_dir import RunFolder
from rollout.core.errors import ActorLost, RolloutError
from rollout.runtime.handle import DeploymentHandle
from tests.support.processes import kill_listener, wait_until
from tests.support.ray_worlds import World
from tests.support.served_fakes import TIMEOUT_S, config

GROUPS = {"main": {"num_engines": 1}}
HEALTH = {"probe_interval_s": 0.2, "probe_timeout_s": 2.0, "backoff_s": 0.1}


@pytest.fixture
def deployment(world: World, tmp_path: Path) -> Iterator[DeploymentHandle]:
    before = sorted(world.live_actors())
    server = {"agents": {"workers": 2}}
    whole = config(tmp_path, GROUPS, health=HEALTH, server=server, run_id="minded")
    handle = world.load("launch").launch_ray(whole, launcher=HttpFakeLauncher())
    folder = RunFolder.of(whole).of_agents("policy")
    try:
        assert folder.is_dir()
        yield handle
    finally:
        handle.stop()
    assert wait_until(lambda: sorted(world.live_actors()) == before, TIMEOUT_S)
    assert not folder.exists()


def health(url: str) -> int:
    try:
        return httpx.get(f"{url}/health", timeout=30, trust_env=False).status_code
    except httpx.TransportError:
        return 0


def addresses(deployment: DeploymentHandle) -> tuple[str, ...]:
    return deployment["policy"].status().result(TIMEOUT_S).agents_urls


def test_each_worker_is_an_actor_and_a_session_has_the_address_of_its_own(
    world: World, deployment: DeploymentHandle
) -> None:
    urls = addresses(deployment)
    assert len(set(urls)) == 2
    assert [health(url) for url in urls] == [200, 200]
    assert world.live_actors().count("AgentsActor") == 2
    sessions = [deployment["policy"].session() for _ in range(64)]
    assert {one.base_url.partition("/sessions/")[0] for one in sessions} == set(urls)
    session = deployment["policy"].session("s")
    assert session.turns().result(TIMEOUT_S) == []


@pytest.mark.parametrize("world", ["stub"], indirect=True)
def test_a_launch_leaves_what_is_not_ours_where_its_folder_should_be(
    world: World, tmp_path: Path
) -> None:
    before = sorted(world.live_actors())
    whole = config(tmp_path, GROUPS, server={"agents": {"workers": 1}}, run_id="unminded")
    folder = RunFolder.of(whole).of_agents("policy")
    folder.mkdir(parents=True)
    (folder / "thesis.txt").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout.control.server.agents_client._LEFT_WITHIN_S", 0.1)
        with pytest.raises(RolloutError, match="for the sessions of agents, is there already"):
            world.load("launch").launch_ray(whole, launcher=HttpFakeLauncher())
    assert (folder / "thesis.txt").exists()
    assert wait_until(lambda: sorted(world.live_actors()) == before, TIMEOUT_S)


over_ray = pytest.mark.parametrize(
    "world", [pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)


@over_ray
def test_a_lost_worker_serves_at_its_address_again(
    world: World, deployment: DeploymentHandle
) -> None:
    urls = addresses(deployment)
    for _ in range(2):
        for url in urls:
            kill_listener(url)
        assert wait_until(lambda: [health(url) for url in urls] == [200, 200], TIMEOUT_S)
    assert addresses(deployment) == urls


@over_ray
def test_workers_outlive_a_lost_server_which_finds_them_again(
    world: Any, deployment: DeploymentHandle
) -> None:
    urls, before = addresses(deployment), world.pids("AgentsActor")
    world.crash_newest("RolloutServerActor")

    def is_back() -> bool:
        try:
            return addresses(deployment) == urls
        except ActorLost:
            return False

    assert wait_until(is_back, TIMEOUT_S)
    assert [health(url) for url in urls] == [200, 200]
    assert world.pids("AgentsActor") == before
