"""Launches that outlive their script, on the stub of Ray; the end-to-end tests kill over Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rollout
from engines.fake.http_fake import HttpFakeLauncher
from rollout.core.errors import ConfigError, PhaseFailed
from rollout.runtime.handle import DeploymentHandle
from tests.support.builders import push
from tests.support.pages import run_code
from tests.support.ray_worlds import World, stub_world
from tests.support.served_fakes import config, fail_to_make

ONE = {"main": {"num_engines": 1}}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with stub_world() as world:
        # Other tests of this process may have started a cluster of Ray itself.
        monkeypatch.setattr(world.load("launch"), "has_started_cluster", lambda: False)
        yield world


def launch(
    world: World, folder: Path, launcher: HttpFakeLauncher | None = None, **more: Any
) -> DeploymentHandle:
    settings = config(folder, ONE, run_id="exp", **more)
    launcher = launcher or HttpFakeLauncher()
    handle = world.load("launch").launch_ray(settings, launcher=launcher, detached=True)
    assert isinstance(handle, DeploymentHandle)
    return handle


def test_a_run_goes_on_after_its_block_and_is_found_again(world: World, tmp_path: Path) -> None:
    with launch(world, tmp_path) as first:
        first.offload().result(30)
    with pytest.raises(rollout.RolloutError, match="closed"):
        first.offload()
    with rollout.connect("exp", backend="ray") as run:
        assert run.ready().result(30)["policy"].name == "policy"
        assert run.config == first.config
        assert run["policy"].status().result(30).phase == "offloaded"
        run.push({"policy": push(1)}).result(30)
        assert run["policy"].status().result(30).phase == "serving"
        run.stop()
    assert world.live_actors() == []
    with pytest.raises(ConfigError, match="no server of run 'exp'"):
        rollout.connect("exp", backend="ray")
    launch(world, tmp_path).stop()


def test_the_code_of_the_page_launches_then_connects(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, ONE, run_id="exp")
    (tmp_path / "rollout.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    monkeypatch.chdir(tmp_path)
    launches = []

    def launch_with_fakes(settings: rollout.RolloutConfig, **arguments: Any) -> Any:
        launches.append(arguments)
        return launch(world, tmp_path)

    monkeypatch.setattr(rollout, "launch", launch_with_fakes)
    assert run_code("how-to/recovery.md")["start"] == 0
    with rollout.connect("exp", backend="ray") as run:
        run.push({"policy": push(1)}).result(30)
        run["policy"].phases.pause_generation().result(30)
    assert run_code("how-to/recovery.md")["start"] == 1
    with rollout.connect("exp", backend="ray") as run:
        assert run["policy"].status().result(30).phase == "serving"
        run.stop()
    assert launches == [{"backend": "ray", "detached": True}]


def test_one_launch_of_an_id_at_a_time(world: World, tmp_path: Path) -> None:
    first = launch(world, tmp_path)
    way_out = r"rollout\.connect\('exp', backend='ray'\).*rollout stop exp --ray"
    with pytest.raises(ConfigError, match=way_out):
        launch(world, tmp_path)
    with pytest.raises(ConfigError, match=way_out):  # and no other without an owner
        world.load("launch").launch_ray(first.config, launcher=HttpFakeLauncher())
    assert first["policy"].status().result(30).gate == "open"
    first.stop()


def test_a_launch_that_fails_leaves_nothing(world: World, tmp_path: Path) -> None:
    with pytest.raises(PhaseFailed, match="no such model layer"):
        launch(world, tmp_path, HttpFakeLauncher(fail_to_make))
    assert world.live_actors() == []
    launch(world, tmp_path).stop()


def test_a_run_that_has_lost_its_servers_can_be_stopped(world: World, tmp_path: Path) -> None:
    launch(world, tmp_path)
    world.ray.kill(world.ray.get_actor("rollout-exp-policy", namespace="rollout"))
    find = world.load("find_servers").find_servers
    (found,) = find("exp", address="auto", namespace="rollout")
    with pytest.raises(rollout.RolloutError, match="no server of this detached run lives"):
        found.state()
    with pytest.raises(rollout.RolloutError, match="owner-of-rollout-exp"):
        found.log_tail("main-0")
    found.stop()
    assert world.live_actors() == []


def test_what_would_end_with_the_script_is_refused(world: World, tmp_path: Path) -> None:
    group = world.ray.util.placement_group([{"CPU": 1}])
    with pytest.raises(ValueError, match=r"makes its own placement group.*trainer_slots"):
        world.load("launch").launch_ray(
            config(tmp_path, ONE), placement_group=group, bundles=[0], detached=True
        )
    world.ray.shutdown()
    with pytest.raises(ConfigError, match=r"would end with this script.*ray start --head"):
        launch(world, tmp_path)
    with pytest.raises(ValueError, match="detached=True needs backend='ray'"):
        rollout.launch(config(tmp_path, ONE), detached=True)
