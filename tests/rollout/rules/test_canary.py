"""Each way in which log-probabilities can differ, and the message for it."""

from __future__ import annotations

import math

import pytest

from rollout.rules.probe import (
    CanaryLogprobs,
    EngineLogprobs,
    find_logprob_mismatches,
    prompt_for,
)

TOLERANCE = 0.1
RIGHT, NOISY, GARBAGE = (-1.0, -2.0, -3.0), (-1.05, -2.0, -2.9), (-11.0, -10.5, -12.0)


def heard(
    *values: float, before: tuple[float, ...] = (), of: str = "7", is_verified: bool = False
) -> EngineLogprobs:
    """Two prompts: one that never differs, and one with these values."""
    same = (-0.5, -0.5)
    old = {"": CanaryLogprobs("7", (same, before))} if before else {}
    return EngineLogprobs({"": CanaryLogprobs(of, (same, values))}, old, is_verified)


def test_what_is_close_is_passed() -> None:
    assert find_logprob_mismatches({"e-0": heard(*RIGHT), "e-1": heard(*NOISY)}, TOLERANCE) == {}
    assert find_logprob_mismatches({"e-0": heard(*NOISY, before=RIGHT)}, TOLERANCE) == {}


def test_garbage_after_a_release_is_found_even_when_every_engine_has_it() -> None:
    lost = heard(*GARBAGE, before=RIGHT)
    wrong = find_logprob_mismatches({"e-0": lost, "e-1": lost}, TOLERANCE)
    assert set(wrong) == {"e-0", "e-1"}
    assert wrong["e-0"].startswith(
        "canary prompt 1, token 1 has log-probability -11.000, and -1.000"
    )
    assert wrong["e-0"].endswith("when the weights were the same")


def test_logprobs_of_other_weights_are_not_compared() -> None:
    assert find_logprob_mismatches({"e-0": heard(*GARBAGE, before=RIGHT, of="8")}, TOLERANCE) == {}


def test_the_minority_fails() -> None:
    three = {"e-0": heard(*RIGHT), "e-1": heard(*GARBAGE), "e-2": heard(*NOISY)}
    wrong = find_logprob_mismatches(three, TOLERANCE)
    assert set(wrong) == {"e-1"}
    assert "-11.000, and -1.000" in wrong["e-1"]
    assert wrong["e-1"].endswith("on engine e-0 and 1 more")


def test_two_that_disagree_are_both_refused() -> None:
    wrong = find_logprob_mismatches({"e-0": heard(*RIGHT), "e-1": heard(*GARBAGE)}, TOLERANCE)
    assert set(wrong) == {"e-0", "e-1"}
    assert all(why.endswith("and there is no majority") for why in wrong.values())


def test_a_verified_engine_outweighs_any_number() -> None:
    wrong = find_logprob_mismatches(
        {
            "e-0": heard(*GARBAGE),
            "e-1": heard(*GARBAGE),
            "e-2": heard(*RIGHT, is_verified=True),
        },
        TOLERANCE,
    )
    assert set(wrong) == {"e-0", "e-1"}
    assert "on engine e-2, whose weights are verified" in wrong["e-0"]


def test_an_unchanged_engine_outweighs_one_without_an_earlier_check() -> None:
    two = {"e-0": heard(*GARBAGE), "e-1": heard(*RIGHT, before=RIGHT)}
    assert set(find_logprob_mismatches(two, TOLERANCE)) == {"e-0"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_fails_also_alone_and_verified(value: float) -> None:
    wrong = find_logprob_mismatches({"e-0": heard(-1.0, value, is_verified=True)}, TOLERANCE)
    assert "canary prompt 1, token 2" in wrong["e-0"]
    assert "not a finite number" in wrong["e-0"]


def test_one_token_far_off_is_a_difference_though_the_average_is_small() -> None:
    before = (-1.0,) * 40
    now = (*before[:-1], -2.5)
    assert (
        "token 40" in find_logprob_mismatches({"e-0": heard(*now, before=before)}, TOLERANCE)["e-0"]
    )
    near = (*before[:-1], -1.9)
    assert find_logprob_mismatches({"e-0": heard(*near, before=before)}, TOLERANCE) == {}


def test_the_end_of_a_prompt_is_held_against_the_same_tokens_of_the_whole() -> None:
    end = {"": CanaryLogprobs("7", ((-2.0, -3.0),), start=3)}
    whole = {"": ((-9.0, -9.0, -9.0, -2.0, -3.0),)}
    assert find_logprob_mismatches({"e-0": EngineLogprobs(end, expected=whole)}, TOLERANCE) == {}
    wrong = {"": ((-2.0, -3.0, -9.0, -2.0, -5.0),)}
    found = find_logprob_mismatches({"e-0": EngineLogprobs(end, expected=wrong)}, TOLERANCE)
    assert "prompt 0, token 5 has log-probability -3.000, and -5.000" in found["e-0"]


@pytest.mark.parametrize(("start", "other"), [(0, 3), (3, 0)])
def test_log_probs_of_other_tokens_confirm_nothing(start: int, other: int) -> None:
    of_start = {"": CanaryLogprobs("7", (RIGHT,), start=start)}
    of_other = {"": CanaryLogprobs("7", (RIGHT,), start=other)}
    verified = {
        "e-0": EngineLogprobs(of_start),
        "e-1": EngineLogprobs(of_other, is_verified=True),
    }
    found = find_logprob_mismatches(verified, TOLERANCE)
    assert f"canary prompt 0, token {start + 1} has no log-probability" in found["e-0"]


def test_an_adapter_is_held_against_the_same_adapter() -> None:
    def under(base: float, adapter: float, version: str) -> dict[str, CanaryLogprobs]:
        return {"": CanaryLogprobs("0", ((base,),)), "mine": CanaryLogprobs(version, ((adapter,),))}

    before = under(-1.0, -2.0, "1")
    new_adapter = EngineLogprobs(under(-1.0, -9.0, "2"), before)
    lost_base = EngineLogprobs(under(-8.0, -9.0, "2"), before)
    lost_adapter = EngineLogprobs(under(-1.0, -9.0, "1"), before)
    assert find_logprob_mismatches({"e-0": new_adapter}, TOLERANCE) == {}
    assert "token 1 has" in find_logprob_mismatches({"e-0": lost_base}, TOLERANCE)["e-0"]
    wrong = find_logprob_mismatches({"e-0": lost_adapter}, TOLERANCE)
    assert "token 1 under adapter 'mine' has" in wrong["e-0"]


def test_prompts_are_always_the_same_and_keep_away_from_the_ends_of_the_vocabulary() -> None:
    prompt = prompt_for(1000, 4096)
    assert prompt == prompt_for(1000, 4096)
    assert len(set(prompt)) > 200
    assert all(250 <= token < 750 for token in prompt)
    assert prompt_for(0, 4096) == prompt_for(3, 4096) == ()


def test_the_trainers_logprobs_come_first() -> None:
    now = {"": CanaryLogprobs("7", (GARBAGE,))}
    wrong = find_logprob_mismatches(
        {
            "e-0": EngineLogprobs(now, expected={"": (RIGHT,)}),
            "e-1": EngineLogprobs(now, is_verified=True, expected={"": (RIGHT,)}),
        },
        TOLERANCE,
    )
    assert set(wrong) == {"e-0", "e-1"}  # although both report the same
    assert "log-probability -11.000, and -1.000" in wrong["e-0"]
    assert wrong["e-0"].endswith("by the trainer's own model")


def test_an_engine_that_agrees_with_the_trainer_outweighs_the_rest() -> None:
    right = EngineLogprobs({"": CanaryLogprobs("7", (NOISY,))}, expected={"": (RIGHT,)})
    garbage = EngineLogprobs({"": CanaryLogprobs("7", (GARBAGE,))})
    assert set(
        find_logprob_mismatches({"e-0": garbage, "e-1": garbage, "e-2": right}, TOLERANCE)
    ) == {
        "e-0",
        "e-1",
    }
