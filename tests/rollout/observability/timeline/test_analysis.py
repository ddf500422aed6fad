"""Steps, the time lost at their boundary, and the slowest engine of each phase."""

import pytest

from rollout.observability.timeline.analysis import (
    PushTotals,
    push_stages,
    pushes,
    slowest_engines,
    steps,
)
from rollout.observability.timeline.span import Kind, Outcome, Span
from tests.rollout.observability.timeline.spans import engine, offload_step, phase, rank_push


def test_the_time_of_the_trainer_is_not_lost() -> None:
    (step,) = steps(offload_step())
    assert step.lost_s == pytest.approx(3.0)
    assert step.trainer_s == pytest.approx(10.0)
    (update,) = [
        span for span in offload_step() if span.name == "update_weights" and span.kind is Kind.PHASE
    ]
    assert step.paused_s == pytest.approx(step.end_s - update.start_s)
    assert 0 < step.paused_s < step.lost_s
    assert step.weight_version == 7


def test_without_a_release_all_of_it_is_lost() -> None:
    spans = [
        phase("pause_generation", 0.0, 1.0),
        phase("flush_cache", 1.0, 1.0),
        phase("update_weights", 2.0, 3.0),
        phase("verify", 5.0, 1.0),
        phase("continue_generation", 6.0, 1.0),
    ]
    (step,) = steps(spans)
    assert (step.lost_s, step.paused_s, step.trainer_s) == (7.0, 7.0, 0.0)


def test_a_step_without_a_push_is_not_paused_for_one() -> None:
    (step,) = steps([phase("pause_generation", 0.0, 1.0), phase("continue_generation", 6.0, 1.0)])
    assert (step.lost_s, step.paused_s) == (7.0, 0.0)


def test_a_step_without_its_continue_is_not_counted() -> None:
    assert steps(offload_step()[:-1]) == []


def test_a_continue_that_failed_and_was_repeated_ends_the_step_late() -> None:
    spans = offload_step()
    failed = phase("continue_generation", 112.9, 1.0)
    failed.outcome = Outcome.FAILED
    (step,) = steps([*spans[:-1], failed, phase("continue_generation", 120.0, 1.0)])
    assert step.end_s == 121.0
    assert step.phase_s["continue_generation"] == 2.0


def test_steps_of_several_servers_are_kept_apart() -> None:
    other = [
        Span(Kind.PHASE, span.name, "reward", span.start_s, span.elapsed_s, span.outcome)
        for span in offload_step()
        if span.kind is Kind.PHASE
    ]
    found = steps([*offload_step(), *other, *offload_step(200.0)])
    assert [step.server for step in found] == ["policy", "reward", "policy"]


def test_the_slowest_engine_is_named_with_what_the_others_waited() -> None:
    (step,) = steps(offload_step())
    assert step.slowest["pause_generation"].engine_id == "main-0"
    assert step.slowest["pause_generation"].waited_s == pytest.approx(0.2)
    # Its two calls count together.
    assert step.slowest["update_weights"].engine_id == "main-1"
    assert step.slowest["update_weights"].elapsed_s == pytest.approx(0.8)


def test_an_engine_that_still_runs_is_not_yet_the_slowest() -> None:
    runs = engine("pause_generation", "main-0", 0.0, 9.0, outcome=Outcome.RUNNING)
    assert slowest_engines([runs, engine("pause_generation", "main-1", 0.0, 1.0)])[
        "pause_generation"
    ].engine_id == ("main-1")


def test_a_step_contains_its_failures() -> None:
    late = engine(
        "release_memory_occupation", "main-1", 100.6, 0.4, outcome=Outcome.FAILED, said="too late"
    )
    (step,) = steps([*offload_step(), late])
    assert [span.said for span in step.failures] == ["too late"]


def test_the_seconds_and_bytes_of_each_rank_are_added_up_and_the_longest_come_first() -> None:
    stages = push_stages([*offload_step(), *rank_push()])
    assert [(one.rank, one.stage, one.num_bytes) for one in stages] == [
        (0, "copy", 200),
        (1, "gather", 300),
        (0, "gather", 300),
        (1, "copy", 200),
    ]
    assert stages[0].elapsed_s == pytest.approx(0.4)
    assert stages[0].gib_per_s == pytest.approx(200 / 2**30 / 0.4)
    assert steps([*offload_step(), *rank_push()]) == steps(offload_step())


def test_a_push_has_what_all_ranks_sent_and_the_paused_seconds_of_its_step() -> None:
    spans = [*rank_push(200.0, version=8), *offload_step(), *rank_push()]
    (step,) = steps(spans)
    first, second = pushes(spans, [step])
    assert first == PushTotals(
        "policy", 7, "by_value delta", 400, 0.015625, pytest.approx(0.5), step.paused_s
    )
    assert first.paused_s > 0
    assert (second.weight_version, second.paused_s) == (8, 0.0)
