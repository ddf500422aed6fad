"""Verdicts and plans: tables of every state and every finding, no engine anywhere."""

from dataclasses import replace

import pytest

from rollout.config import HealthConfig
from rollout.core.errors import LifecycleError
from rollout.rules.health import (
    EDGES,
    PROBE_KINDS,
    EngineHealth,
    GroupHealth,
    Liveness,
    ProbeKind,
    ProbeResult,
    RecoveryEvent,
    RecoveryState,
    Restart,
    Streaks,
    check_again_s,
    has_enough_without,
    liveness,
    next_retry_s,
    next_state,
    observe,
    out_of_routing,
    plan_recovery,
    why_other_process,
    why_other_version,
)
from rollout.rules.lifecycle import Phase

CONFIG = HealthConfig(
    probes_to_dead=3,
    max_restarts=3,
    backoff_s=1.0,
    max_backoff_s=4.0,
)
WELL = EngineHealth()
DEAD = EngineHealth(state=RecoveryState.DEAD, reason="it died", is_fenced=True)
SLOW = EngineHealth(streaks=Streaks(failed_probes=2))


def seen(*findings: ProbeResult) -> Streaks:
    streaks = Streaks()
    for finding in findings:
        streaks = observe(streaks, finding, CONFIG)
    return streaks


def group(**more) -> GroupHealth:
    given = {"phase": Phase.SERVING, "needs_offload": True, "min_engines": 1, "max_restarts": 3}
    return GroupHealth("main", **given | more)


# -- the verdict --------------------------------------------------------------------------------

A, F, Z, R, X, N, C = (
    ProbeResult.ANSWERED,
    ProbeResult.FAILED,
    ProbeResult.ASLEEP,
    ProbeResult.REPORTED,
    ProbeResult.EXITED,
    ProbeResult.FENCED,
    ProbeResult.CHANGED,
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # every state of the streaks x every finding: (failed probes, reports, calm, certain)
        ((0, 0, 0, False), {A: (0, 0, 1, False), F: (1, 0, 0, False), R: (0, 1, 0, False)}),
        ((1, 0, 0, False), {A: (0, 0, 1, False), F: (2, 0, 0, False), R: (1, 1, 0, False)}),
        ((0, 1, 0, False), {A: (0, 1, 1, False), F: (1, 1, 0, False), R: (0, 2, 0, False)}),
        ((2, 1, 0, False), {A: (0, 1, 1, False), F: (3, 1, 0, False), R: (2, 2, 0, False)}),
        ((0, 1, 11, False), {A: (0, 0, 12, False), F: (1, 1, 0, False), R: (0, 2, 0, False)}),
        ((0, 0, 0, True), {A: (0, 0, 1, True), F: (1, 0, 0, True), R: (0, 1, 0, True)}),
    ],
)
def test_every_result_changes_the_streaks_as_in_the_table(before, after) -> None:
    streaks = Streaks(*before)
    certain = replace(streaks, is_certain=True)
    expected = {finding: Streaks(*counts) for finding, counts in after.items()}
    expected |= {Z: streaks, X: certain, N: certain, C: certain}
    assert {finding: observe(streaks, finding, CONFIG) for finding in ProbeResult} == expected


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ((), Liveness.ALIVE),
        ((F,), Liveness.ALIVE),
        ((F, F), Liveness.SUSPECT),
        ((F, F, F), Liveness.DEAD),
        ((F, F, A), Liveness.ALIVE),
        ((F, A, F, A, F, A, F, A), Liveness.ALIVE),
        ((F, F, A, F, F, A, F, F), Liveness.SUSPECT),
        ((F, Z, F), Liveness.SUSPECT),
        ((Z, Z, Z, Z), Liveness.ALIVE),
        ((R,), Liveness.SUSPECT),
        ((R, A), Liveness.ALIVE),
        ((R, A, R), Liveness.SUSPECT),
        ((R, A, R, R), Liveness.DEAD),
        ((R, R, *[A] * 11, R), Liveness.DEAD),
        ((R, R, *[A] * 12, R), Liveness.SUSPECT),
        ((R, F), Liveness.SUSPECT),
        ((X,), Liveness.DEAD),
        ((N,), Liveness.DEAD),
        ((X, A), Liveness.DEAD),
    ],
)
def test_the_verdict_comes_from_the_streaks(findings, expected) -> None:
    assert liveness(seen(*findings), CONFIG) is expected


def test_an_engine_that_its_group_cannot_spare_is_given_more_time() -> None:
    late = seen(F, F, F)
    assert liveness(late, CONFIG, can_spare=False) is Liveness.SUSPECT
    assert liveness(replace(late, failed_probes=8), CONFIG, can_spare=False) is Liveness.SUSPECT
    assert liveness(replace(late, failed_probes=9), CONFIG, can_spare=False) is Liveness.DEAD
    assert liveness(seen(X), CONFIG, can_spare=False) is Liveness.DEAD


def test_when_all_are_late_at_once_none_can_be_spared() -> None:
    assert not has_enough_without("a", {"a": SLOW, "b": SLOW, "c": SLOW}, 1)
    assert has_enough_without("a", {"a": SLOW, "b": WELL, "c": SLOW}, 1)
    assert not has_enough_without("a", {"a": SLOW, "b": WELL, "c": SLOW}, 2)
    assert not has_enough_without("a", {"a": SLOW, "b": DEAD}, 0)


def test_only_an_engine_that_should_serve_is_asked_whether_it_does() -> None:
    assert [phase for phase, look in PROBE_KINDS.items() if look is ProbeKind.READY] == [
        Phase.SERVING
    ]
    assert PROBE_KINDS[Phase.OFFLOADED] is ProbeKind.PROCESS
    assert set(PROBE_KINDS) == set(Phase)


# -- the way back -------------------------------------------------------------------------------

LEGAL = {
    (RecoveryState.SERVING, RecoveryEvent.DIED),
    (RecoveryState.BOOTING, RecoveryEvent.DIED),
    (RecoveryState.BOOTED, RecoveryEvent.DIED),
    (RecoveryState.STALE, RecoveryEvent.DIED),
    (RecoveryState.SERVING, RecoveryEvent.LAGGED),
    (RecoveryState.DEAD, RecoveryEvent.BOOT),
    (RecoveryState.BOOTING, RecoveryEvent.BOOTED),
    (RecoveryState.BOOTING, RecoveryEvent.INTERRUPTED),
    (RecoveryState.BOOTED, RecoveryEvent.INTERRUPTED),
    (RecoveryState.BOOTED, RecoveryEvent.ADMITTED),
    (RecoveryState.STALE, RecoveryEvent.VERIFIED),
}


@pytest.mark.parametrize("state", RecoveryState)
@pytest.mark.parametrize("event", RecoveryEvent)
def test_there_is_no_edge_but_those_of_the_table(
    state: RecoveryState, event: RecoveryEvent
) -> None:
    if (state, event) in LEGAL:
        assert next_state(state, event) is EDGES[state, event]
    else:
        with pytest.raises(LifecycleError, match="possible now"):
            next_state(state, event)


def test_a_dead_engine_serves_again_only_after_boot_admission_and_verification() -> None:
    way = [DEAD, DEAD.booting(1.0)]
    way += [way[-1].booted(2.0)]
    way += [way[-1].admitted(2.5)]
    way += [way[-1].verified(3.0)]
    assert [health.state for health in way] == [
        RecoveryState.DEAD,
        RecoveryState.BOOTING,
        RecoveryState.BOOTED,
        RecoveryState.STALE,
        RecoveryState.SERVING,
    ]
    assert way[-1].streaks == Streaks()


def test_a_boot_that_is_ended_for_the_trainer_is_no_restart() -> None:
    for booting in (DEAD.booting(1.0), DEAD.booting(1.0).booted(2.0)):
        assert booting.interrupted(3.0) == replace(DEAD, since_s=3.0)


@pytest.mark.parametrize("finding", ProbeResult)
def test_nothing_that_is_found_changes_an_engine_that_is_out(finding: ProbeResult) -> None:
    assert DEAD.after(finding, CONFIG) == DEAD


@pytest.mark.parametrize(
    ("num_restarts", "wait_s"), [(0, 0.0), (1, 1.0), (2, 2.0), (3, 4.0), (9, 4.0)]
)
def test_the_backoff_doubles_up_to_its_limit(num_restarts: int, wait_s: float) -> None:
    died = EngineHealth(num_restarts=num_restarts).died("again", 50.0, CONFIG)
    assert died.retry_at_s == 50.0 + wait_s


def test_after_long_service_all_restarts_are_there_again() -> None:
    served = EngineHealth(num_restarts=3, since_s=10.0)
    assert served.died("again", 609.0, CONFIG).num_restarts == 3
    assert served.died("again", 610.0, CONFIG).num_restarts == 0


# -- the plan -----------------------------------------------------------------------------------


def test_a_dead_engine_is_restarted_and_a_healthy_one_is_not() -> None:
    engines = {"main-0": WELL, "main-1": DEAD, "main-2": SLOW}
    assert plan_recovery([group(engines=engines)], 0.0) == [Restart("main", "main-1")]


def test_no_engine_is_restarted_before_the_backoff_is_over() -> None:
    waiting = group(engines={"main-0": replace(DEAD, retry_at_s=7.0)})
    assert plan_recovery([waiting], 6.9) == []
    assert next_retry_s([waiting]) == 7.0
    assert len(plan_recovery([waiting], 7.0)) == 1


def test_no_engine_is_restarted_more_often_than_the_limit() -> None:
    worn = group(engines={"main-0": replace(DEAD, num_restarts=3)})
    assert plan_recovery([worn], 99.0) == []
    assert next_retry_s([worn]) is None


def test_not_more_are_started_at_once_than_the_limit() -> None:
    engines = {f"main-{index}": DEAD for index in range(5)}
    assert len(plan_recovery([group(engines=engines)], 0.0)) == 4


def test_engines_that_boot_count_towards_the_limit() -> None:
    engines = {f"main-{index}": DEAD for index in range(5)}
    for index in range(3):
        engines[f"main-{index}"] = DEAD.booting(1.0)
    assert plan_recovery([group(engines=engines)], 0.0) == [Restart("main", "main-3")]


@pytest.mark.parametrize("phase", Phase)
def test_a_group_that_offloads_is_left_alone_in_every_phase_but_serving(phase: Phase) -> None:
    going_on = group(phase=phase, engines={"main-0": WELL, "main-1": DEAD})
    assert bool(plan_recovery([going_on], 0.0)) is (phase is Phase.SERVING)


@pytest.mark.parametrize("phase", Phase)
def test_below_its_fewest_engines_it_waits_only_for_its_memory(phase: Phase) -> None:
    stuck = group(phase=phase, engines={"main-0": DEAD})
    assert bool(plan_recovery([stuck], 0.0)) is (phase is not Phase.OFFLOADED)


@pytest.mark.parametrize("phase", [Phase.SERVING, Phase.PAUSED, Phase.FLUSHED])
def test_a_group_that_keeps_its_gpus_is_mended_while_the_others_are_offloaded(phase) -> None:
    apart = group(phase=phase, needs_offload=False, engines={"main-0": WELL, "main-1": DEAD})
    assert len(plan_recovery([apart], 0.0)) == 1


# -- routing ------------------------------------------------------------------------------------


def test_the_dead_get_no_requests_and_a_suspect_none_if_another_is_healthy() -> None:
    engines = {"main-0": WELL, "main-1": DEAD, "main-2": SLOW}
    out = out_of_routing(group(engines=engines), CONFIG)
    assert {name: known for name, (known, _) in out.items()} == {
        "main-1": Liveness.DEAD,
        "main-2": Liveness.SUSPECT,
    }


def test_a_slow_engine_is_better_than_none() -> None:
    assert out_of_routing(group(engines={"main-0": SLOW, "main-1": SLOW}), CONFIG) == {}


def test_an_engine_the_router_lost_stays_out_until_it_answers() -> None:
    lost = EngineHealth().after(R, CONFIG)
    assert list(out_of_routing(group(engines={"main-0": lost}), CONFIG)) == ["main-0"]
    answered = lost.after(A, CONFIG)
    assert out_of_routing(group(engines={"main-0": answered}), CONFIG) == {}


# -- behind our back ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "held", "is_other"),
    [
        (1, "1", False),
        (0, "0", False),
        (None, "1", False),
        (1, "0", True),
        (1, "2", True),
        (1, "default", True),
        (1, "", True),
        (1, "unverified-1", True),
        (0, "", True),
    ],
)
def test_another_version_is_one_that_is_not_recorded(
    known: int | None, held: str, is_other: bool
) -> None:
    assert bool(why_other_version(known, held)) is is_other


@pytest.mark.parametrize(
    ("known", "found", "is_other"),
    [("a", "a", False), ("", "a", False), ("a", "", False), ("", "", False), ("a", "b", True)],
)
def test_another_process_is_one_with_another_start(known: str, found: str, is_other: bool) -> None:
    why = why_other_process(known, found)
    assert bool(why) is is_other
    assert not why or ("b, and not a" in why and "its weights are unknown" in why)


@pytest.mark.parametrize("took_s", [0.0, 0.01, 3.0, 100.0])
def test_checks_take_one_part_in_a_hundred_at_most(took_s: float) -> None:
    again_s = check_again_s(50.0 + took_s, took_s)
    assert took_s <= 0.01 * (again_s - 50.0)
