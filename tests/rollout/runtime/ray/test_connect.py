"""A run on a Ray cluster is used from other processes and from actors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.core.errors import ConfigError
from rollout.runtime.handle import DeploymentHandle, RunHandle
from rollout.runtime.local import launch_local
from tests.support.pages import run_code
from tests.support.ray_worlds import RayWorld
from tests.support.served_fakes import launched

pytestmark = [pytest.mark.ray, pytest.mark.torch]

ONE = {"main": {"num_engines": 1}}
NAMESPACE = "team-a"
OTHER_PROCESS = """
import sys, rollout
run, address, namespace = sys.argv[1:]
policy = rollout.connect(run, backend="ray", address=address, namespace=namespace)["policy"]
policy.phases.pause_generation().result(30)
print(policy.status().result(30).phase, policy.weight_version, policy.url)
policy.phases.continue_generation().result(30)
"""


class Rank:
    """A process of a trainer."""

    def connect(self, run: str, **more: Any) -> tuple[str, str]:
        self.policy = rollout.connect(run, **more)["policy"]
        return self.policy.url, self.policy.status().result(30).phase

    def take(self, policy: rollout.ServerHandle) -> str:
        self.policy = policy
        return policy.url

    def take_run(self, run: RunHandle) -> tuple[type, list[str]]:
        self.policy = run["policy"]
        return type(run), list(run)

    def push(self) -> int:
        import torch

        with self.policy.pusher() as pusher:
            expected = pusher.server.expected
            assert expected is not None
            weights = {
                name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
                for name, spec in expected.tensors.items()
            }
            return pusher.push(weights).weight_version


@pytest.fixture(scope="module")
def run(
    ray_cluster: RayWorld, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    launch = ray_cluster.load("launch").launch_ray
    more = {"run_id": "exp", "cluster": {"namespace": NAMESPACE}}
    with launched(launch, tmp_path_factory.mktemp("run"), ONE, **more) as deployment:
        yield deployment


@pytest.fixture
def rank(ray_cluster: RayWorld) -> Iterator[Any]:
    ray = ray_cluster.ray
    actor = ray.remote(num_cpus=0)(Rank).remote()

    class Caller:
        def __getattr__(self, method: str) -> Any:
            return lambda *args, **kwargs: ray.get(
                getattr(actor, method).remote(*args, **kwargs), timeout=60
            )

    yield Caller()
    ray.kill(actor)


def test_another_process_joins_the_cluster_by_its_address(
    ray_cluster: RayWorld, run: DeploymentHandle
) -> None:
    policy = run["policy"]
    address = ray_cluster.ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, "exp", address, NAMESPACE],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout.split() == ["paused", str(policy.weight_version), policy.url], done.stderr
    assert policy.status().result(30).phase == "serving"


@pytest.mark.parametrize("backend", [None, "ray"])
def test_an_actor_connects_by_the_name_of_the_run_and_pushes(
    run: DeploymentHandle, rank: Any, backend: str | None
) -> None:
    before = run["policy"].weight_version
    found = rank.connect("exp", backend=backend, namespace=NAMESPACE)
    assert found == (run["policy"].url, "serving")
    assert rank.push() == before + 1
    assert run["policy"].weight_version == before + 1
    assert rank.push() == before + 2


def test_the_code_of_the_page_on_several_nodes(ray_cluster: RayWorld, tmp_path: Path) -> None:
    launch = ray_cluster.load("launch").launch_ray
    with launched(launch, tmp_path, ONE, run_id="run-id") as deployment:
        run_code("how-to/multi-node.md", rollout=rollout)
        assert deployment["policy"].status().result(30).phase == "offloaded"


def test_handles_go_into_actors(run: DeploymentHandle, rank: Any) -> None:
    before = run["policy"].weight_version
    assert rank.take(run["policy"]) == run["policy"].url
    assert rank.push() == before + 1
    assert rank.take_run(run) == (RunHandle, ["policy"])
    assert rank.push() == before + 2
    assert run["policy"].weight_version == before + 2


def test_a_handle_of_a_local_launch_goes_into_an_actor(rank: Any, tmp_path: Path) -> None:
    with launched(launch_local, tmp_path, ONE, run_id="local") as deployment:
        assert rank.take(deployment["policy"]) == deployment["policy"].url
        assert rank.push() == 1
        assert rank.connect(str(tmp_path / "local"))[0] == deployment["policy"].url


def test_a_run_in_another_namespace_is_named_with_it(run: DeploymentHandle) -> None:
    with pytest.raises(ConfigError, match=r"namespace 'rollout'; .*rollout-exp-policy .*'team-a'"):
        rollout.connect("exp", backend="ray")


def test_a_key_is_not_for_ray(run: DeploymentHandle) -> None:
    with pytest.raises(ValueError, match="key is of a local launch"):
        rollout.connect("exp", backend="ray", key="secret")
    with pytest.raises(ConfigError, match=r"needs the key .*backend='ray'"):
        rollout.connect("exp", address="127.0.0.1:6379")
