"""How long engines may take to start and to end, by what they are."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.config import EngineConfig, LifecycleConfig
from rollout.rules.deadlines import (
    group_margin_s,
    kill_timeout_s,
    leave_timeout_s,
    lock_timeout_s,
    start_timeout_s,
)

GB = 10**9


@pytest.mark.parametrize(
    ("engine", "num_bytes", "start_s", "kill_s"),
    [
        ({"kind": "fake"}, 0, 300, 25),
        ({"kind": "sglang", "gpus": 8}, 0, 900, 150),
        ({"kind": "sglang", "gpus": 8}, 140 * GB, 1600, 150),
        ({"kind": "sglang", "gpus": 0}, 1 * GB, 305, 25),
        ({"kind": "sglang"}, 1 * GB, 905, 150),
        (
            {"kind": "fake", "gpus": 1, "start_timeout_s": 60, "kill_timeout_s": 10},
            140 * GB,
            60,
            10,
        ),
    ],
)
def test_an_engine_on_gpus_gets_longer_and_a_large_checkpoint_too(
    engine: dict[str, Any], num_bytes: int, start_s: float, kill_s: float
) -> None:
    config = EngineConfig.model_validate(engine)
    assert start_timeout_s(config, num_bytes) == start_s
    assert kill_timeout_s(config) == kill_s
    assert group_margin_s(config) > kill_s + 5  # a group reads the log, then kills


def test_a_command_waits_as_long_as_a_push_may_take_and_a_leave_has_its_three_phases() -> None:
    assert (lock_timeout_s(LifecycleConfig()), leave_timeout_s(LifecycleConfig())) == (960, 240)
    longer = LifecycleConfig(command_timeout_s=1, memory_timeout_s=10, update_timeout_s=5000)
    assert (lock_timeout_s(longer), leave_timeout_s(longer)) == (5022, 12)
