"""Evaluation of data sets, each with its own sampling; all tokens come from one weight version.

Always true: the metrics of a data set have every key of the ``[EVAL RESULT]`` line, even if all
samples failed or the data set is empty; no metric mixes weight versions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import Field

from engines.protocol import SamplingParams
from rollout.core.arguments import Count, Positive, checked, options
from rollout.core.errors import RolloutError, VersionUnavailable
from rollout.core.samples import SampleGroup, SampleStatus, all_samples
from rollout.driver.client.completer import Completer
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.prompt_data import FixedPrompts
from rollout.driver.stream.hooks import Hooks, Reward
from rollout.driver.stream.options import BatchPlan, RolloutOptions, check_rollout_sampling
from rollout.driver.stream.step_metrics import is_repetitive, length_figures
from rollout.driver.stream.stream import Stream
from rollout.rules.contract import Contract

_TRIES = 3
T = TypeVar("T")


@options
class EvalDataset:
    """A data set and how it is evaluated.

    Attributes:
        prompts: a list.
        sampling: for each sample; by default greedy.
        num_samples: samples per prompt.
        reward: instead of the driver's.
        ks: the k of pass@k; None: powers of two up to ``num_samples``.
        right_from: a sample is right when its reward is at least this.

    Raises:
        TypeError: a value is of another type.
        ValueError: ``num_samples`` is less than 1, or a k is not in 1..``num_samples``.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    num_samples: Positive = 1
    reward: Reward | None = None
    ks: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None
    right_from: float = 1.0

    def __post_init__(self) -> None:
        check_rollout_sampling(self.sampling)
        wrong = [k for k in self.ks or () if k > self.num_samples]
        if wrong:
            raise ValueError(
                f"pass@{wrong[0]} needs as many samples; num_samples is {self.num_samples}"
            )


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Metrics of all data sets, and their groups."""

    rollout_id: int
    metrics: dict[str, float]
    groups: Mapping[str, list[SampleGroup]]

    @property
    def line(self) -> str:
        """The ``[EVAL RESULT]`` line for the log, as slime prints it."""
        return f"[EVAL RESULT] eval {self.rollout_id}: {self.metrics}"


@options
class EvalPlan:
    """When to evaluate: before the first training step, and every ``every`` steps.

    Attributes:
        every: steps; 0 for never.
        before_first: also before the first one.

    Raises:
        TypeError, ValueError: ``every`` is no whole number, at least 0.
    """

    every: Count
    before_first: bool = True

    @checked
    def is_due(self, num_trained: Count) -> bool:
        """Whether to evaluate after ``num_trained`` training steps.

        Args:
            num_trained: from 0.

        Raises:
            TypeError, ValueError: it is no such number.
        """
        if num_trained == 0:
            return self.before_first
        return self.every > 0 and num_trained % self.every == 0


async def evaluate_datasets(
    rollout_id: int,
    datasets: Mapping[str, EvalDataset],
    engines: Completer,
    hooks: Hooks,
    version: int | None,
) -> EvalResult:
    """Generate and reward the samples of all data sets.

    Args:
        version: the weight version to evaluate; None: the one in the first replies.

    Raises:
        RolloutError: the weight version changed during every try.
        VersionUnavailable: the engines serve an older version than ``version``.
    """
    for _ in range(_TRIES):
        try:
            results = await _all(
                _run_dataset(dataset, engines, hooks, version) for dataset in datasets.values()
            )
        except VersionUnavailable:
            if engines.weight_version == version:
                raise
            version = engines.weight_version
            continue
        samples = [sample for groups in results for sample in all_samples(groups)]
        # Without a known version, or a router, the replies are not held to one.
        seen = {number for sample in samples for number in sample.versions}
        if len(seen) <= 1:
            return _result(rollout_id, datasets, dict(zip(datasets, results, strict=True)))
        version = engines.weight_version
    raise RolloutError(
        f"evaluation {rollout_id}: the weight version changed in each of {_TRIES} tries; the "
        f"engines have {version} now"
    )


def no_evaluation(rollout_id: int, datasets: Mapping[str, EvalDataset]) -> EvalResult:
    """The result without a sample: zeros under every key."""
    return _result(rollout_id, datasets, {name: [] for name in datasets})


def _result(
    rollout_id: int,
    datasets: Mapping[str, EvalDataset],
    groups: Mapping[str, list[SampleGroup]],
) -> EvalResult:
    metrics: dict[str, float] = {}
    for name, dataset in datasets.items():
        ks = dataset.ks
        if ks is None:
            ks = tuple(2**power for power in range(dataset.num_samples.bit_length()))
        metrics |= group_metrics(name, groups[name], ks=ks, right_from=dataset.right_from)
    return EvalResult(rollout_id, metrics, groups)


async def _all(runs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return; the first error ends the others before it is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run) for run in runs]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def _run_dataset(
    dataset: EvalDataset, engines: Completer, hooks: Hooks, version: int | None
) -> list[SampleGroup]:
    if not dataset.prompts:
        return []
    dataset_hooks = replace(
        hooks,
        reward=dataset.reward or hooks.reward,
        group_reward=None if dataset.reward else hooks.group_reward,
        sample_filter=None,
        group_filter=None,
        post_process=None,
    )
    batch = BatchPlan(len(dataset.prompts), dataset.num_samples, dataset.sampling)
    options = RolloutOptions(max_failed_share=1.0, logprob_kind=None)
    contract = Contract(weight_version=version)
    stream = Stream(
        FixedPrompts(dataset.prompts), engines, dataset_hooks, batch, options, contract=contract
    )
    try:
        async with stream.batch() as groups:
            return groups
    finally:
        await stream.close()


def group_metrics(
    dataset: str,
    groups: Sequence[SampleGroup],
    *,
    ks: Sequence[int] = (1,),
    right_from: float = 1.0,
) -> dict[str, float]:
    """Mean reward, response lengths in tokens, shares of failures, pass@k, weight versions.

    Samples without a reward (failed, aborted) count only in ``none_reward_ratio``.  An empty data
    set gives zeros, and -1 for the versions.
    """
    key = f"eval/{dataset}"
    samples = list(all_samples(groups))
    rewarded = [sample for sample in samples if sample.reward is not None]
    num = max(1, len(rewarded))
    versions = [number for sample in rewarded for number in sample.versions]
    are_right = [group.rewards[0] >= right_from for group in groups if group.has_zero_std]
    return {
        key: sum(sample.reward or 0.0 for sample in rewarded) / num,
        **{f"{key}/response_len/{name}": x for name, x in length_figures(rewarded).items()},
        f"{key}/repetition_frac": sum(is_repetitive(sample.text) for sample in rewarded) / num,
        f"{key}/truncated_ratio": sum(s.status is SampleStatus.TRUNCATED for s in rewarded) / num,
        f"{key}/none_reward_ratio": (len(samples) - len(rewarded)) / max(1, len(samples)),
        **{f"{key}/pass@{k}": mean_pass_at_k(groups, k, right_from) for k in ks},
        f"{key}/zero_std/num_all_right": float(sum(are_right)),
        f"{key}/zero_std/num_all_wrong": float(are_right.count(False)),
        f"{key}/weight_version/min": float(min(versions, default=-1)),
        f"{key}/weight_version/max": float(max(versions, default=-1)),
        f"{key}/mixed_version_ratio": sum(len(set(s.versions)) > 1 for s in rewarded) / num,
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
    """Mean over the prompts with at least ``k`` rewarded samples; 0 if there are none."""
    estimates = [
        pass_at_k(len(rewards), sum(reward >= right_from for reward in rewards), k)
        for group in groups
        if len(rewards := group.rewards) >= k
    ]
    return sum(estimates) / max(1, len(estimates))
