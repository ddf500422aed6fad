"""When requests avoid an engine that answers with errors only (pure).

An engine that fails at once has few live requests, so each policy that compares loads would send it
most of the others.

Always true: one reply that is no error ends the series, so a request that is itself the cause does
not make an engine avoided that answers others; and an avoided engine is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_IN_A_ROW = 5
"""More than OpenAI's client makes of one bad request, which it sends three times."""
AVOIDED_S = 5.0


@dataclass(slots=True)
class ErrorSeries:
    """The errors of one engine since its last other reply.

    Attributes:
        num: how many.
        avoided_until_s: until then it gets no requests if others can take them.
    """

    num: int = 0
    avoided_until_s: float = 0.0

    def add(self, now_s: float) -> bool:
        """Count one more; True if the engine is avoided from now on."""
        self.num += 1
        if self.num < MOST_IN_A_ROW or self.is_avoided(now_s):
            return False
        self.avoided_until_s = now_s + AVOIDED_S
        return True

    def is_avoided(self, now_s: float) -> bool:
        return now_s < self.avoided_until_s
