"""Evaluation: several data sets, each with its own sampling, all tokens from one weight version.

Always true: the figures of a data set have every key of the ``[EVAL RESULT]`` line, whatever
failed and however little there was; no figure mixes weight versions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.protocol import SamplingParams
from rollout.driver.hooks import Hooks, Reward
from rollout.driver.metrics import is_repetitive, length_figures
from rollout.driver.options import Batch, RolloutOptions
from rollout.driver.ports import Engines
from rollout.driver.prompts import Prompt
from rollout.driver.sources import Fixed
from rollout.driver.stream import Stream
from rollout.errors import ConfigError, RolloutError
from rollout.samples import Sample, SampleGroup, SampleStatus, all_samples

_TRIES = 3


@dataclass(frozen=True, slots=True)
class EvalDataset:
    """What is evaluated, and how.

    Attributes:
        num_samples: of each prompt.
        reward: in the place of the driver's.
        ks: of pass@k; powers of two up to ``num_samples`` if left out.
        right_from: a sample is right when its reward is at least this.

    Raises:
        ConfigError: a k is more than ``num_samples`` or less than 1.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    num_samples: int = 1
    reward: Reward | None = None
    ks: tuple[int, ...] | None = None
    right_from: float = 1.0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"num_samples = {self.num_samples}: must be at least 1")
        wrong = [k for k in self.ks or () if not 1 <= k <= self.num_samples]
        if wrong:
            raise ConfigError(
                f"pass@{wrong[0]} needs as many samples; num_samples is {self.num_samples}",
                setting="ks",
                value=wrong[0],
            )


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Figures of all data sets, and the groups behind them."""

    rollout_id: int
    metrics: dict[str, float]
    groups: Mapping[str, list[SampleGroup]]

    @property
    def line(self) -> str:
        """The line that people search their logs for."""
        return eval_line(self.rollout_id, self.metrics)


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """When to evaluate: before the first training step, and every ``every`` steps."""

    every: int
    before_first: bool = True

    def is_due(self, num_trained: int) -> bool:
        """Whether to evaluate after so many training steps."""
        if num_trained == 0:
            return self.before_first
        return self.every > 0 and num_trained % self.every == 0


def eval_line(rollout_id: int, metrics: Mapping[str, float]) -> str:
    """``[EVAL RESULT]`` as slime prints it."""
    return f"[EVAL RESULT] eval {rollout_id}: {dict(metrics)}"


async def evaluated(
    rollout_id: int,
    datasets: Mapping[str, EvalDataset],
    engines: Engines,
    hooks: Hooks,
    version: int | None,
) -> EvalResult:
    """Generate and judge all data sets.

    Args:
        version: that the engines hold; where it is not known, what the first answers say.

    Raises:
        RolloutError: the weight version changed meanwhile, and again when it was redone.
    """
    pin = version
    for _ in range(_TRIES):
        made = await asyncio.gather(
            *(_groups(dataset, engines, hooks, pin) for dataset in datasets.values())
        )
        seen = {number for groups in made for one in all_samples(groups) for number in one.versions}
        is_whole = all(
            len(groups) == len(dataset.prompts)
            for groups, dataset in zip(made, datasets.values(), strict=True)
        )
        if is_whole and len(seen) <= 1:
            by_name = dict(zip(datasets, made, strict=True))
            metrics: dict[str, float] = {}
            for name, dataset in datasets.items():
                ks = _ks(dataset.num_samples) if dataset.ks is None else dataset.ks
                metrics |= group_metrics(name, by_name[name], ks=ks, right_from=dataset.right_from)
            return EvalResult(rollout_id, metrics, by_name)
        pin = engines.weight_version
    raise RolloutError(
        f"evaluation {rollout_id}: the weight version changed in each of {_TRIES} tries; "
        f"the last saw {', '.join(map(str, sorted(seen)))}"
    )


async def _groups(
    dataset: EvalDataset, engines: Engines, hooks: Hooks, pin: int | None
) -> list[SampleGroup]:
    if not dataset.prompts:
        return []
    own = replace(
        hooks,
        reward=dataset.reward or hooks.reward,
        group_reward=None if dataset.reward else hooks.group_reward,
        sample_filter=None,
        group_filter=None,
        post_process=None,
    )
    batch = Batch(len(dataset.prompts), dataset.num_samples, dataset.sampling)
    options = RolloutOptions(pin=pin, max_redone=1, max_failed_share=1.0)
    stream = Stream(Fixed(dataset.prompts), engines, own, batch, options)
    try:
        return await stream.batch()
    finally:
        await stream.close()


def eval_metrics(dataset: str, samples: Sequence[Sample]) -> dict[str, float]:
    """``group_metrics`` of one sample for each prompt."""
    return group_metrics(dataset, [SampleGroup(i, [one]) for i, one in enumerate(samples)])


def group_metrics(
    dataset: str,
    groups: Sequence[SampleGroup],
    *,
    ks: Sequence[int] = (1,),
    right_from: float = 1.0,
) -> dict[str, float]:
    """Mean reward, response lengths in tokens, shares of bad endings, pass@k, versions.

    Samples without a reward (failed, aborted) count in ``none_reward_ratio`` and nowhere else.
    An empty data set gives zeros, and -1 for the versions, not a division by zero.
    """
    key = f"eval/{dataset}"
    samples = list(all_samples(groups))
    judged = [sample for sample in samples if sample.reward is not None]
    num = max(1, len(judged))
    versions = [number for sample in judged for number in sample.versions]
    return {
        key: sum(sample.reward or 0.0 for sample in judged) / num,
        **{f"{key}/response_len/{name}": x for name, x in length_figures(judged).items()},
        f"{key}/repetition_frac": sum(is_repetitive(sample.text) for sample in judged) / num,
        f"{key}/truncated_ratio": sum(sample.status is SampleStatus.TRUNCATED for sample in judged)
        / num,
        f"{key}/none_reward_ratio": (len(samples) - len(judged)) / max(1, len(samples)),
        **{f"{key}/pass@{k}": mean_pass_at_k(groups, k, right_from) for k in ks},
        f"{key}/zero_std/num_all_right": _num_equal(groups, right_from, is_right=True),
        f"{key}/zero_std/num_all_wrong": _num_equal(groups, right_from, is_right=False),
        f"{key}/weight_version/min": float(min(versions, default=-1)),
        f"{key}/weight_version/max": float(max(versions, default=-1)),
        f"{key}/mixed_version_ratio": sum(len(set(one.versions)) > 1 for one in judged) / num,
    }


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that one of ``k`` samples is right, from ``num_right`` right of ``num_samples``.

    The unbiased estimator ``1 - C(n - c, k) / C(n, k)`` of Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code" (arXiv 2107.03374), section 2.1, equation 1.

    Raises:
        ValueError: ``k`` is more than ``num_samples`` or less than 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def mean_pass_at_k(groups: Sequence[SampleGroup], k: int, right_from: float = 1.0) -> float:
    """Mean over the prompts that have at least ``k`` judged samples; 0 if none has."""
    estimates = [
        pass_at_k(len(rewards), sum(one >= right_from for one in rewards), k)
        for group in groups
        if len(rewards := group.rewards) >= k
    ]
    return sum(estimates) / max(1, len(estimates))


def _num_equal(groups: Sequence[SampleGroup], right_from: float, *, is_right: bool) -> float:
    equal = [group.rewards[0] for group in groups if group.has_zero_std]
    return float(sum((reward >= right_from) is is_right for reward in equal))


def _ks(num_samples: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(num_samples.bit_length()))
