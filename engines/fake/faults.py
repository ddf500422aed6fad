"""What is in store for the calls of a fake engine, and what was called.

A ``Fault`` says what goes wrong; ``FaultPlan.strike`` says at which call.  The moment is named by
the operation, by how many calls of it come before, and by ``executed`` (before or after the call
took effect) or ``tokens`` (of a generation).

Always true: a planned fault is used up by as many calls as it was planned for; a gate holds every
call of its operation until it is opened, and stays open then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# A fault of this operation strikes at calls of every operation.
ANY = "any"


@dataclass(frozen=True, slots=True)
class Call:
    """One call an engine got.

    Attributes:
        at_s: when it arrived, on the event loop's clock.
    """

    operation: str
    arguments: Mapping[str, Any]
    at_s: float


class FaultKind(StrEnum):
    """What goes wrong with a call."""

    REJECT = "reject"
    LOSE = "lose"
    DIE = "die"
    HANG = "hang"
    FREEZE = "freeze"
    SLOW = "slow"
    GARBLE = "garble"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.  Make it with the functions below.

    Attributes:
        executed: it strikes after the call took effect, and before its answer.
        tokens: it strikes a generation after so many tokens.
        status, body: the answer of a ``reject``.
        seconds: how much longer a ``slow`` call takes.
        error: raised as it is by a ``reject``, in the place of status and body.
    """

    kind: FaultKind
    executed: bool = False
    tokens: int | None = None
    status: int = 502
    body: str = ""
    seconds: float = 0.0
    error: BaseException | None = None


def reject(status: int = 502, body: str = "Bad Gateway") -> Fault:
    """The call does nothing and is answered with an error status."""
    return Fault(FaultKind.REJECT, status=status, body=body)


def lose(*, executed: bool = False, tokens: int | None = None) -> Fault:
    """The connection breaks; the engine lives."""
    return Fault(FaultKind.LOSE, executed, tokens)


def die(*, executed: bool = False, tokens: int | None = None) -> Fault:
    """The engine's process ends."""
    return Fault(FaultKind.DIE, executed, tokens)


def hang(*, executed: bool = False, tokens: int | None = None) -> Fault:
    """This call is never answered; the engine is well otherwise."""
    return Fault(FaultKind.HANG, executed, tokens)


def freeze(*, executed: bool = False, tokens: int | None = None) -> Fault:
    """As SIGSTOP: from this call on nothing is answered, until ``thaw`` or a kill."""
    return Fault(FaultKind.FREEZE, executed, tokens)


def slow(seconds: float) -> Fault:
    """The call takes so much longer."""
    return Fault(FaultKind.SLOW, seconds=seconds)


def garble() -> Fault:
    """The call is carried out and answered, and one tensor is not what it should be afterwards:
    the same one, and the same wrong contents, on every engine."""
    return Fault(FaultKind.GARBLE, executed=True)


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
class _Planned:
    fault: Fault
    num_before: int
    num_left: int


@dataclass(slots=True)
class FaultPlan:
    """The plan of one engine, by operation."""

    gates: dict[str, Gate] = field(default_factory=dict)
    _planned: dict[str, list[_Planned]] = field(default_factory=dict)

    def strike(self, operation: str, fault: Fault, *, nth: int = 1, times: int = 1) -> None:
        """Plan ``fault`` for the ``nth`` call of ``operation`` from now on, and the next ones.

        Args:
            operation: a name of ``protocol.Engine``, or ``any``.
            times: calls it strikes in a row.

        Raises:
            ValueError: ``nth`` or ``times`` is below 1.
        """
        if nth < 1 or times < 1:
            raise ValueError(f"nth and times count from 1, not {nth} and {times}")
        self._planned.setdefault(operation, []).append(_Planned(fault, nth - 1, times))

    def clear(self) -> None:
        """Forget what is planned, and open every gate."""
        self._planned.clear()
        for gate in self.gates.values():
            gate.open()
        self.gates.clear()

    def for_call(self, operation: str) -> Fault | None:
        """What strikes the call that has just arrived; that is used up now."""
        if not self._planned:
            return None
        struck: Fault | None = None
        for key in (operation, ANY):
            for planned in list(self._planned.get(key, ())):
                if planned.num_before:
                    planned.num_before -= 1
                elif struck is None:
                    struck = planned.fault
                    planned.num_left -= 1
                    if not planned.num_left:
                        self._planned[key].remove(planned)
        return struck
