"""Samples and groups: lengths and spans that must agree."""

import pytest

from engines.protocol import VersionSpan
from rollout.core.samples import (
    EngineSpan,
    Sample,
    SampleFailure,
    SampleGroup,
    SampleStatus,
    version_number,
)


def test_a_sample_has_a_mask_of_ones_by_default() -> None:
    assert Sample([1], [2, 3], [-0.5, -0.1]).mask == [1, 1]


def test_a_sample_has_one_mask_entry_per_output_id() -> None:
    with pytest.raises(ValueError, match="2 output ids but a loss mask of 1"):
        Sample([1], [2, 3], [-0.5, -0.1], loss_mask=[1])


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([("1", 0, 3)], "does not fit"),
        ([("1", 0, 1)], r"no weight version for output tokens 1\.\.2"),
        ([("1", 1, 2)], r"no weight version for output tokens 0\.\.1"),
        ([("1", 0, 2), ("2", 1, 2)], "does not fit"),
        ([("1", 0, 0), ("1", 0, 2)], "does not fit"),
    ],
)
def test_version_spans_cover_the_output_once(spans, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample([1], [2, 3], [-0.5, -0.1], weight_versions=tuple(VersionSpan(*s) for s in spans))


@pytest.mark.parametrize("spans", [[(0, 3)], [(0, 2), (1, 2)], [(1, 1)]])
def test_engine_spans_are_within_the_output_and_do_not_overlap(spans) -> None:
    with pytest.raises(ValueError, match=r"engine span .* of 'main-0' does not fit"):
        Sample([1], [2, 3], [-0.5, -0.1], engines=tuple(EngineSpan("main-0", *s) for s in spans))


def test_tokens_of_a_tool_need_no_weight_version() -> None:
    spans = (VersionSpan("4", 0, 1), VersionSpan("5", 2, 3))
    sample = Sample([1], [2, 3, 4], [-1.0, 0.0, -1.0], weight_versions=spans, loss_mask=[1, 0, 1])
    assert sample.versions == [4, 5]


def test_a_sample_that_was_changed_can_be_checked_again() -> None:
    sample = Sample([1], [2], [-1.0])
    sample.output_ids.append(3)
    with pytest.raises(ValueError, match="never padded or cut"):
        sample.check()


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("default", None), ("", None), ("-1", None), ("²", None)]
)
def test_a_version_is_a_number_where_it_is_one_of_ours(text: str, number: int | None) -> None:
    assert version_number(text) == number


def test_a_group_is_iterated_over_its_samples() -> None:
    samples = [Sample([1], [2], [-0.5]), Sample([1], [3], [-0.5])]
    group = SampleGroup(0, samples)
    assert list(group) == samples
    assert len(group) == 2


@pytest.mark.parametrize(
    ("rewards", "is_zero"),
    [([1.0, 1.0], True), ([0.0, 1.0], False), ([None, 1.0], True), ([None], False), ([], False)],
)
def test_a_group_of_equal_rewards_has_zero_std(rewards, is_zero: bool) -> None:
    group = SampleGroup(0, [Sample([1], reward=reward) for reward in rewards])
    assert group.has_zero_std is is_zero


def test_a_failed_sample_keeps_its_tokens_and_no_reward() -> None:
    sample = Sample([1], [2], [-1.0], reward=1.0)
    sample.fail("reward raised", "Traceback ...", failure=SampleFailure.REWARD_ERROR)
    assert (sample.status, sample.reward, sample.output_ids) == (SampleStatus.FAILED, None, [2])
    assert sample.traceback == "Traceback ..."
