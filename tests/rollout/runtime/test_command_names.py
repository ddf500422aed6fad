"""A command has one name: member of ``Command``, method of ``policy.phases``, error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeLauncher
from rollout.config import RolloutConfig
from rollout.core.errors import LifecycleError
from rollout.rules.lifecycle import Command, GroupTraits, Phase, legal_commands
from rollout.runtime.calls.phase_commands import PhaseCommands
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.runtime.local import launch_local
from tests.support.builders import push, write_checkpoint

TIMEOUT_S = 30
DOWN = ("pause_generation", "flush_cache", "release_memory_occupation")
UP = ("onload_weights", "update_weights", "verify", "onload_kv", "continue_generation")
# Commands that bring the group into each phase.
WAY = {
    "serving": (),
    "paused": DOWN[:1],
    "flushed": DOWN[:2],
    "offloaded": DOWN,
    "weights_onloaded": (*DOWN, *UP[:1]),
    "weights_updated": (*DOWN, *UP[:2]),
    "verified": (*DOWN, *UP[:3]),
    "kv_onloaded": (*DOWN, *UP[:4]),
}
# Some command that each phase refuses.
REFUSED = dict.fromkeys(WAY, "release_memory_occupation") | {
    "offloaded": "verify",
    "weights_onloaded": "onload_kv",
    "weights_updated": "onload_kv",
    "verified": "flush_cache",
    "kv_onloaded": "flush_cache",
    "flushed": "onload_kv",
}


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[DeploymentHandle]:
    config = RolloutConfig.from_dict(
        {
            "log_dir": str(tmp_path / "logs"),
            "servers": {
                "policy": {
                    "model_path": write_checkpoint(tmp_path),
                    "groups": {"main": {"engine": {"kind": "fake"}}},
                }
            },
        }
    )
    launcher = FakeLauncher()
    with launch_local(config, launcher=launcher, connect=launcher.connect) as handle:
        yield handle


def run(policy: ServerHandle, name: str) -> Any:
    arguments = () if name != "update_weights" else (push(policy.weight_version + 1),)
    return getattr(policy.phases, name)(*arguments).result(TIMEOUT_S)


def test_each_command_is_a_method_of_phases() -> None:
    methods = {name for name in vars(PhaseCommands) if not name.startswith("_")}
    assert {command.value for command in Command} == methods - {"make_push"}
    assert all(command.name == command.value.upper() for command in Command)


@pytest.mark.parametrize(
    ("phase", "legal"),
    [
        (phase, legal.value)
        for phase in WAY
        for legal in legal_commands(Phase(phase), GroupTraits(needs_offload=True))
    ],
)
def test_what_an_error_names_as_legal_can_be_called(
    deployment: DeploymentHandle, phase: str, legal: str
) -> None:
    policy = deployment["policy"]
    for name in WAY[phase]:
        run(policy, name)
    with pytest.raises(LifecycleError, match=f"cannot {REFUSED[phase]} while {phase};") as refused:
        run(policy, REFUSED[phase])
    assert (refused.value.command, refused.value.phase) == (REFUSED[phase], phase)
    assert legal in refused.value.legal
    assert list(run(policy, legal).phase_s) == [legal]
