"""The findings for each kind of snapshot."""

import time
from typing import Any

import pytest

from rollout.rules.diagnosis import Severity, diagnose


def engine(engine_id: str, **more: Any) -> dict[str, Any]:
    return {
        "engine_id": engine_id,
        "group": "main",
        "url": f"http://10.0.0.1/{engine_id}",
        "pid": 4711,
        "weight_version": 3,
        "fence_reason": "",
        "is_stale": False,
        "routing": "serving",
        "reason": "",
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
        "weight_version": 5,  # of an adapter
        "base_version": 3,
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
            span("phase", "release_memory_occupation", elapsed_s, budget_s=120.0),
            span(
                "engine", "release_memory_occupation", elapsed_s, engine_id="main-1", budget_s=120.0
            ),
            span("call", "release_memory_occupation", elapsed_s, engine_id="main-1", budget_s=60.0),
        ],
        **more,
    )


def test_a_server_that_serves_is_fine() -> None:
    (finding,) = diagnose(state())
    assert finding.severity is Severity.FINE


def test_engines_that_start_are_not_counted_before_they_are_known() -> None:
    starting = [
        span("group", "start", 400.0),
        *(span("engine", "start", 400.0, engine_id=f"main-{index}") for index in range(5)),
    ]
    finding = diagnose(state(engines=[], running=starting))[0]
    text = "\n".join((*finding.details, *finding.advice))
    assert " of 0 engines" not in text
    assert "attached" not in text
    assert "raise engine.start_timeout_s" in text


def test_a_stuck_phase_names_engine_call_and_since_when() -> None:
    finding = diagnose(stuck())[0]
    assert finding.severity is Severity.STUCK
    since = time.strftime("%H:%M:%S", time.localtime(100.0))
    assert finding.what == (
        "release_memory_occupation has waited 40.0 s for engine main-1, "
        f"since {since} (deadline 120 s)"
    )
    assert "HTTP call release_memory_occupation without a reply for 40.0 s" in finding.details[0]
    assert "the other 1 of 2 engines have finished" in finding.details[1]
    assert finding.details[2].startswith(
        "in release_memory_occupation, the engine releases its memory"
    )
    assert "in 80 s, at the deadline" in finding.advice[0]
    assert "kill -9 4711" in finding.advice[1]
    assert finding.engine_ids == ("main-1",)


def test_a_group_without_another_engine_is_reported_to_fail() -> None:
    assert "the other engines continue" in diagnose(stuck())[0].advice[0]
    engines = [engine("main-0"), engine("main-1", group="judges")]
    assert "group judges has no other engine" in diagnose(stuck(engines=engines))[0].advice[0]
    engines = [engine("main-0", fence_reason="it hangs"), engine("main-1")]
    findings = diagnose(stuck(engines=engines))
    stuck_ones = [finding for finding in findings if finding.severity is Severity.STUCK]
    assert "group main has no other engine" in stuck_ones[0].advice[0]


def test_an_attached_engine_is_not_to_be_killed_here() -> None:
    engines = [engine("main-0", pid=None), engine("main-1", pid=None)]
    advice = " ".join(diagnose(stuck(engines=engines))[0].advice)
    assert "kill -9" not in advice
    assert "where it was launched" in advice


def test_a_process_elsewhere_is_named_with_its_node() -> None:
    engines = [engine("main-0"), engine("main-1", node_id="a1b2c3")]
    assert "kill -9 4711 on node a1b2c3" in diagnose(stuck(engines=engines))[0].advice[1]


@pytest.mark.parametrize(
    ("usual", "elapsed_s"), [([], 4.9), ([{"phase_s": {"release_memory_occupation": 9.0}}], 17.9)]
)
def test_a_phase_that_takes_its_usual_time_is_no_finding(
    usual: list[dict[str, Any]], elapsed_s: float
) -> None:
    (finding,) = diagnose(stuck(elapsed_s, steps=usual))
    assert finding.severity is Severity.FINE
    assert finding.what == "server policy: release_memory_occupation runs; nothing is wrong"


def test_a_phase_that_is_not_yet_stuck_is_watched_with_the_time_when_it_will_be() -> None:
    finding = diagnose(stuck(6.0))[0]
    assert finding.severity is Severity.WATCH
    assert "stuck when it takes longer than 10.0 s" in " ".join(finding.details)


def test_an_attached_engine_is_not_promised_a_restart() -> None:
    for more in ({"fence_reason": "it hangs"}, {"routing": "dead", "reason": "refused"}):
        findings = diagnose(state(engines=[engine("main-0"), engine("main-1", pid=None, **more)]))
        assert "at http://10.0.0.1/main-1" in findings[0].advice[0]
        assert "automatically" not in findings[0].advice[0]


def test_requests_that_wait_meanwhile_are_counted() -> None:
    now = stuck() | {"gate": {"state": "holding", "num_held": 7}}
    assert "7 requests wait at the router's gate" in " ".join(diagnose(now)[0].details)


@pytest.mark.parametrize(("elapsed_s", "weight"), [(70.0, Severity.FINE), (91.0, Severity.STUCK)])
def test_a_phase_whose_deadline_is_short_for_what_it_takes_is_given_what_it_takes(
    elapsed_s: float, weight: Severity
) -> None:
    """Half of its deadline is 60 s, and it always takes 90."""
    now = stuck(elapsed_s, steps=[{"phase_s": {"release_memory_occupation": 90.0}}])
    assert diagnose(now)[0].severity is weight


def test_a_phase_that_always_takes_long_is_not_stuck_at_once() -> None:
    usual = [{"phase_s": {"release_memory_occupation": 9.0}}]
    now = stuck(20.0, steps=usual)
    assert diagnose(now)[0].severity is Severity.WATCH
    assert "usually takes 9.0 s" in " ".join(diagnose(now)[0].details)


def test_many_late_engines_are_counted_not_listed() -> None:
    now = stuck(engines=[engine(f"main-{index}") for index in range(256)])
    now["running"] += [
        span("engine", "release_memory_occupation", 40.0, engine_id=f"main-{index}")
        for index in range(2, 200)
    ]
    finding = diagnose(now)[0]
    assert "engines main-1, main-2, main-3 and 196 more" in finding.what
    assert len(finding.details) < 10


def test_a_silent_server_comes_before_its_last_report() -> None:
    finding = diagnose(stuck() | {"is_answering": False, "trouble": "no answer"})[0]
    assert "does not answer: no answer" in finding.what


def test_a_closed_gate_has_its_reason_and_the_command_to_repeat() -> None:
    gate = {
        "state": "closed",
        "reason": "release_memory_occupation took longer than 60 s",
        "in_state_s": 90.0,
    }
    finding = diagnose(state(phase="flushed", gate=gate | {"num_held": 3}))[0]
    assert finding.severity is Severity.WRONG
    assert "release_memory_occupation took longer than 60 s; 3 requests wait" in finding.what
    assert "repeat the failed command" in finding.advice[0]


def test_engines_that_wait_for_the_trainer_are_no_trouble() -> None:
    gate = {"state": "holding", "reason": "paused", "in_state_s": 130.0}
    steps = [{"phase_s": {}, "trainer_s": 70.0}]
    (finding,) = diagnose(state(phase="offloaded", gate=gate, steps=steps))
    assert finding.severity is Severity.FINE
    assert finding.what == "server policy: the trainer has the memory; nothing is wrong"


def test_a_gate_that_holds_twice_as_long_as_usual_is_watched() -> None:
    gate = {"state": "holding", "reason": "paused", "in_state_s": 150.0}
    steps = [{"phase_s": {}, "trainer_s": 70.0}]
    finding = diagnose(state(phase="offloaded", gate=gate, steps=steps))[0]
    assert finding.severity is Severity.WATCH
    assert "trainer has the GPUs, for 70 s" in finding.details[0]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"is_on": False, "reason": "no room on node-1"}, "is off: no room on node-1"),
        ({"lag": 3}, "is 3 versions behind"),
    ],
)
def test_a_store_that_does_not_keep_up_is_reported(more: dict[str, Any], text: str) -> None:
    store = {"is_on": True, "reason": "", "version": 1, "lag": 1, "write_s": 2.0}
    assert diagnose(state(store=store))[0].severity is Severity.FINE
    assert text in diagnose(state(store=store | more))[0].what


@pytest.mark.parametrize(("reported", "is_wrong"), [([3.0], True), ([3.0, 0.0], False)])
def test_a_journal_that_is_not_on_disk_is_reported_until_it_is(
    reported: list[float], is_wrong: bool
) -> None:
    figures = [{"metrics": {"rollout/journal_lost_s": lost_s}} for lost_s in reported]
    (found,) = diagnose(state(figures=[*figures, {"metrics": {}}]))
    assert (found.severity is Severity.WRONG) == is_wrong
    assert ("the driver's journal is not on disk" in found.what) == is_wrong


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"fence_reason": "it hangs\nlog"}, "engine main-1 is fenced: it hangs"),
        ({"is_stale": True}, "lacks the published weights"),
        ({"routing": "dead", "reason": "refused"}, "gets no requests: refused"),
        ({"weight_version": 2}, "engine main-1 hold weight version 2, published is 3"),
    ],
)
def test_each_thing_wrong_with_an_engine_is_reported(more: dict[str, Any], text: str) -> None:
    findings = diagnose(state(engines=[engine("main-0"), engine("main-1", **more)]))
    assert text in findings[0].what


def test_a_draft_that_is_right_less_than_half_as_often_is_a_finding() -> None:
    fall = "of the tokens that its draft /draft proposes, 0.2% are right since weight version 3"
    good = {"draft": "/draft", "share": 0.9, "fall": ""}
    engines = [engine("main-0", drafts=good), engine("main-1", drafts=good | {"fall": fall})]
    (found,) = diagnose(state(engines=[*engines, engine("main-2", drafts=None)]))
    assert (found.severity, found.engine_ids) == (Severity.WATCH, ("main-1",))
    assert found.what == f"engine main-1: {fall}"
    assert "leave it out" in found.advice[0]
    assert "--enable-draft-weights-cpu-backup" in found.advice[1]
