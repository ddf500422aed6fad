"""The values: lengths that must agree, and reports that add up."""

import pytest

from rollout.core.samples import Sample, SampleGroup
from rollout.core.types import EngineReport, PhaseReport, StepReport


def test_a_sample_has_one_logprob_per_output_id() -> None:
    with pytest.raises(ValueError, match="2 output ids but 1 log-probs"):
        Sample([1], [2, 3], [-0.5])


def test_a_groups_rewards_are_those_that_were_given() -> None:
    group = SampleGroup(0, [Sample([1], reward=0.0), Sample([1]), Sample([1], reward=1.0)])
    assert group.rewards == [0.0, 1.0]


def test_a_phase_report_adds_up_what_came_free_and_picks_out_who_failed() -> None:
    bad = EngineReport("main-1", failure="late")
    report = PhaseReport(
        "main",
        "release_memory_occupation",
        "offloaded",
        1.0,
        (EngineReport("main-0", 1, "", 7), bad),
    )
    assert report.freed_bytes == 7
    assert report.failures == (bad,)


def test_reports_of_one_step_add_seconds_of_the_same_command() -> None:
    first = StepReport({"pause_generation": 1.0, "flush_cache": 2.0}, 10, 1)
    second = StepReport({"flush_cache": 3.0, "release_memory_occupation": 4.0}, 20, 2)
    both = first.merged(second)
    assert both.phase_s == {
        "pause_generation": 1.0,
        "flush_cache": 5.0,
        "release_memory_occupation": 4.0,
    }
    assert (both.freed_bytes, both.weight_version) == (30, 2)
