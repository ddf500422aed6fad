"""Figures of many gaps: the trainer's log-probability of a token less the engine's, in nats.

Always true: figures are finite; gaps that are not finite are counted, and in no other figure.

The tokens are drawn from the engine's policy q, and p is the trainer's, so a gap is log(p/q), and
the ratio is p/q.  The estimators of KL(q || p) are those of J. Schulman, "Approximating KL
Divergence" (2020, http://joschu.net/blog/kl-approx.html), each averaged over the tokens:
k1 = -log(p/q), k2 = log(p/q)^2 / 2, k3 = p/q - 1 - log(p/q).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import accumulate
from operator import mul
from typing import NamedTuple, TypeVar

BOUNDS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the histogram of absolute gaps, in nats; a last bucket has the rest."""

K = TypeVar("K", str, int, tuple[str, str])

LARGEST_EXPONENT = 20.0
"""The logarithm of the largest ratio: an infinite one would make every average infinite."""


class Cell(NamedTuple):
    """Where tokens come from.

    Attributes:
        engine_id, weight_version: empty where they are not known.
        position: the tokens' places in their outputs: from this one to below twice of it; from 1.
    """

    engine_id: str
    weight_version: str
    position: int


@dataclass(frozen=True, slots=True)
class GapFigures:
    """Figures of the gaps of some tokens; zeros for no tokens.

    Attributes:
        num_tokens: with a finite gap.
        num_not_finite: tokens whose gap is NaN or infinite.
        mean: average of the absolute gap, in nats.
        largest: largest absolute gap.
        bias: average of the gap with its sign: below 0, the engine finds its tokens more probable
            than the trainer does.
        kl_k1, kl_k2, kl_k3: estimates of KL(engine || trainer), see the module.
        mean_ratio: average of the trainer's probability divided by the engine's; 1 if both agree.
    """

    num_tokens: int = 0
    num_not_finite: int = 0
    mean: float = 0.0
    largest: float = 0.0
    bias: float = 0.0
    kl_k1: float = 0.0
    kl_k2: float = 0.0
    kl_k3: float = 0.0
    mean_ratio: float = 1.0


@dataclass(slots=True)
class GapSums:
    """Sums over tokens, from which figures are made."""

    num: int = 0
    num_not_finite: int = 0
    absolute: float = 0.0
    largest: float = 0.0
    signed: float = 0.0
    squared: float = 0.0
    ratio: float = 0.0
    buckets: Counter[int] = field(default_factory=Counter)

    @property
    def mean(self) -> float:
        """Average of the absolute gap, in nats; 0 for no tokens."""
        return self.absolute / self.num if self.num else 0.0

    def add(self, gaps: Sequence[float]) -> None:
        """Add these tokens."""
        finite = list(filter(math.isfinite, gaps))
        self.num_not_finite += len(gaps) - len(finite)
        if not finite:
            return
        absolute = list(map(abs, finite))
        self.num += len(finite)
        self.absolute += sum(absolute)
        self.largest = max(self.largest, max(absolute))
        self.signed += sum(finite)
        self.squared += sum(map(mul, finite, finite))
        self.ratio += sum(ratios(finite))
        self.buckets.update(map(partial(bisect_left, BOUNDS), absolute))

    def plus(self, other: GapSums) -> GapSums:
        """The sums of both."""
        return GapSums(
            self.num + other.num,
            self.num_not_finite + other.num_not_finite,
            self.absolute + other.absolute,
            max(self.largest, other.largest),
            self.signed + other.signed,
            self.squared + other.squared,
            self.ratio + other.ratio,
            self.buckets + other.buckets,
        )

    def figures(self) -> GapFigures:
        if not self.num:
            return GapFigures(num_not_finite=self.num_not_finite)
        bias, ratio = self.signed / self.num, self.ratio / self.num
        return GapFigures(
            num_tokens=self.num,
            num_not_finite=self.num_not_finite,
            mean=self.mean,
            largest=self.largest,
            bias=bias,
            kl_k1=-bias,
            kl_k2=self.squared / self.num / 2,
            kl_k3=ratio - 1 - bias,
            mean_ratio=ratio,
        )

    def histogram(self) -> dict[str, float]:
        """For each bound, in nats, the tokens up to it, as Prometheus counts; and the sum."""
        counts = accumulate(self.buckets[index] for index in range(len(BOUNDS) + 1))
        return dict(zip(BUCKET_NAMES, counts, strict=True)) | {"sum": self.absolute}


BUCKET_NAMES = (*map(str, BOUNDS), "+Inf")


def ratios(gaps: Sequence[float]) -> list[float]:
    """The trainer's probability divided by the engine's, for each gap."""
    if max(gaps, default=0.0) <= LARGEST_EXPONENT:
        return list(map(math.exp, gaps))
    return [math.exp(min(gap, LARGEST_EXPONENT)) for gap in gaps]


def total(sums: Iterable[GapSums]) -> GapSums:
    """All of these together."""
    return reduce(GapSums.plus, sums, GapSums())


def summed(sums: Mapping[Cell, GapSums], key: Callable[[Cell], K]) -> dict[K, GapSums]:
    """The sums of all cells with the same key."""
    found: dict[K, GapSums] = {}
    for cell, of_cell in sums.items():
        found[key(cell)] = found.get(key(cell), GapSums()).plus(of_cell)
    return found
