"""What the handle of a server offers: what a training loop reads aloud, and three groups."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.served_fakes import TIMEOUT_S, launched

IN_A_LOOP = """
    name url weight_version status close
    generate stream session abort
    offloaded offload serve push pusher
"""
GROUPS = {
    "phases": """
        pause_generation flush_cache release_memory_occupation onload_weights update_weights verify
        onload_kv continue_generation snapshot make_push
    """,
    "engines": "add remove",
    "checks": "base_differs canary_prompts expect push_path",
}


def members(one: object) -> set[str]:
    return {name for name in dir(one) if not name.startswith("_")}


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[ServerHandle]:
    with launched(launch_local, tmp_path, {"main": {"num_engines": 2}}) as deployment:
        yield deployment["policy"]


def test_a_handle_has_what_a_loop_needs_and_groups(policy: ServerHandle) -> None:
    assert len(IN_A_LOOP.split()) == 14
    assert members(policy) == {*IN_A_LOOP.split(), *GROUPS}


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_made_once_and_has_its_calls_alone(group: str, policy: ServerHandle) -> None:
    assert getattr(policy, group) is getattr(policy, group)
    assert members(getattr(policy, group)) == set(GROUPS[group].split())


def test_the_groups_of_a_pickled_handle_and_pickled_groups_call_the_same_server(
    policy: ServerHandle,
) -> None:
    copy = pickle.loads(pickle.dumps(policy))
    phases, engines, checks = pickle.loads(
        pickle.dumps((policy.phases, policy.engines, policy.checks))
    )
    copy.phases.pause_generation().result(TIMEOUT_S)
    assert policy.status().result(TIMEOUT_S).phase == "paused"
    phases.continue_generation().result(TIMEOUT_S)
    engines.remove("main-1").result(TIMEOUT_S)
    (group,) = policy.status().result(TIMEOUT_S).groups
    assert (group.phase, group.vacant_slots) == ("serving", ("main-1",))
    assert checks.canary_prompts == policy.checks.canary_prompts
