"""Each way weights can be wrong, and what the fingerprints say of it."""

from __future__ import annotations

import pytest

from engines.protocol import WeightsReport
from rollout.verification import ALL_TENSORS, Evidence, first_difference, judge, left_open


def report(*digests: str) -> WeightsReport:
    """Tensors ``a``, ``b``, ``c`` with these digests, on one rank."""
    tensors = dict(zip("abc", digests, strict=False))
    return WeightsReport("".join(digests), (tensors,))


BEFORE, GARBAGE, AFTER = report("1", "2", "3"), report("1", "x", "3"), report("4", "5", "6")


def test_unchanged_weights_are_proved() -> None:
    assert judge({"e-0": Evidence(BEFORE, BEFORE), "e-1": Evidence(BEFORE, BEFORE)}) == {}


def test_garbage_after_a_release_is_found_even_when_every_engine_has_it() -> None:
    wrong = judge({"e-0": Evidence(GARBAGE, BEFORE), "e-1": Evidence(GARBAGE, BEFORE)})
    assert set(wrong) == {"e-0", "e-1"}
    assert "tensor 'b' is not what it was before" in wrong["e-0"]


def test_a_full_push_makes_the_record_void() -> None:
    assert judge({"e-0": Evidence(AFTER, BEFORE, ALL_TENSORS)}) == {}


def test_the_minority_is_outvoted_and_its_first_differing_tensor_named() -> None:
    half = report("4", "2", "6")
    wrong = judge(
        {name: Evidence(AFTER, None, ALL_TENSORS) for name in ("e-0", "e-2")}
        | {"e-1": Evidence(half, None, ALL_TENSORS)}
    )
    assert wrong == {"e-1": "tensor 'b' differs from engine e-0 and 1 more"}


def test_two_that_disagree_are_both_refused() -> None:
    wrong = judge({"e-0": Evidence(AFTER), "e-1": Evidence(report("4", "5", "7"))})
    assert set(wrong) == {"e-0", "e-1"}
    assert all("tensor 'c'" in why and "no majority" in why for why in wrong.values())


def test_one_with_lost_weights_has_no_vote() -> None:
    evidence = {"e-0": Evidence(GARBAGE, BEFORE), "e-1": Evidence(BEFORE, BEFORE)}
    assert set(judge(evidence)) == {"e-0"}


@pytest.mark.parametrize(
    ("now", "wrong"),
    [
        (report("9", "2", "3"), False),
        (report("9", "2", "8"), True),
        (report("1", "2", "3"), False),
    ],
)
def test_a_partial_push_may_change_only_what_it_pushed(now: WeightsReport, wrong: bool) -> None:
    assert bool(judge({"e-0": Evidence(now, BEFORE, frozenset({"a"}))})) is wrong


def test_a_partial_push_under_other_names_than_the_engines_own_is_not_judged() -> None:
    pushed = frozenset({"model.q_proj.weight"})
    assert judge({"e-0": Evidence(AFTER, BEFORE, pushed)}) == {}


def test_ranks_and_missing_tensors_are_differences() -> None:
    one, two = WeightsReport("s", ({"a": "1"},)), WeightsReport("s", ({"a": "1"}, {"a": "1"}))
    assert first_difference(one, two) == "(the checksum of all)"
    assert first_difference(BEFORE, report("1", "2")) == "c"
    assert first_difference(BEFORE, BEFORE) == ""


def test_what_was_pushed_is_left_open_where_nobody_can_vouch_for_it() -> None:
    pushed = Evidence(AFTER, BEFORE, ALL_TENSORS)
    assert left_open(pushed, 1) == ""
    assert "'a'" in left_open(pushed, 0)
    of_trainer = {"a": "4", "b": "5", "c": "6"}
    same_way = Evidence(
        report(*(f"xxh3:{one}" for one in "456")),
        None,
        ALL_TENSORS,
        {name: f"xxh3:{one}" for name, one in of_trainer.items()},
    )
    assert left_open(same_way, 0) == ""
    assert left_open(Evidence(BEFORE, BEFORE), 0) == ""
    assert "'a'" in left_open(Evidence(AFTER, BEFORE, frozenset({"a"})), 0)


def test_an_adapter_that_no_fingerprint_tells_of_is_left_open_with_or_without_a_push() -> None:
    told = WeightsReport("s", ({"a": "1", "lora:mine:x": "2"},))
    assert left_open(Evidence(told, told, adapter="mine"), 0) == ""
    assert "adapter 'other'" in left_open(Evidence(told, told, adapter="other"), 1)
