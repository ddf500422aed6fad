"""The metrics of one step, from its groups and from the counts of the stream.

Always true: every metric is a finite number, also for an empty step.
"""

from __future__ import annotations

import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout.core.samples import Sample, SampleFailure, SampleGroup, SampleStatus, all_samples

# A text that zlib compresses to less than a tenth is repetitive.
_REPETITION_RATIO = 10.0
_REPETITION_MIN_CHARS = 200
_MAX_REASONS = 32
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is, in groups; for progress bars."""

    num_ready: int
    num_wanted: int
    num_open: int
    num_rejected: int


@dataclass(slots=True)
class StepStats:
    """The counts of a stream for one batch.

    Attributes:
        rejected: groups dropped by a filter, by reason.
        num_parked: samples that were interrupted unfinished at the end of the batch.
        num_redone: stale samples that were generated again.
        num_stale_dropped: groups dropped as stale.
        stale_versions: the weight versions of their tokens.
        failed_dropped: failed samples that were dropped, by kind.
        num_lost: replies lost with their engine or connection.
        num_cut: replies that came back aborted.
        elapsed_s: seconds from the call until the batch was full.
        slot_s: seconds of use in that time, summed over slots.
        num_slots: slots that could be used.
        boundary_s: seconds without anything in flight between the last batch and this call.
    """

    rejected: Counter[str] = field(default_factory=Counter)
    num_parked: int = 0
    num_redone: int = 0
    num_stale_dropped: int = 0
    stale_versions: set[int] = field(default_factory=set)
    failed_dropped: Counter[str] = field(default_factory=Counter)
    num_lost: int = 0
    num_cut: int = 0
    elapsed_s: float = 0.0
    slot_s: float = 0.0
    num_slots: int = 0
    boundary_s: float = 0.0


def step_metrics(
    groups: Sequence[SampleGroup], stats: StepStats, *, weight_version: int | None = None
) -> dict[str, float]:
    """Metrics named ``rollout/...``.

    ``failed/KIND`` is the number of failed samples of a kind, with those that were dropped;
    ``engine_busy_share`` is the used share of the slots; ``boundary_s`` the idle time between
    batches; ``version_lag/N`` the number of samples whose oldest token is N versions behind.

    Args:
        weight_version: the policy's, for the lag; None: the newest in the batch.
    """
    samples = list(all_samples(groups))
    tokens = sum(sum(sample.mask) for sample in samples)
    elapsed_s = stats.elapsed_s or float("inf")
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    num = max(1, len(samples))
    failed = stats.failed_dropped + Counter(
        kind_of(sample) for sample in samples if sample.status is SampleStatus.FAILED
    )
    figures = {
        "num_groups": len(groups),
        "num_samples": len(samples),
        "reward/mean": statistics.fmean(rewards or [0.0]),
        "reward/std": statistics.pstdev(rewards or [0.0]),
        "reward/max": max(rewards, default=0.0),
        "reward/min": min(rewards, default=0.0),
        **{f"response_len/{name}": value for name, value in length_figures(samples).items()},
        "truncated_ratio": _share(samples, SampleStatus.TRUNCATED),
        "failed_ratio": _share(samples, SampleStatus.FAILED),
        "repetition_frac": sum(is_repetitive(sample.text) for sample in samples) / num,
        "zero_std_groups": sum(group.has_zero_std for group in groups),
        "mixed_version_ratio": sum(len(set(sample.versions)) > 1 for sample in samples) / num,
        "partial_samples": stats.num_parked,
        "rejected_groups": stats.rejected.total(),
        "stale_samples_redone": stats.num_redone,
        "stale_groups_dropped": stats.num_stale_dropped,
        "lost_replies": stats.num_lost,
        "cut_replies": stats.num_cut,
        "seconds": stats.elapsed_s,
        "tokens_per_s": tokens / elapsed_s,
        "samples_per_s": len(samples) / elapsed_s,
        "engine_busy_share": stats.slot_s / (max(1, stats.num_slots) * elapsed_s),
        "boundary_s": stats.boundary_s,
        **{f"failed/{kind}": count for kind, count in failed.items()},
        **{f"rejected/{reason}": count for reason, count in most_common(stats.rejected)},
        **{f"version_lag/{lag}": count for lag, count in lags(samples, weight_version).items()},
    }
    return {f"rollout/{name}": float(value) for name, value in figures.items()}


def kind_of(sample: Sample) -> str:
    """The kind of a failed sample; one that code of the user has marked has ``generate_error``."""
    return sample.failure or SampleFailure.GENERATE_ERROR


def most_common(rejected: Counter[str]) -> list[tuple[str, int]]:
    """The most frequent reasons, each with its number of groups; all others are ``other``."""
    if len(rejected) <= _MAX_REASONS:
        return rejected.most_common()
    named = dict(rejected.most_common(_MAX_REASONS))
    others = rejected.total() - sum(named.values())
    return [*(named | {OTHER: others + named.get(OTHER, 0)}).items()]


def lags(samples: Sequence[Sample], weight_version: int | None = None) -> Mapping[int, int]:
    """Number of samples by how many versions their oldest token is behind."""
    versions = [sample.versions for sample in samples]
    newest = max((max(spans) for spans in versions if spans), default=0)
    current = newest if weight_version is None else weight_version
    return dict(sorted(Counter(current - min(spans) for spans in versions if spans).items()))


def length_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean, median, maximum and minimum of output tokens; zeros for no samples."""
    lengths = [len(sample.output_ids) for sample in samples] or [0]
    return {
        "mean": statistics.fmean(lengths),
        "median": float(statistics.median(lengths)),
        "max": float(max(lengths)),
        "min": float(min(lengths)),
    }


def length_histogram(samples: Sequence[Sample]) -> dict[str, int]:
    """Number of outputs by length: of at most that many tokens, and more than half of it."""
    bounds = Counter(1 << max(0, len(sample.output_ids) - 1).bit_length() for sample in samples)
    return {str(bound): bounds[bound] for bound in sorted(bounds)}


def is_repetitive(text: str) -> bool:
    """Whether a text mostly repeats itself; False for short texts."""
    raw = text.encode(errors="replace")
    return (
        len(text) >= _REPETITION_MIN_CHARS
        and len(raw) / len(zlib.compress(raw, 1)) > _REPETITION_RATIO
    )


def _share(samples: Sequence[Sample], status: SampleStatus) -> float:
    return sum(sample.status is status for sample in samples) / max(1, len(samples))
