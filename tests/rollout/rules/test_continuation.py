"""Parts of one completion: joined without gaps, overlaps or equal neighbours."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import VersionSpan
from rollout.rules.continuation import Part, check_budget, join_experts, join_spans, spans_of


def versions_of(spans):
    return [span.version for span in spans for _ in range(span.start, span.end)]


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("12")), max_size=8))
def test_joined_spans_give_each_token_the_version_of_its_part(parts):
    spans, num, versions = (), 0, []
    for length, version in parts:
        spans = join_spans(spans, spans_of((), version, length), num)
        num += length
        versions += [version] * length
    assert versions_of(spans) == versions
    pairs = itertools.pairwise(spans)
    assert all(left.version != right.version for left, right in pairs)


def test_a_sum_of_parts_keeps_their_order():
    first = Part("a", 1, [1], {"x": [-1.0]}, (VersionSpan("1", 0, 1),))
    second = Part("bc", 2, [2, 3], {"x": [-2.0, -3.0]}, (VersionSpan("2", 0, 2),))
    whole = first.plus(second)
    assert (whole.text, whole.num, whole.ids) == ("abc", 3, [1, 2, 3])
    assert whole.columns == {"x": [-1.0, -2.0, -3.0]}
    assert versions_of(whole.spans) == ["1", "2", "2"]
    assert Part().plus(second) is second


def test_reported_spans_are_kept_and_missing_ones_are_one_span():
    reported = (VersionSpan("1", 0, 1), VersionSpan("2", 1, 2))
    assert spans_of(reported, "3", 2) is reported
    assert spans_of((), "3", 2) == (VersionSpan("3", 0, 2),)
    assert spans_of((), None, 2) == ()
    assert spans_of((), "3", 0) == ()


def test_no_span_is_empty_and_a_gap_stays_one():
    whole = (VersionSpan("1", 0, 1), VersionSpan("2", 1, 2))
    assert Part("ab", 2, [1, 2], {}, whole).up_to(1, 1).spans == whole[:1]
    assert join_spans(whole[:1], (VersionSpan("2", 0, 0),), 1) == whole[:1]
    apart = (VersionSpan("1", 0, 1), VersionSpan("1", 2, 3))
    assert join_spans(apart[:1], (VersionSpan("1", 0, 1),), 2) == apart


def test_more_tokens_than_the_budget_are_an_error():
    check_budget(5, 5)
    check_budget(5, None)
    with pytest.raises(ValueError, match="6 output tokens where at most 5"):
        check_budget(6, 5)


def test_experts_are_kept_and_what_was_computed_again_is_left_out():
    assert join_experts(b"", b"abcd", 2) == b"abcd"
    assert join_experts(b"AB", b"abcdef", 3) == b"ABcdef"
    assert join_experts(b"AB", b"ab", 1) == b"AB"
    for kept, reported, num in ((b"A", b"abcd", 2), (b"", b"abc", 2), (b"AB", b"", 2)):
        assert join_experts(kept, reported, num) is None
    assert join_experts(b"ABCD", b"ab", 1) is None
