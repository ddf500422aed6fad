"""The few samples of a step that people read, on the page and in the report of a run.

Always true: there are at most ``MOST`` of a step, and each text is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rollout.core.samples import Sample, SampleGroup, SampleStatus, all_samples

MOST = 16
_MOST_CHARACTERS = 600
_MOST_IDS = 32
# Of a prompt's metadata, by which data sets name its text.
_TEXTS = ("prompt", "question", "problem", "input", "text")


def shown_samples(groups: Sequence[SampleGroup], num: int) -> list[dict[str, Any]]:
    """``num`` samples as JSON, spread from the highest reward to the lowest.

    The fields are those of ``ShownSample`` in the router's metrics.
    """
    samples = sorted(
        all_samples(groups),
        key=lambda sample: -math.inf if sample.reward is None else sample.reward,
        reverse=True,
    )
    num = min(num, MOST, len(samples))
    places = [round(index * (len(samples) - 1) / max(1, num - 1)) for index in range(num)]
    return [_shown(samples[place]) for place in places]


def _shown(sample: Sample) -> dict[str, Any]:
    ids = " ".join(map(str, sample.prompt_ids[:_MOST_IDS]))
    more = " …" if len(sample.prompt_ids) > _MOST_IDS else ""
    texts = (str(sample.metadata[name]) for name in _TEXTS if name in sample.metadata)
    prompt = next(texts, f"ids {ids}{more}")
    is_whole = sample.status is SampleStatus.COMPLETED
    return {
        "prompt": _cut(prompt),
        "reply": _cut(sample.text),
        "reward": sample.reward,
        "tokens": len(sample.output_ids),
        "engines": list(dict.fromkeys(span.engine_id for span in sample.engines))[:MOST],
        "versions": list(dict.fromkeys(sample.versions))[:MOST],
        "status": "" if is_whole else _cut(sample.error or sample.status.value),
    }


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]} … ({len(text)} characters)"
