"""When answers of an engine show state of older weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from engines.protocol import WeightsReport
from rollout.rules.probe import Answer, Answers, find_stale, first_asked, prompt_for

OLD, NEW = (-1.0,) * 20, (-2.0,) * 20
PATH = [f"model.layers.{layer}.mlp.weight" for layer in range(4)]


def report(value: str, names: list[str] = PATH, **others: str) -> WeightsReport:
    return WeightsReport(None, ({**dict.fromkeys(names, value), **others},))


def answers(through: Any, fresh: Any, *, cached: int = 0, made_of: str = "") -> Answers:
    past = Answer(tuple(fresh))
    return Answers(Answer(tuple(through), cached), past, past, made_of)


EXACT = answers(OLD, OLD)
ROUGH = answers(OLD, (-1.01,) * 20)


def why_stale(now: Answers, before: Answers = EXACT) -> str:
    found = find_stale(now, before, 0.1, is_exact=before.is_exact)
    return "" if found is None else found.why


def test_equal_answers_past_and_through_the_caches_are_right() -> None:
    assert not why_stale(answers(NEW, NEW))


def test_tokens_from_a_cache_are_old_whatever_they_give() -> None:
    assert "16 tokens" in why_stale(answers(NEW, NEW, cached=16))


@pytest.mark.parametrize(
    ("off", "before", "is_stale", "is_certain"),
    [
        (0.0005, EXACT, False, False),
        (0.01, EXACT, True, False),
        (0.01, ROUGH, False, False),
        (0.2, EXACT, True, True),
        (0.2, ROUGH, True, True),
    ],
)
def test_how_far_answers_may_differ_depends_on_whether_an_engine_repeats_itself(
    off: float, before: Answers, is_stale: bool, is_certain: bool
) -> None:
    found = find_stale(answers([-2.0 - off] * 20, NEW), before, 0.1, is_exact=before.is_exact)
    assert (found is not None) is is_stale
    assert found is None or found.is_certain is is_certain


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_one_log_prob_that_is_no_number_is_named_by_its_prompt(broken: float) -> None:
    assert answers(NEW, NEW).without_numbers() == ""
    assert answers(NEW, [*NEW[1:], broken]).without_numbers() == "text"
    assert answers([broken] * 20, NEW).without_numbers() == ""  # then the caches' are old
    right, wrong = Answer(NEW), Answer((*NEW[1:], broken))
    assert Answers(right, wrong, right, "").without_numbers() == "image"


def test_no_number_through_the_caches_alone_is_stale() -> None:
    assert "differ by inf" in why_stale(answers([math.nan] * 20, NEW))
    assert "differ by inf" in why_stale(answers([], NEW))


def with_report(one: Answers, of: WeightsReport | None) -> Answers:
    return replace(one, report=of)


@pytest.mark.parametrize(
    ("before", "now", "is_stale"),
    [
        (report("a"), report("b"), True),
        (report("a"), report("a"), False),
        (None, report("b"), False),
        (report("a"), None, False),
        (report("a", PATH), report("a", PATH[:3], **{PATH[3]: "b"}), False),  # one of four
        (report("a", ["lm_head.weight"]), report("b", ["lm_head.weight"]), False),
        (
            report("a", ["model.layers.0.mlp.experts.1.w.weight"]),
            report("b", ["model.layers.0.mlp.experts.1.w.weight"]),
            False,
        ),
    ],
)
def test_new_weights_that_change_no_log_prob_are_not_what_computes(
    before: WeightsReport | None, now: WeightsReport | None, is_stale: bool
) -> None:
    same = answers(OLD, OLD)
    found = why_stale(with_report(same, now), with_report(same, before))
    assert ("most weights are new" in found) is is_stale


def test_one_log_prob_may_be_as_before_by_chance() -> None:
    one = answers([-1.0], [-1.0])
    assert not why_stale(with_report(one, report("b")), with_report(one, report("a")))


@pytest.mark.parametrize(
    ("size", "length", "given", "num"),
    [
        (1000, 4096, (), 288),
        (1000, 200, (), 192),
        (1000, 64, (), 56),  # too short for the sentinel
        (1000, 4, (), 0),
        (2, 4096, (), 0),
        (1000, 0, (), 64),  # likewise: how many the model takes is not known
        (0, 0, [(1, 2, 3)], 288),
    ],
)
def test_the_prompt_fits_the_model(size: int, length: int, given: Any, num: int) -> None:
    prompt = prompt_for(size, length, given)
    assert len(prompt) == num
    assert first_asked(prompt) == (num - 32 if num > 64 else 0)
    assert prompt == prompt_for(size, length, given)
    assert not given or prompt[:4] == (1, 2, 3, 1)
