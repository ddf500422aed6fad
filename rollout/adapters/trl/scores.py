"""Rewards and advantages of one group, as TRL's own rollout worker computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scores:
    """Advantages and metrics of the completions of one prompt.

    Attributes:
        advantages: ``(reward - mean) / std``; 0 for a completion that no function can judge.
        metrics: of each completion, with TRL's names.
    """

    advantages: list[float]
    metrics: list[dict[str, float]]


def score(by_function: Mapping[str, Sequence[float | None]]) -> Scores:
    """Add up the rewards of all functions, and compare those of the group.

    Args:
        by_function: name of a reward function -> its reward for each completion, or None where it
            cannot judge one.
    """
    columns = {
        name: [math.nan if reward is None else float(reward) for reward in rewards]
        for name, rewards in by_function.items()
    }
    totals = [_total(row) for row in zip(*columns.values(), strict=True)]
    judged = [total for total in totals if not math.isnan(total)]
    mean = sum(judged) / len(judged) if judged else math.nan
    std = (
        math.sqrt(sum((score - mean) ** 2 for score in judged) / len(judged))
        if judged
        else math.nan
    )
    advantages = [0.0 if math.isnan(score) else (score - mean) / (std + 1e-8) for score in totals]
    metrics = [
        {"reward": total, "reward_std": std}
        | {f"rewards/{name}": rewards[index] for name, rewards in columns.items()}
        for index, total in enumerate(totals)
    ]
    return Scores(advantages, metrics)


def _total(rewards: Sequence[float]) -> float:
    """The sum of what functions could judge; NaN if none could."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) if known else math.nan
