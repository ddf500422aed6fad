"""Bounds of importance ratios, as logarithms: what a rejection leaves, for plain rows.

``rollout.driver.logprobs.correction`` explains the levels and has the same for tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal

from rollout.core.arguments import wrong

Level = Literal["token", "sequence", "geometric"]

TIS_CAP = 2.0
"""The usual cap of truncated importance weights."""


@dataclass(frozen=True, slots=True)
class RatioBounds:
    """Which ratios of the trainer's probability to the engine's a trainer accepts.

    Args:
        upper, lower: the largest and the smallest; ``lower`` is 1 / ``upper`` if it is None.
        veto: the smallest ratio that a token may have without the loss of its whole sequence.

    Raises:
        ValueError: ``lower`` is over ``upper``.
    """

    upper: InitVar[float]
    lower: InitVar[float | None] = None
    veto: InitVar[float | None] = None
    log_upper: float = field(init=False)
    log_lower: float = field(init=False)
    log_veto: float | None = field(init=False)

    def __post_init__(self, upper: float, lower: float | None, veto: float | None) -> None:
        smallest = 1 / upper if lower is None else lower
        if smallest > upper:
            raise wrong("lower", smallest, f"at most upper, which is {upper:g}")
        object.__setattr__(self, "log_upper", math.log(upper))
        object.__setattr__(self, "log_lower", math.log(smallest))
        object.__setattr__(self, "log_veto", None if veto is None else math.log(veto))

    def accepted(self, gaps: Sequence[float], mask: Sequence[int], level: Level) -> list[bool]:
        """Which tokens of a sequence stay; those with mask 0 never do.

        Args:
            gaps: of each token, 0.0 where the mask is 0.
        """
        log_veto = self.log_veto
        # "not at least", because a NaN is neither above nor below.
        if log_veto is not None and not all(
            gap >= log_veto for gap, flag in zip(gaps, mask, strict=True) if flag
        ):
            return [False] * len(gaps)
        if level == "token":
            return [bool(flag) and self._has(gap) for gap, flag in zip(gaps, mask, strict=True)]
        stays = self._has(log_ratio(gaps, mask, is_geometric=level == "geometric"))
        return [bool(flag) and stays for flag in mask]

    def _has(self, log: float) -> bool:
        return self.log_lower <= log <= self.log_upper


def log_ratio(gaps: Sequence[float], mask: Sequence[int], *, is_geometric: bool) -> float:
    """The logarithm of a sequence's ratio: of the product of its tokens' or of their mean.

    Args:
        gaps: of each token, 0.0 where the mask is 0.
    """
    total = sum(gaps)
    return total / max(1, sum(map(bool, mask))) if is_geometric else total


def truncated(log: float, cap: float) -> float:
    """min(exp(log), cap), computed without an overflow; 0 for NaN."""
    return 0.0 if math.isnan(log) else math.exp(min(log, math.log(cap)))


def effective_share(weights: Sequence[float]) -> float:
    """The effective sample size (sum of w)^2 / sum of w^2 (Kish 1965), divided by their number."""
    squares = sum(weight * weight for weight in weights)
    return sum(weights) ** 2 / squares / len(weights) if squares else 0.0
