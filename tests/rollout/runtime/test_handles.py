"""Handles as a program starts, shows and ends them: ``wait``, ``repr``, ``async with``."""

import contextlib
import pickle
from pathlib import Path

import pytest

import rollout
from engines.fake.http_fake import HttpFakeLauncher
from rollout.core.errors import PhaseFailed, RolloutError
from rollout.runtime.local import launch_local
from tests.support.served_fakes import TIMEOUT_S, config, fail_to_make, launched


def test_a_handle_shows_its_name_address_and_backend_without_a_call(tmp_path: Path) -> None:
    with launched(launch_local, tmp_path, {"main": {}}) as deployment:
        policy = deployment["policy"]
        assert repr(policy) == "ServerHandle('policy', backend='local')"
        url = policy.url
        shown = f"ServerHandle('policy', url='{url}', backend='local')"
        assert repr(policy) == shown
        assert repr(deployment) == f"DeploymentHandle([{shown}])"
        assert repr(pickle.loads(pickle.dumps(policy))) == "ServerHandle('policy', backend='local')"


async def test_async_with_ends_a_deployment_and_a_driver(tmp_path: Path) -> None:
    with launched(launch_local, tmp_path, {"main": {}}) as started:
        async with started as deployment:
            policy = deployment["policy"]
            async with rollout.Driver((await policy.status()).router_url) as driver:
                pass
            with pytest.raises(RolloutError, match="driver is closed"):
                driver.set_weight_version(1)
            assert (await policy.status()).phase == "serving"
        with pytest.raises(RolloutError, match="closed"):
            policy.status().result(TIMEOUT_S)


def test_a_launch_that_is_not_waited_for_is_ready_later(tmp_path: Path) -> None:
    launcher = HttpFakeLauncher()
    with launch_local(config(tmp_path, {"main": {}}), launcher=launcher, wait=False) as deployment:
        assert deployment.ready().result(TIMEOUT_S)["policy"].phase == "serving"


def test_the_error_of_a_launch_that_is_not_waited_for_comes_with_ready(tmp_path: Path) -> None:
    deployment = launch_local(
        config(tmp_path, {"main": {}}), launcher=HttpFakeLauncher(fail_to_make), wait=False
    )
    with pytest.raises(PhaseFailed, match="no such model layer"):
        deployment.ready().result(TIMEOUT_S)
    with pytest.raises(RolloutError, match="closed"):
        deployment.status()


def test_a_stop_while_it_starts_ends_the_launch(tmp_path: Path) -> None:
    launcher = HttpFakeLauncher()
    deployment = launch_local(config(tmp_path, {"main": {}}), launcher=launcher, wait=False)
    deployment.stop()
    with contextlib.suppress(RolloutError):  # or it was faster than the stop
        deployment.ready().result(TIMEOUT_S)
    with pytest.raises(RolloutError, match="closed"):
        deployment.status()


@pytest.mark.parametrize("kind", [rollout.ServerHandle, rollout.DeploymentHandle, rollout.Driver])
def test_every_public_method_has_a_docstring(kind: type) -> None:
    public = {name: method for name, method in vars(kind).items() if not name.startswith("_")}
    assert public
    assert [name for name, method in public.items() if not (method.__doc__ or "").strip()] == []
