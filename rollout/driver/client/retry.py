"""Whether and when to retry a request that had no reply.

Always true: a refusal is final; the number of lost engines and the time without a serving engine
are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rollout.core.arguments import Count, options
from rollout.driver.client.generation_client import FailureKind, GenerationError

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 10.0


@options
class RetryPolicy:
    """How many failures one sample survives.

    Attributes:
        max_lost: lost engines and connections; one more fails the sample.
        unavailable_s: seconds without a break in which requests may be turned away (429, 503).
        max_empty_aborts: aborts in a row without a single token.

    Raises:
        TypeError, ValueError: a value is no number, or below 0.
    """

    max_lost: Count = 5
    unavailable_s: Annotated[float, Field(ge=0)] = 600.0
    max_empty_aborts: Count = 30


@dataclass(slots=True)
class RetryState:
    """The failures of one sample so far."""

    num_lost: int = 0
    num_empty_aborts: int = 0
    unavailable_since_s: float | None = None

    def wait_s(self, error: GenerationError, *, now_s: float, policy: RetryPolicy) -> float | None:
        """Count a failure.  Returns seconds until the next try, or None to give up."""
        if error.is_final or error.kind is FailureKind.NEEDS_PUSH:
            return None
        if error.kind is FailureKind.UNAVAILABLE:
            if self.unavailable_since_s is None:
                self.unavailable_since_s = now_s
            left_s = self.unavailable_since_s + policy.unavailable_s - now_s
            return None if left_s <= 0 else min(error.retry_after_s or 1.0, _LONGEST_WAIT_S, left_s)
        self.unavailable_since_s = None
        if error.kind is FailureKind.LOST:
            self.num_lost += 1
            return None if self.num_lost > policy.max_lost else _backoff_s(self.num_lost)
        self.num_empty_aborts += 1
        is_over = self.num_empty_aborts > policy.max_empty_aborts
        return None if is_over else _backoff_s(self.num_empty_aborts)

    def has_progressed(self) -> None:
        """A reply had at least one token."""
        self.num_empty_aborts = 0
        self.unavailable_since_s = None


def _backoff_s(num: int) -> float:
    return float(min(_FIRST_WAIT_S * 2 ** min(num - 1, 10), _LONGEST_WAIT_S))
