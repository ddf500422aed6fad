"""The end of a batch: its timing, its weight version, and the limits on failures and drops."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.core.errors import RolloutError
from rollout.core.samples import Sample, SampleGroup, SampleStatus
from rollout.driver.client.completer import AbortScope
from rollout.driver.client.limiter import Limiter
from rollout.driver.stream.options import RolloutOptions
from rollout.driver.stream.step_metrics import StepStats, kind_of, most_common

_REJECTED_PER_GROUP = 10


class BatchTimer:
    """Measures each batch of one stream between ``begin`` and ``end``."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._began_s = self._used_s = 0.0

    def begin(self, scope: AbortScope) -> StepStats:
        """New counters for the batch that begins now."""
        self._used_s, idle_s = self._limiter.seconds()
        self._began_s = asyncio.get_running_loop().time()
        scope.num_lost = scope.num_cut = 0
        # Of the driver's last batch: a list of prompts has a stream for one batch.
        idle_at_end_s = self._limiter.idle_at_end_s
        return StepStats(boundary_s=0.0 if idle_at_end_s is None else idle_s - idle_at_end_s)

    def end(self, stats: StepStats, scope: AbortScope) -> None:
        """Fill in the figures of a batch that is full."""
        used_s, self._limiter.idle_at_end_s = self._limiter.seconds()
        stats.elapsed_s = asyncio.get_running_loop().time() - self._began_s
        stats.slot_s = used_s - self._used_s
        stats.num_slots = self._limiter.limit
        stats.num_lost, stats.num_cut = scope.num_lost, scope.num_cut


def check_rejections(
    rejected: Counter[str], max_rejected: int | None, *, num_accepted: int, num_wanted: int
) -> None:
    """Fail a batch if filters dropped too many groups.

    Args:
        rejected: dropped groups by reason.
        max_rejected: None for ten groups per wanted group.

    Raises:
        RolloutError: with the reasons.
    """
    most = _REJECTED_PER_GROUP * num_wanted if max_rejected is None else max_rejected
    if rejected.total() > most:
        reasons = ", ".join(f"{reason}: {num}" for reason, num in most_common(rejected))
        raise RolloutError(
            f"filters dropped {rejected.total()} groups, more than {most}, and kept "
            f"{num_accepted} of {num_wanted} wanted ({reasons})"
        )


def why_wrong_version(newest: int, wanted: int, served: int | None, options: RolloutOptions) -> str:
    """Why a batch is of weights older than the policy's, by mistake.

    Args:
        newest: version of its newest token.
        wanted: the policy's, when the batch began.
        served: what the engines serve now, or None if that is unknown.
    """
    lag = wanted - newest
    # Only such a batch has no groups from before the call.
    is_new = options.mode == "sync" and options.over_sampling == 1.0
    is_behind = served is not None and served < wanted
    if lag <= 0 or not (is_behind or (is_new and lag > (options.max_version_lag or 0))):
        return ""
    engines = f", and the engines serve {served}" if is_behind else ""
    return (
        f"weight version {wanted} is wanted, and no token has it: the newest has {newest}{engines}."
        f" Push it first, with push(weights, version={wanted}). After a restart engines "
        f"hold model_path: launch(config, expect_version={wanted}) lets none of it through"
    )


def is_counted(sample: Sample, options: RolloutOptions) -> bool:
    """Whether a sample has failed of a kind that was not expected."""
    expected: Mapping[Any, str] = options.when_failed
    return sample.status is SampleStatus.FAILED and kind_of(sample) not in expected


def without_expected(
    samples: Sequence[Sample], options: RolloutOptions, dropped: Counter[str]
) -> list[Sample]:
    """The samples of a group that ``when_failed`` leaves, masked where it masks them.

    Args:
        dropped: the kinds of the others are counted there.
    """
    expected: Mapping[Any, str] = options.when_failed
    kept = []
    for sample in samples:
        act = expected.get(kind_of(sample)) if sample.status is SampleStatus.FAILED else "keep"
        if act == "drop":
            dropped[kind_of(sample)] += 1
            continue
        if act == "mask":
            sample.loss_mask = [0] * len(sample.output_ids)
        kept.append(sample)
    return kept


def check_failures(
    groups: Sequence[SampleGroup],
    options: RolloutOptions,
    failures: Sequence[tuple[Sample, BaseException]],
) -> None:
    """Reject a batch with too many failed samples.

    Args:
        failures: of samples, with what was raised.

    Raises:
        RolloutError: with the kinds, and the error of the first failed sample; its cause is what
            was raised.
    """
    samples = [
        (f"sample {index} of prompt {group.prompt_index}", sample)
        for group in groups
        for index, sample in enumerate(group.samples)
    ]
    failed = [(name, sample) for name, sample in samples if is_counted(sample, options)]
    if len(failed) > options.max_failed_share * len(samples):
        name, first = failed[0]
        kinds = Counter(kind_of(sample) for _, sample in failed).most_common()
        error = RolloutError(
            f"{len(failed)} of {len(samples)} samples failed "
            f"({', '.join(f'{kind}: {num}' for kind, num in kinds)}), of which max_failed_share = "
            f"{options.max_failed_share:g} may, beside the kinds that RolloutOptions(when_failed="
            f"...) names; the first, {name}: {first.error}"
        )
        if first.traceback:
            error.add_note(f"The first failed with:\n{first.traceback}")
        raise error from next((cause for sample, cause in failures if sample is first), None)


def why_none_left(
    stats: StepStats, num_prompts: int, weight_version: int | None, options: RolloutOptions
) -> str:
    """Why a batch of a list has no group."""
    parts = [f"{reason}: {num}" for reason, num in most_common(stats.rejected)]
    if stats.num_stale_dropped:
        versions = ", ".join(map(str, sorted(stats.stale_versions)))
        parts.append(
            f"stale: {stats.num_stale_dropped}, with tokens of version {versions}; the policy's "
            f"version is {weight_version}, and max_version_lag is {options.max_version_lag}"
        )
    return f"no group is left of {num_prompts} prompts ({'; '.join(parts)})"
