"""Counts each prompt from the source to the trainer.

What must hold at any moment: every prompt taken was delivered once, dropped once with a reason,
or is still pending; never two of these.  The auditor is written down and read back with the
stream it audits, so that it goes back in time with a trainer that restarts from a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


class Auditor:
    """One stream's accounts, by the serial of each prompt."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.delivered: Counter[int] = Counter()
        self.dropped: dict[int, str] = {}
        self._findings: list[str] = []

    def take(self, serial: int) -> None:
        """A prompt left the source."""
        if serial != self.num_taken:
            self._findings.append(f"prompt {serial} was taken where {self.num_taken} was due")
        self.num_taken = max(self.num_taken, serial + 1)

    def deliver(self, serial: int) -> None:
        """The trainer has its group."""
        self.delivered[serial] += 1

    def drop(self, serial: int, reason: str) -> None:
        """A filter or its age ended it."""
        if serial in self.dropped:
            self._findings.append(f"prompt {serial} was dropped twice")
        self.dropped[serial] = reason

    def findings(self, pending: Iterable[int]) -> list[str]:
        """What is wrong, in words; nothing if every prompt is accounted for once.

        Args:
            pending: serials that are under way, ready or put aside.
        """
        held = Counter(pending)
        found = list(self._findings)
        for serial in range(self.num_taken):
            places = {
                "delivered": self.delivered[serial],
                "dropped": int(serial in self.dropped),
                "pending": held[serial],
            }
            if sum(places.values()) != 1:
                told = ", ".join(f"{name} {count} times" for name, count in places.items())
                found.append(f"prompt {serial}: {told}")
        strangers = {*self.delivered, *self.dropped, *held} - set(range(self.num_taken))
        found += [f"prompt {serial} was never taken" for serial in sorted(strangers)]
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
