"""What the engines that one request loses mean: for the engines, and for the request (pure).

A request may itself be what breaks its engines, so:
- The first engine that it loses leaves routing at once.  A later one stays: the health probes and
  the other requests decide about it.  One that refuses the connection always leaves routing.
- A request that loses three engines in a row, without a token from any of them, is not sent again.
  Two may have nothing to do with it: they end together, or another request on both breaks them.
- With an open gate an abort is the engine's own.  A request that engines abort again and again, and
  add no tokens, has a reason that its client has to see.
"""

from __future__ import annotations

from dataclasses import dataclass

_MOST_IN_VAIN = 3


@dataclass(slots=True)
class LostEngines:
    """The engines that one request has lost after it was sent to them.

    Attributes:
        num: how many.
        num_in_vain: how many of them in a row sent no token.
        num_aborts: aborts in a row that an open gate did not explain and that added no token.
    """

    num: int = 0
    num_in_vain: int = 0
    num_aborts: int = 0
    _num_kept: int = 0

    def add(self, *, was_sent: bool, has_tokens: bool) -> bool:
        """Count one more; True if it has to leave routing at once.

        Args:
            was_sent: the request was sent to it; otherwise there was no connection.
            has_tokens: it has sent tokens of the request.
        """
        if not was_sent:
            return True
        self.num += 1
        self.num_in_vain = 0 if has_tokens else self.num_in_vain + 1
        return self.num == 1

    @property
    def why_not_again(self) -> str:
        """Why the request may be what breaks its engines."""
        if self.num_in_vain < _MOST_IN_VAIN:
            return ""
        return f"{self.num_in_vain} engines in a row were lost before they sent a token of it"

    def may_be_aborted(self, most: int, *, is_open: bool, num_kept: int) -> bool:
        """Whether one more abort may come from a pause.

        Args:
            is_open: the gate is.
            num_kept: tokens that were carried over to another engine so far.
        """
        return self._aborts_with_one(is_open, num_kept) <= most

    def add_abort(self, *, is_open: bool, num_kept: int) -> None:
        """Count one more."""
        self.num_aborts = self._aborts_with_one(is_open, num_kept)
        self._num_kept = num_kept

    def _aborts_with_one(self, is_open: bool, num_kept: int) -> int:
        return 1 if not is_open or num_kept > self._num_kept else self.num_aborts + 1
