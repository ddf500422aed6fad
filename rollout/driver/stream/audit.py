"""Counts each prompt from the source to the trainer.

What must hold at any moment: every prompt taken was delivered once, or dropped once with a reason,
or is pending; never two of these.  The auditor is saved and restored with its stream, so it agrees
with a trainer that restarts from a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


class Auditor:
    """The counts of one stream, by the serial of each prompt."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.delivered: Counter[int] = Counter()
        self.dropped: dict[int, str] = {}
        self._findings: list[str] = []

    def take(self, serial: int) -> None:
        """A prompt was taken from the source."""
        if serial != self.num_taken:
            self._findings.append(f"prompt {serial} was taken, but {self.num_taken} was expected")
        self.num_taken = max(self.num_taken, serial + 1)

    def deliver(self, serial: int) -> None:
        """The prompt's group was delivered to the trainer."""
        self.delivered[serial] += 1

    def take_back(self, serial: int) -> None:
        """The prompt's group has not reached the trainer after all."""
        self.delivered[serial] -= 1

    def drop(self, serial: int, reason: str) -> None:
        """The prompt was dropped by a filter or for its age."""
        if serial in self.dropped:
            self._findings.append(f"prompt {serial} was dropped twice")
        self.dropped[serial] = reason

    def findings(self, pending: Iterable[int]) -> list[str]:
        """Error messages; none if every prompt is accounted for exactly once.

        Args:
            pending: serials that are waiting, running or ready.
        """
        num_pending = Counter(pending)
        found = list(self._findings)
        for serial in range(self.num_taken):
            counts = {
                "delivered": self.delivered[serial],
                "dropped": int(serial in self.dropped),
                "pending": num_pending[serial],
            }
            if sum(counts.values()) != 1:
                text = ", ".join(f"{name} {count} times" for name, count in counts.items())
                found.append(f"prompt {serial}: {text}")
        unknown = {*self.delivered, *self.dropped, *num_pending} - set(range(self.num_taken))
        found += [f"prompt {serial} was never taken" for serial in sorted(unknown)]
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_taken": self.num_taken,
            "delivered": sorted(self.delivered.elements()),
            "dropped": [[serial, reason] for serial, reason in self.dropped.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_taken = state["num_taken"]
        self.delivered = Counter(state["delivered"])
        self.dropped = dict(state["dropped"])
