"""What a snapshot says to somebody who has never seen one."""

import time
from typing import Any

import pytest

from rollout.diagnosis import Weight, diagnose


def engine(engine_id: str, **more: Any) -> dict[str, Any]:
    return {
        "engine_id": engine_id,
        "group": "main",
        "url": f"http://10.0.0.1/{engine_id}",
        "pid": 4711,
        "weight_version": 3,
        "fenced_because": "",
        "is_stale": False,
        "routing": "serving",
        "because": "",
        **more,
    }


def span(kind: str, name: str, elapsed_s: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "start_s": 100.0, "elapsed_s": elapsed_s, **more}


def state(**more: Any) -> dict[str, Any]:
    return {
        "server": "policy",
        "is_answering": True,
        "trouble": "",
        "phase": "serving",
        "weight_version": 3,
        "gate": {"state": "open"},
        "lock_owner": "",
        "engines": [engine("main-0"), engine("main-1")],
        "running": [],
        "steps": [],
        **more,
    }


def stuck(elapsed_s: float = 40.0, **more: Any) -> dict[str, Any]:
    return state(
        phase="flushed",
        lock_owner="offload",
        gate={"state": "holding"},
        running=[
            span("phase", "release", elapsed_s, budget_s=120.0),
            span("engine", "release", elapsed_s, engine_id="main-1", budget_s=120.0),
            span("call", "release_memory_occupation", elapsed_s, engine_id="main-1", budget_s=60.0),
        ],
        **more,
    )


def test_a_server_that_serves_is_fine() -> None:
    (finding,) = diagnose(state())
    assert finding.weight is Weight.FINE


def test_a_stuck_phase_names_engine_call_and_since_when() -> None:
    finding = diagnose(stuck())[0]
    assert finding.weight is Weight.STUCK
    since = time.strftime("%H:%M:%S", time.localtime(100.0))
    assert finding.what == (
        f"release has waited 40.0 s for engine main-1, since {since} (deadline 120 s)"
    )
    assert "HTTP call release_memory_occupation without an answer for 40.0 s" in finding.because[0]
    assert "the other 1 of 2 engines are through" in finding.because[1]
    assert finding.because[2].startswith("in release, the engine gives its memory back")
    assert "in 80 s, at the deadline" in finding.advice[0]
    assert "kill -9 4711" in finding.advice[1]
    assert finding.engine_ids == ("main-1",)


def test_a_group_without_another_engine_is_said_to_fail() -> None:
    assert "the rest goes on" in diagnose(stuck())[0].advice[0]
    engines = [engine("main-0"), engine("main-1", group="judges")]
    assert "group judges has no other engine" in diagnose(stuck(engines=engines))[0].advice[0]
    engines = [engine("main-0", fenced_because="it hangs"), engine("main-1")]
    told = [one for one in diagnose(stuck(engines=engines)) if one.weight is Weight.STUCK]
    assert "group main has no other engine" in told[0].advice[0]


def test_an_attached_engine_is_not_to_be_killed_here() -> None:
    engines = [engine("main-0", pid=None), engine("main-1", pid=None)]
    advice = " ".join(diagnose(stuck(engines=engines))[0].advice)
    assert "kill -9" not in advice
    assert "where it was launched" in advice


def test_a_process_elsewhere_is_named_with_its_node() -> None:
    engines = [engine("main-0"), engine("main-1", node_id="a1b2c3")]
    assert "kill -9 4711 on node a1b2c3" in diagnose(stuck(engines=engines))[0].advice[1]


def test_a_phase_that_has_just_begun_is_watched_not_stuck() -> None:
    assert diagnose(stuck(2.0))[0].weight is Weight.WATCH


def test_what_is_not_yet_stuck_says_when_it_would_be() -> None:
    assert "stuck when it takes longer than 10.0 s" in " ".join(diagnose(stuck(2.0))[0].because)


def test_requests_that_wait_meanwhile_are_counted() -> None:
    now = stuck() | {"gate": {"state": "holding", "num_held": 7}}
    assert "7 requests wait at the router's gate" in " ".join(diagnose(now)[0].because)


@pytest.mark.parametrize(("elapsed_s", "weight"), [(70.0, Weight.WATCH), (91.0, Weight.STUCK)])
def test_a_phase_whose_deadline_is_short_for_what_it_takes_is_given_what_it_takes(
    elapsed_s: float, weight: Weight
) -> None:
    """Half of its deadline is 60 s, and it always takes 90."""
    now = stuck(elapsed_s, steps=[{"phase_s": {"release": 90.0}}])
    assert diagnose(now)[0].weight is weight


def test_a_phase_that_always_takes_long_is_not_stuck_at_once() -> None:
    usual = [{"phase_s": {"release": 9.0}}]
    now = stuck(20.0, steps=usual)
    assert diagnose(now)[0].weight is Weight.WATCH
    assert "usually takes 9.0 s" in " ".join(diagnose(now)[0].because)


def test_many_late_engines_are_counted_not_listed() -> None:
    now = stuck(engines=[engine(f"main-{index}") for index in range(256)])
    now["running"] += [
        span("engine", "release", 40.0, engine_id=f"main-{index}") for index in range(2, 200)
    ]
    finding = diagnose(now)[0]
    assert "engines main-1, main-2, main-3 and 196 more" in finding.what
    assert len(finding.because) < 10


def test_a_silent_server_comes_before_all_that_it_said_last() -> None:
    finding = diagnose(stuck() | {"is_answering": False, "trouble": "no answer"})[0]
    assert "does not answer: no answer" in finding.what


def test_a_closed_gate_says_why_and_what_to_repeat() -> None:
    gate = {"state": "closed", "reason": "release took longer than 60 s", "in_state_s": 90.0}
    finding = diagnose(state(phase="flushed", gate=gate | {"num_held": 3}))[0]
    assert finding.weight is Weight.WRONG
    assert "release took longer than 60 s; 3 requests wait" in finding.what
    assert "repeat the command" in finding.advice[0]


def test_engines_that_wait_for_the_trainer_are_no_trouble() -> None:
    gate = {"state": "holding", "reason": "paused", "in_state_s": 30.0}
    finding = diagnose(state(phase="offloaded", gate=gate))[0]
    assert finding.weight is Weight.WATCH
    assert "trainer has the GPUs" in finding.because[0]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"is_on": False, "because": "no room on node-1"}, "is off: no room on node-1"),
        ({"lag": 3}, "is 3 versions behind"),
    ],
)
def test_a_store_that_does_not_keep_up_is_said(more: dict[str, Any], told: str) -> None:
    store = {"is_on": True, "because": "", "version": 1, "lag": 1, "write_s": 2.0}
    assert diagnose(state(store=store))[0].weight is Weight.FINE
    assert told in diagnose(state(store=store | more))[0].what


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"fenced_because": "it hangs\nlog"}, "engine main-1 is fenced: it hangs"),
        ({"is_stale": True}, "lacks the published weights"),
        ({"routing": "dead", "because": "refused"}, "gets no requests: refused"),
        ({"weight_version": 2}, "engine main-1 hold weight version 2, published is 3"),
    ],
)
def test_each_thing_wrong_with_an_engine_is_said(more: dict[str, Any], told: str) -> None:
    findings = diagnose(state(engines=[engine("main-0"), engine("main-1", **more)]))
    assert told in findings[0].what
