"""From prompts to sample groups: what a training loop calls each step.

Users import from here, and from ``rollout.driver.rewards`` (ready-made rewards).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.driver.client.retry import RetryPolicy
from rollout.driver.client.session import Session
from rollout.driver.data.prompt import Prompt, PromptSource
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.data.sample_rows import groups_of, sample_rows
from rollout.driver.driver import Driver, RolloutDriver
from rollout.driver.evaluation import EvalDataset, EvalPlan, EvalResult
from rollout.driver.stream.hooks import Hooks, drop_zero_std
from rollout.driver.stream.options import RolloutOptions

if TYPE_CHECKING:
    from rollout.driver.data.batch import packed, padded, train_data
    from rollout.driver.data.batch_torch import to_torch
else:

    def __getattr__(name: str) -> Any:
        # These need numpy (the extra `data`) or torch, so they are imported at the first use.
        if name in ("packed", "padded", "train_data"):
            from rollout.driver.data import batch

            return getattr(batch, name)
        if name == "to_torch":
            from rollout.driver.data.batch_torch import to_torch

            return to_torch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Driver",
    "EvalDataset",
    "EvalPlan",
    "EvalResult",
    "Hooks",
    "Prompt",
    "PromptData",
    "PromptSource",
    "RetryPolicy",
    "RolloutDriver",
    "RolloutOptions",
    "Session",
    "drop_zero_std",
    "groups_of",
    "packed",
    "padded",
    "sample_rows",
    "to_torch",
    "train_data",
]
