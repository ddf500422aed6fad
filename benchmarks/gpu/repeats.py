"""Repetitions, and what is reported of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class TimeLeft:
    """The time that a run may still take.

    Args:
        seconds: from now; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._ends_at = math.inf if seconds is None else time.monotonic() + seconds

    def share(self, part: float, most_s: float = math.inf) -> float:
        """Seconds of this part of the rest, ``most_s`` at most."""
        return min(most_s, part * max(0.0, self._ends_at - time.monotonic()))


def repeat(work: Callable[[], T], times: int, budget_s: float) -> list[T]:
    """What ``work`` returned each time: fewer times if they take too long, but at least two."""
    ends_at = time.monotonic() + budget_s
    found = []
    for index in range(times):
        if index >= 2 and time.monotonic() > ends_at:
            break
        found.append(work())
    return found


def rates(seconds: Sequence[float], num_bytes: int) -> tuple[float, float]:
    """GiB/s of the median and of the slowest."""
    gib = num_bytes / 2**30
    return gib / max(statistics.median(seconds), 1e-9), gib / max(*seconds, 1e-9)
