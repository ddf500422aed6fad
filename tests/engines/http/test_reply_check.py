"""What a usable reply has: each rule, at its bound."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engines.http.reply_check import (
    MOST_IDS,
    MOST_LOGPROB,
    NotFinite,
    UnusableReply,
    check_experts,
    check_generate,
    check_ids,
    check_logprobs,
    check_masks,
    check_pairs,
    check_versions,
)


@pytest.mark.parametrize("ids", [[], [0], [0, 299], (5, 6)])
def test_ids_of_the_vocabulary_are_fine(ids: Any) -> None:
    check_ids(ids, 300)


@pytest.mark.parametrize("wrong", [-1, 300, 1 << 40, 5.0, "5", None, [5]])
def test_what_is_no_id_of_the_vocabulary_is_refused(wrong: Any) -> None:
    with pytest.raises(UnusableReply, match="no whole number from 0 to 299"):
        check_ids([5, wrong, 6], 300)


def test_without_a_vocabulary_ids_have_32_bits() -> None:
    check_ids([MOST_IDS - 1])
    with pytest.raises(UnusableReply, match=str(MOST_IDS)):
        check_ids([MOST_IDS])


@pytest.mark.parametrize("masks", [[], [None], [[5]], [(4, 5), None, [6]]])
def test_a_token_is_one_of_its_mask(masks: Any) -> None:
    check_masks([5, 7, 6][: len(masks)], masks, 300)


@pytest.mark.parametrize("wrong", [[], [6], 5, "5", [5, 300], [5, None], {5: 1}])
def test_other_masks_are_refused(wrong: Any) -> None:
    with pytest.raises(UnusableReply):
        check_masks([5], [wrong], 300)
    for masks in (None, [], [[5], [5]], 7):
        with pytest.raises(UnusableReply, match="not those of 1 tokens"):
            check_masks([5], masks, 300)


def test_a_reply_has_a_mask_for_each_token_or_none_at_all() -> None:
    meta = {"weight_version": "1", "output_token_sampling_mask": [[5], None]}
    assert check_generate({"output_ids": [5, 6], "meta_info": meta}) == 2
    with pytest.raises(UnusableReply, match="2 output_token_sampling_mask for 1 tokens"):
        check_generate({"output_ids": [5], "meta_info": meta})


@pytest.mark.parametrize("logprobs", [[], [0.0, -0.0], [MOST_LOGPROB, -3], [-9998.0] * 9])
def test_log_probs_up_to_rounding_are_fine(logprobs: Any) -> None:
    check_logprobs(logprobs)


@pytest.mark.parametrize("wrong", [math.nan, None, -9999.0, -math.inf])
@pytest.mark.parametrize("others", [[], [-1.0], [-5000.0, -1.0]])
def test_what_stands_for_nan_is_no_number(others: list[float], wrong: Any) -> None:
    for logprobs in ([*others, wrong], [wrong, *others]):
        with pytest.raises(NotFinite):
            check_logprobs(logprobs)


@pytest.mark.parametrize("wrong", [3.0, 0.0011, math.inf, "-0.5", [-0.5], {}])
def test_what_no_token_can_have_is_refused_by_its_value(wrong: Any) -> None:
    with pytest.raises(UnusableReply, match=r"above 0|is not a number") as refused:
        check_logprobs([-1.0, wrong, -2.0])
    assert not isinstance(refused.value, NotFinite)


def test_a_log_prob_belongs_to_its_token() -> None:
    check_pairs([5, 6], [[-1.0, 5, None], [-2.0, 6, "b"]])
    with pytest.raises(UnusableReply, match="new token 1 is 6, and its log-prob is of 7"):
        check_pairs([5, 6], [[-1.0, 5, None], [-2.0, 7, None]])
    with pytest.raises(UnusableReply, match="2 output ids but 1 log-probs"):
        check_pairs([5, 6], [[-1.0, 5, None]])


SPANS = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]


def test_versions_follow_each_other_from_the_first_token() -> None:
    check_versions("4", SPANS, 5)
    check_versions(None, SPANS, 5)
    check_versions("default", None, 5)
    check_versions(None, None, 0)


@pytest.mark.parametrize(
    ("version", "spans"),
    [(None, None), ("", []), (True, None), ("4", SPANS[1:]), ("4", [SPANS[0]] * 2), ("4", "34")],
)
def test_other_versions_are_refused(version: Any, spans: Any) -> None:
    with pytest.raises(UnusableReply):
        check_versions(version, spans, 5)


@pytest.mark.parametrize(("text", "is_right"), [("AAAAAAAA", True), ("AAAA", False), ("", False)])
def test_experts_have_a_row_for_each_computed_token(text: str, is_right: bool) -> None:
    if is_right:
        check_experts(text, 6)
        return
    with pytest.raises(UnusableReply, match="do not fit 6 tokens"):
        check_experts(text, 6)


def test_tokens_that_were_checked_before_are_not_checked_again() -> None:
    pairs = [[3.0, 5, None], [-1.0, 6, None]]
    meta = {"output_token_logprobs": pairs, "weight_version": "1"}
    answer = {"output_ids": [5, 6], "meta_info": meta}
    assert check_generate(answer, begin=1) == 2
    with pytest.raises(UnusableReply, match="new token 0 is 3"):
        check_generate(answer)
