"""Rewards are added, and compared within their group."""

import math

import pytest

from rollout.adapters.trl.scores import score


def test_the_better_completion_has_the_advantage() -> None:
    scores = score({"right": [1.0, 0.0], "short": [0.5, 0.5]})
    assert scores.advantages == pytest.approx([1.0, -1.0])
    assert scores.metrics[0] == {
        "reward": 1.5,
        "reward_std": 0.5,
        "rewards/right": 1.0,
        "rewards/short": 0.5,
    }


def test_equal_rewards_have_no_advantage() -> None:
    assert score({"right": [1.0, 1.0, 1.0]}).advantages == [0.0, 0.0, 0.0]


def test_what_no_function_can_judge_is_left_out() -> None:
    scores = score({"right": [1.0, 0.0, None], "short": [None, None, None]})
    assert scores.advantages == pytest.approx([1.0, -1.0, 0.0])
    assert math.isnan(scores.metrics[2]["reward"])
    assert score({"right": [None, None]}).advantages == [0.0, 0.0]
