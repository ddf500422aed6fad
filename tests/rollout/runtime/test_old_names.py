"""The old names of the handles' methods: they warn with the new ones, and do what those do."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.builders import push
from tests.support.served_fakes import TIMEOUT_S, launched


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    groups = {"main": {"engine": {"weights_cpu_backup": True}}}
    with launched(launch_local, tmp_path_factory.mktemp("old"), groups) as handle:
        yield handle


def next_push(deployment: DeploymentHandle) -> Any:
    return push(deployment["policy"].weight_version + 1)


# In this order: old name, call, new name, phase after it.
OLD: list[tuple[str, Callable[[Any], Any], str, str]] = [
    ("offload", lambda d: d["policy"].offload(), "give_memory", "offloaded"),
    ("onload", lambda d: d["policy"].onload(next_push(d)), "serve_weights", "serving"),
    ("offload", lambda d: d.offload(), "give_memory", "offloaded"),
    ("onload", lambda d: d["policy"].onload(), "serve", "serving"),
    ("sync_weights", lambda d: d["policy"].sync_weights(next_push(d)), "serve_weights", "serving"),
    ("onload_push", lambda d: d["policy"].onload_push(next_push(d)), "serve_weights", "serving"),
    ("onload_push", lambda d: d["policy"].onload_push(None), "serve", "serving"),
    ("onload", lambda d: d.onload({"policy": next_push(d)}), "serve_weights", "serving"),
    ("onload", lambda d: d.onload(), "serve", "serving"),
]


def test_each_old_name_warns_with_the_new_one_and_does_the_same(
    deployment: DeploymentHandle,
) -> None:
    policy = deployment["policy"]
    for old, call, new, phase in OLD:
        version = policy.weight_version
        with pytest.warns(DeprecationWarning, match=rf"^{old} is now .*{new}") as caught:
            pending = call(deployment)
        assert caught[0].filename == __file__
        pending.result(TIMEOUT_S)
        assert policy.status().result(TIMEOUT_S).phase == phase
        assert policy.weight_version == version + (new == "serve_weights")
