"""Figures of one evaluation, under the names people know from slime's ``[EVAL RESULT]`` line."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Sequence

from rollout.types import Sample, SampleStatus

# A text that zlib shrinks to less than a tenth says the same thing again and again.
_REPETITION_RATIO = 10.0
_REPETITION_MIN_CHARS = 200


def eval_metrics(dataset: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Mean reward, response lengths in tokens, and shares of bad endings.

    Samples without a reward (failed, aborted) count in ``none_reward_ratio`` and nowhere else.
    An empty data set gives zeros, not a division by zero.
    """
    key = f"eval/{dataset}"
    judged = [sample for sample in samples if sample.reward is not None]
    lengths = [len(sample.output_ids) for sample in judged] or [0]
    num = max(1, len(judged))
    return {
        key: sum(sample.reward or 0.0 for sample in judged) / num,
        f"{key}/response_len/mean": statistics.fmean(lengths),
        f"{key}/response_len/median": float(statistics.median(lengths)),
        f"{key}/response_len/max": float(max(lengths)),
        f"{key}/response_len/min": float(min(lengths)),
        f"{key}/repetition_frac": sum(is_repetitive(sample.text) for sample in judged) / num,
        f"{key}/truncated_ratio": sum(sample.status is SampleStatus.TRUNCATED for sample in judged)
        / num,
        f"{key}/none_reward_ratio": (len(samples) - len(judged)) / max(1, len(samples)),
    }


def is_repetitive(text: str) -> bool:
    """Whether a text mostly repeats itself; short texts never count."""
    raw = text.encode()
    return (
        len(text) >= _REPETITION_MIN_CHARS
        and len(raw) / len(zlib.compress(raw)) > _REPETITION_RATIO
    )
