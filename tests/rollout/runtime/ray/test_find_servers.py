"""Finding a run on a cluster by its name, and asking it while a step hangs."""

from pathlib import Path

import pytest

from rollout.core.errors import ConfigError
from tests.support.paged import page_of, until
from tests.support.ray_worlds import RayWorld
from tests.support.served_fakes import engines_of, launched

pytestmark = pytest.mark.ray
ONE = {"main": {"num_engines": 1}}


def test_a_run_is_found_by_name_and_answers_while_a_phase_hangs(
    ray_cluster: RayWorld, tmp_path: Path
) -> None:
    from rollout.runtime.ray.find_servers import find_servers

    launch = ray_cluster.load("launch").launch_ray
    with (
        launched(launch, tmp_path, ONE, run_id="looked-at") as handle,
        engines_of(handle["policy"]) as engines,
    ):
        (source,) = find_servers("looked-at", address="auto", namespace="rollout")
        assert source.state()["phase"] == "serving"
        engines["main-0"].hold("pause_generation")
        pending = handle["policy"].phases.pause_generation()
        engines["main-0"].wait_entered("pause_generation")
        until(lambda: source.state()["engines"][0]["doing"] is not None, "it is seen pausing")
        assert source.state()["lock_owner"] == "pause_generation"
        assert isinstance(source.log_tail("main-0"), str)
        with page_of(handle.config) as page:
            log = page.get("/api/engines/main-0/log?lines=1").raise_for_status().json()
        assert log["tail"].split()[1] == "pause_generation"  # read by the actor of the engine
        engines["main-0"].open("pause_generation")
        pending.result(30)
        source.stop()
        ray_cluster.ray.kill(source.port._actor)  # as its script does when the engines are gone
        source.stop()


def test_a_run_that_is_not_there_is_named_with_those_that_are(ray_cluster: RayWorld) -> None:
    from rollout.runtime.ray.find_servers import find_servers

    with pytest.raises(ConfigError, match="no server of run 'nobody' in namespace 'rollout'"):
        find_servers("nobody", address="auto", namespace="rollout")


@pytest.mark.parametrize(
    ("actor", "run_id", "server"),
    [
        ("rollout-exp-policy", "exp", "policy"),
        ("rollout-exp-2-policy", "exp", ""),
        ("rollout-exp-2-policy", "exp-2", "policy"),
        ("rollout-exp", "exp", ""),
        ("other-exp-policy", "exp", ""),
        ("rollout-exp-policy_b", "exp", "policy_b"),
        ("rollout-rollout-exp-policy", "rollout-exp", "policy"),
    ],
)
def test_an_actor_belongs_to_the_run_of_exactly_this_name(
    ray_cluster: RayWorld, actor: str, run_id: str, server: str
) -> None:
    from rollout.runtime.ray.find_servers import server_of

    assert server_of(actor, run_id) == server
