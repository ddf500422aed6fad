"""The record of all engines' health, without engines."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from rollout.config import HealthConfig
from rollout.control.group.health_probe import EngineProbe, GroupProbe
from rollout.control.recovery.health_tracker import GroupTerms, HealthTracker
from rollout.core.errors import RolloutError
from rollout.rules.health import ProbeResult, RecoveryState, is_any_readmission_due
from rollout.rules.lifecycle import Phase


class CountingTerms:
    """The terms of a group that count how often the group as a whole is considered."""

    needs_offload = False
    has_processes = True
    num_reads = 0

    @property
    def min_engines(self) -> int:
        self.num_reads += 1
        return 1


@pytest.mark.parametrize(
    ("finding", "num_reads"),
    [(ProbeResult.ANSWERED, 0), (ProbeResult.FAILED, 0), (ProbeResult.EXITED, 8)],
)
def test_a_round_of_probes_considers_the_group_only_for_engines_that_may_be_dead(
    finding: ProbeResult, num_reads: int
) -> None:
    terms: Any = CountingTerms()
    record = HealthTracker(HealthConfig(), {"main": terms}, dict, lambda: 0.0)
    names = [f"main-{index}" for index in range(8)]
    record.add_all({"main": names})
    probe = GroupProbe(True, tuple(EngineProbe(name, finding) for name in names))
    record.apply_probe("main", probe, record.snapshot()["main"])
    assert terms.num_reads == num_reads


def tracker(**states: RecoveryState) -> HealthTracker:
    """One group with an engine in each of these states, since a second ago."""
    record = HealthTracker(
        HealthConfig(), {"main": GroupTerms(False, 1)}, lambda: {"main": Phase.SERVING}, lambda: 1.0
    )
    record.add_all({"main": states})
    for name, state in states.items():
        record.change("main", name, lambda one, _, state=state: replace(one, state=state))
    return record


def state_of(record: HealthTracker, engine_id: str) -> RecoveryState:
    return record.snapshot()["main"][engine_id].state


@pytest.mark.parametrize(
    ("before", "is_stale", "after"),
    [
        (None, False, RecoveryState.SERVING),
        (None, True, RecoveryState.STALE),
        (RecoveryState.SERVING, False, RecoveryState.SERVING),
        (RecoveryState.SERVING, True, RecoveryState.STALE),
        (RecoveryState.STALE, False, RecoveryState.SERVING),
        (RecoveryState.STALE, True, RecoveryState.STALE),
        (RecoveryState.BOOTED, True, RecoveryState.BOOTED),
        (RecoveryState.DEAD, True, RecoveryState.DEAD),
    ],
)
def test_what_its_group_calls_stale_is_stale_and_is_readmitted(
    before: RecoveryState | None, is_stale: bool, after: RecoveryState
) -> None:
    record = tracker() if before is None else tracker(a=before)
    probe = GroupProbe(True, (EngineProbe("a", ProbeResult.ANSWERED, is_stale=is_stale),))
    record.apply_probe("main", probe, record.snapshot()["main"])
    assert state_of(record, "a") is after
    if after is RecoveryState.STALE and before is not after:
        assert is_any_readmission_due(record.groups(), can_restore=False)


def test_a_probe_that_began_before_an_engine_was_verified_does_not_make_it_stale() -> None:
    record = tracker(a=RecoveryState.STALE)
    probe = GroupProbe(True, (EngineProbe("a", ProbeResult.ANSWERED, is_stale=True),))
    before = record.snapshot()["main"]
    record.mark_verified("main", "a")
    record.apply_probe("main", probe, before)
    assert state_of(record, "a") is RecoveryState.SERVING


def test_an_engine_that_its_group_has_no_more_is_forgotten_and_one_that_came_meanwhile_is_not() -> (
    None
):
    record = tracker(gone=RecoveryState.SERVING, again=RecoveryState.SERVING)
    before = record.snapshot()["main"]
    record.change("main", "again", lambda one, _: replace(one, since_s=7.0))
    record.add("main", "new", is_stale=False)
    record.apply_probe("main", GroupProbe(True, ()), before)
    assert record.snapshot()["main"].keys() == {"again", "new"}


@pytest.mark.parametrize("state", RecoveryState)
def test_a_late_result_of_an_action_contradicts_no_probe_and_is_no_error(
    state: RecoveryState, caplog: pytest.LogCaptureFixture
) -> None:
    record = tracker(a=state)
    record.mark_verified("main", "a")
    is_stale = state is RecoveryState.STALE
    assert state_of(record, "a") is (RecoveryState.SERVING if is_stale else state)
    with caplog.at_level(logging.ERROR):
        record.mark_dead("main", "a", "could not be restored", RolloutError("why"))
    assert state_of(record, "a") is RecoveryState.DEAD
    assert len(caplog.records) == (state is not RecoveryState.DEAD)
