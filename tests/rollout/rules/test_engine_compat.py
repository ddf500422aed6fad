"""Which engines can be part of a group, and the message about the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engines.protocol import WorkerType
from engines.protocol.features import Features
from rollout.config import Drain, GroupConfig, WeightUpdate
from rollout.rules.engine_compat import why_incompatible

GOOD = Features(
    engine="sglang",
    version="0.5.23",
    worker_type=WorkerType.REGULAR,
    has_weight_session=True,
    is_retract_safe=True,
    has_memory_saver=True,
    has_weights_cpu_backup=True,
    num_payloads=1,
    takes_tensors=True,
    takes_flat_broadcast=True,
    streams_are_cumulative=True,
    undrivable="",
)


def why(
    update: WeightUpdate = WeightUpdate.FULL, drain: Drain = Drain.ABORT, **changed: Any
) -> str:
    return why_incompatible(
        replace(GOOD, **changed),
        GroupConfig(),
        update,
        drain,
        memory_saver=True,
        weights_cpu_backup=True,
    )


def test_an_engine_with_everything_is_let_in() -> None:
    assert why() == ""


@pytest.mark.parametrize(
    ("changed", "mending"),
    [
        ({"undrivable": "SGLang 0.4 cannot be driven"}, "cannot be driven"),
        ({"has_memory_saver": False}, "--enable-memory-saver"),
        ({"has_weights_cpu_backup": False}, "--enable-weights-cpu-backup"),
        ({"worker_type": WorkerType.DECODE}, "group of its own type"),
        ({"takes_tensors": False}, "one engine per replica"),
        ({"streams_are_cumulative": False}, "--incremental-streaming-output"),
    ],
)
def test_what_an_engine_lacks_is_reported_with_what_fixes_it(
    changed: dict[str, Any], mending: str
) -> None:
    said = why(**changed)
    assert mending in said
    assert "{engine}" in said


def test_a_frozen_model_may_have_replicas() -> None:
    assert why(WeightUpdate.FROZEN, takes_tensors=False) == ""


def test_an_engine_that_is_never_released_needs_no_memory_saver() -> None:
    bare = replace(GOOD, has_memory_saver=False, has_weights_cpu_backup=False)
    full = WeightUpdate.FULL
    group = GroupConfig(needs_offload=False)
    assert (
        why_incompatible(
            bare, group, full, Drain.FINISH, memory_saver=False, weights_cpu_backup=False
        )
        == ""
    )


@pytest.mark.parametrize("drain", list(Drain))
def test_requests_are_retracted_only_where_the_engine_survives_that(drain: Drain) -> None:
    reason = why(drain=drain, is_retract_safe=False)
    if drain is Drain.RETRACT:
        assert "crashes when memory is released while requests are retracted" in reason
        assert "set lifecycle.drain to abort or finish" in reason
    else:
        assert reason == ""
    assert why(drain=drain) == ""
