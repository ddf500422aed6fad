"""What a test has in store for the calls of a fake engine, and what was called.

Always true: a planned failure or loss is used up by one call; a gate holds every call of its
operation until it is opened, and stays open then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One call an engine got.

    Attributes:
        at_s: when it arrived, on the event loop's clock.
    """

    operation: str
    arguments: Mapping[str, Any]
    at_s: float


class Gate:
    """Holds the calls of one operation.

    Attributes:
        entered: set when the first call has reached the gate.
        num_waiting: calls that stand before it now.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.entered = asyncio.Event()
        self.num_waiting = 0
        self.is_open = False
        self._notify = notify

    def open(self) -> None:
        """Let through the calls that wait, and all later ones."""
        self.is_open = True
        self._notify()


@dataclass(slots=True)
class Faults:
    """The plan of one engine, by operation."""

    gates: dict[str, Gate] = field(default_factory=dict)
    failures: dict[str, list[BaseException]] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)

    def next_failure(self, operation: str) -> BaseException | None:
        """The failure planned for this call, now used up."""
        planned = self.failures.get(operation)
        return planned.pop(0) if planned else None

    def loses_answer(self, operation: str) -> bool:
        """Whether this call's answer gets lost; that is used up too."""
        left = self.losses.get(operation, 0)
        self.losses[operation] = max(0, left - 1)
        return left > 0
