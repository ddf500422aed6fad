"""The figures of one step, from its groups and from what the stream counted on the way.

Always true: every figure is a finite number; a step of nothing has figures too.
"""

from __future__ import annotations

import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout.samples import Sample, SampleGroup, SampleStatus, all_samples

# A text that zlib shrinks to less than a tenth says the same thing again and again.
_REPETITION_RATIO = 10.0
_REPETITION_MIN_CHARS = 200


@dataclass(slots=True)
class StepStats:
    """What a stream counts while a batch fills.

    Attributes:
        rejected: groups that a filter dropped, by reason.
        num_parked: samples put aside unfinished at the end of the batch.
        num_redone: samples done anew for their age.
        num_stale_dropped: groups dropped for their age.
        num_lost: replies lost with their engine or connection.
        num_cut: replies that came back aborted.
        elapsed_s: from the call until the batch was full.
        slot_s: seconds of all slots used in that time.
        num_slots: that could be used.
        boundary_s: seconds without anything in flight between the last batch and this call.
    """

    rejected: Counter[str] = field(default_factory=Counter)
    num_parked: int = 0
    num_redone: int = 0
    num_stale_dropped: int = 0
    num_lost: int = 0
    num_cut: int = 0
    elapsed_s: float = 0.0
    slot_s: float = 0.0
    num_slots: int = 0
    boundary_s: float = 0.0


def step_metrics(
    groups: Sequence[SampleGroup], stats: StepStats, *, weight_version: int | None = None
) -> dict[str, float]:
    """Figures under ``rollout/``.

    ``engine_busy_share`` is the share of slots in use, of those that may be; ``boundary_s`` the
    time lost between batches; ``version_lag/N`` how many samples have a token that is N behind.

    Args:
        weight_version: the policy's, for the lag; the newest in the batch where left out.
    """
    samples = list(all_samples(groups))
    tokens = sum(sum(sample.mask) for sample in samples)
    elapsed_s = stats.elapsed_s or float("inf")
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    num = max(1, len(samples))
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
        **{f"rejected/{reason}": count for reason, count in stats.rejected.items()},
        **{f"version_lag/{lag}": count for lag, count in lags(samples, weight_version).items()},
    }
    return {f"rollout/{name}": float(value) for name, value in figures.items()}


def lags(samples: Sequence[Sample], weight_version: int | None = None) -> Mapping[int, int]:
    """How many samples are how many versions behind, by their oldest token."""
    versions = [sample.versions for sample in samples]
    newest = max((max(of_one) for of_one in versions if of_one), default=0)
    current = newest if weight_version is None else weight_version
    return dict(sorted(Counter(current - min(one) for one in versions if one).items()))


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
    """How many outputs have at most so many tokens, and more than half of that."""
    bounds = Counter(1 << max(0, len(one.output_ids) - 1).bit_length() for one in samples)
    return {str(bound): bounds[bound] for bound in sorted(bounds)}


def is_repetitive(text: str) -> bool:
    """Whether a text mostly repeats itself; short texts never count."""
    raw = text.encode(errors="replace")
    return (
        len(text) >= _REPETITION_MIN_CHARS
        and len(raw) / len(zlib.compress(raw, 1)) > _REPETITION_RATIO
    )


def _share(samples: Sequence[Sample], status: SampleStatus) -> float:
    return sum(sample.status is status for sample in samples) / max(1, len(samples))
