"""When to ask again after an ask without a reply.

Always true: a refusal is final; the number of lost engines and the time spent before a closed
door are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.driver.door import Trouble

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How much one sample may go through.

    Attributes:
        max_lost: engines and connections it may lose before it fails.
        unavailable_s: seconds it may find the door closed, in a row.
        max_fruitless: aborts in a row without a single token.
    """

    max_lost: int = 5
    unavailable_s: float = 600.0
    max_fruitless: int = 30


@dataclass(slots=True)
class Troubles:
    """What one sample has gone through so far."""

    num_lost: int = 0
    num_fruitless: int = 0
    unavailable_since_s: float | None = None

    def wait_s(
        self, trouble: Trouble, *, retry_after_s: float, now_s: float, patience: Patience
    ) -> float | None:
        """Seconds until the next try; None when there is to be none."""
        if trouble is Trouble.REFUSED:
            return None
        if trouble is Trouble.UNAVAILABLE:
            if self.unavailable_since_s is None:
                self.unavailable_since_s = now_s
            left_s = self.unavailable_since_s + patience.unavailable_s - now_s
            return None if left_s <= 0 else min(retry_after_s or 1.0, _LONGEST_WAIT_S, left_s)
        self.unavailable_since_s = None
        if trouble is Trouble.LOST:
            self.num_lost += 1
            return None if self.num_lost > patience.max_lost else _backoff_s(self.num_lost)
        self.num_fruitless += 1
        is_over = self.num_fruitless > patience.max_fruitless
        return None if is_over else _backoff_s(self.num_fruitless)

    def has_progressed(self) -> None:
        """It was answered with at least one token."""
        self.num_fruitless = 0
        self.unavailable_since_s = None


def _backoff_s(num: int) -> float:
    return float(min(_FIRST_WAIT_S * 2 ** min(num - 1, 10), _LONGEST_WAIT_S))
