"""Samples whose kind of log-probs is not known: a cut, a penalty or a bias is named, weights and
temperatures are not taken for one."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from rollout.core.samples import Sample
from rollout.driver.logprobs.comparison import compare_logprobs
from rollout.driver.logprobs.gap_shapes import BIAS, CUT, PENALTY
from tests.support.small_policy import VOCABULARY, Policy, new_policy

OURS = new_policy(random.Random(7))
Change = Callable[[list[float], Sequence[int], Sequence[int]], list[float]]
"""Of logits, with prompt and output so far."""


def top_p(row: list[float], prompt: Sequence[int], ids: Sequence[int], share: float = 0.5) -> list:
    kept, mass = set[int](), 0.0
    total = sum(map(math.exp, row))
    for token in sorted(range(VOCABULARY), key=row.__getitem__, reverse=True):
        if mass < share:
            kept.add(token)
        mass += math.exp(row[token]) / total
    return [one if token in kept else -math.inf for token, one in enumerate(row)]


def top_k(row: list[float], prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    least = sorted(row)[-5]
    return [one if one >= least else -math.inf for one in row]


def min_p(row: list[float], prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    return [one if one >= max(row) + math.log(0.2) else -math.inf for one in row]


def allowed(row: list[float], prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    return [one if token % 3 else -math.inf for token, one in enumerate(row)]


def presence(row: list[float], prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    return [one - 1.5 * (token in ids) for token, one in enumerate(row)]


def frequency(row: list[float], prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    counts = Counter(ids)
    return [one - counts[token] for token, one in enumerate(row)]


def late(row: list[float], prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """As SGLang's, which does not count the newest token."""
    return presence(row, prompt, ids[:-1])


def repetition(row: list[float], prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    seen = {*prompt, *ids}
    return [
        (one / 1.3 if one > 0 else one * 1.3) if token in seen else one
        for token, one in enumerate(row)
    ]


def biased(row: list[float], prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    return [one + 3.0 * (token in (5, 9)) for token, one in enumerate(row)]


def drawn(change: Change, policy: Policy = OURS, seed: int = 1, num: int = 24) -> list[Sample]:
    """What an engine returns that draws from these logits, without a kind."""
    draw, made = random.Random(seed), []
    for _ in range(num):
        prompt, ids, logprobs = [draw.randrange(VOCABULARY)], list[int](), list[float]()
        for _ in range(12):
            row = change(list(policy.logits[[*prompt, *ids][-1]]), prompt, ids)
            total = math.log(sum(map(math.exp, row)))
            (token,) = draw.choices(range(VOCABULARY), [math.exp(one - total) for one in row])
            ids.append(token)
            logprobs.append(row[token] - total)
        made.append(Sample(prompt, ids, logprobs))
    return made


def why(samples: list[Sample], temperature: float = 1.0) -> str:
    rows = [OURS.logprobs(sample, temperature) for sample in samples]
    mismatch = compare_logprobs(samples, rows, temperature=temperature, dtype="float32").mismatch
    assert mismatch is not None
    return mismatch.why


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (top_p, CUT),
        (top_k, CUT),
        (min_p, CUT),
        (allowed, CUT),
        (presence, PENALTY),
        (late, PENALTY),
        (frequency, PENALTY),
        (repetition, PENALTY),
        (biased, BIAS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_changed_the_log_probs_is_named(change: Change, shape: str, seed: int) -> None:
    found = why(drawn(change, seed=seed))
    assert f"{shape}: compare samples without them before you look for wrong weights" in found
    assert sum(other in found for other in (CUT, PENALTY, BIAS)) == 1


def at(temperature: float) -> Change:
    return lambda row, prompt, ids: [one / temperature for one in row]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("policy", "change"),
    [
        *((OURS, at(temperature)) for temperature in (0.3, 0.7, 1.3, 1.7)),
        (OURS.with_swapped_rows(), at(1.0)),
        *((OURS.trained(random.Random(3), step), at(1.0)) for step in (0.05, 0.5, 2.0)),
    ],
)
def test_weights_and_temperatures_are_not_taken_for_one(
    policy: Policy, change: Change, seed: int
) -> None:
    found = why(drawn(change, policy, seed))
    assert found.endswith("The limit is 0.001")


def test_few_tokens_have_no_shape() -> None:
    assert why(drawn(top_p, num=2)).endswith("The limit is 0.001")
