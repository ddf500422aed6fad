"""Every command in every situation that decides about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines.embedded.core.errors import Conflict
from engines.embedded.generation import command_rules
from engines.embedded.generation.command_rules import Situation
from engines.protocol import MemoryTag, PauseMode

W, KV, GRAPH = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
Check = Callable[[Situation], None]

RELEASE: Check = lambda now: command_rules.require_can_release(now, [W, KV])  # noqa: E731
RESUME: Check = lambda now: command_rules.require_can_resume(now, [W])  # noqa: E731
ABORT: Check = lambda now: command_rules.require_can_pause(now, PauseMode.ABORT)  # noqa: E731
FLUSHING: Check = lambda now: command_rules.require_can_flush_after_update(now, "update")  # noqa: E731
WEIGHTS: Check = lambda now: command_rules.require_weights(now, "update")  # noqa: E731
ADMIT, CONTINUE = command_rules.require_can_admit, command_rules.require_can_continue

TABLE: list[tuple[Check, dict[str, Any], str | None]] = [
    (RELEASE, {}, None),
    (RELEASE, {"is_saver_enabled": False}, "enable-memory-saver"),
    (RELEASE, {"num_in_flight": 2}, "2 requests"),
    (RELEASE, {"num_in_flight": 2, "paused": PauseMode.IN_PLACE}, "paused in_place"),
    (RELEASE, {"num_in_flight": 2, "paused": PauseMode.RETRACT}, None),
    (RELEASE, {"released": {GRAPH}}, None),
    (RELEASE, {"released": {KV}}, "kv_cache"),
    (RESUME, {}, "weights"),
    (RESUME, {"released": {KV}}, "weights"),
    (RESUME, {"released": {W}}, None),
    (RESUME, {"released": {W}, "is_saver_enabled": False}, "enable-memory-saver"),
    (ABORT, {}, None),
    (ABORT, {"num_in_flight": 1}, None),
    (ABORT, {"num_in_flight": 1, "paused": PauseMode.RETRACT}, None),
    (ABORT, {"num_in_flight": 0, "paused": PauseMode.IN_PLACE}, None),
    (ABORT, {"num_in_flight": 1, "paused": PauseMode.IN_PLACE}, "deadlock"),
    (CONTINUE, {"paused": PauseMode.ABORT}, None),
    (CONTINUE, {"released": {W}}, "weights"),
    (CONTINUE, {"released": {KV}}, "kv_cache"),
    (CONTINUE, {"released": {GRAPH}}, None),
    (ADMIT, {}, None),
    (ADMIT, {"released": {W, KV}}, "weights, kv_cache"),
    (WEIGHTS, {"released": {KV}}, None),
    (WEIGHTS, {"released": {W}}, "weights"),
    (FLUSHING, {"num_in_flight": 1}, "flush_cache false"),
    (FLUSHING, {"num_in_flight": 1, "paused": PauseMode.RETRACT}, None),
    (FLUSHING, {}, None),
]


@pytest.mark.parametrize(("check", "situation", "words"), TABLE)
def test_a_command_is_allowed_or_says_why_not(
    check: Check, situation: dict[str, Any], words: str | None
) -> None:
    situation = {**situation, "released": frozenset(situation.get("released", ()))}
    now = Situation(**situation)
    if words is None:
        check(now)
    else:
        with pytest.raises(Conflict, match=words):
            check(now)
