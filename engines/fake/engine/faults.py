"""Planned faults for the calls of a fake engine, and the record of its calls.

The plan is a table of (call, moment, act): ``FaultPlan.strike`` adds a row.  The call is the nth of
an operation; the moment is before it takes effect, after it, or a number of tokens of a generation;
the act is a kind of fault with its value.  ``CallHandler`` carries acts out.

Always true: a row is used up by as many calls as it was planned for; a gate holds every call of its
operation until it is opened, and stays open then.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from engines.protocol import Engine

# A fault of this operation strikes at calls of every operation.
ANY = "any"

Moment = Literal["before", "after"] | int
"""When a fault strikes: before or after the call takes effect, or after so many tokens."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
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
        moment: when it strikes; ``after`` is before the answer.
        status, body: the answer of a ``reject``.
        seconds: how much longer a ``slow`` call takes.
        error: raised as it is by a ``reject``, in the place of status and body.
    """

    kind: FaultKind
    moment: Moment = "before"
    status: int = 502
    body: str = ""
    seconds: float = 0.0
    error: BaseException | None = None


def reject(status: int = 502, body: str = "Bad Gateway") -> Fault:
    """The call does nothing and is answered with an error status."""
    return Fault(FaultKind.REJECT, status=status, body=body)


def lose(*, executed: bool = False, tokens: int | None = None) -> Fault:
    """The connection breaks; the engine lives."""
    return Fault(FaultKind.LOSE, _moment(executed, tokens))


def die(*, executed: bool = False, tokens: int | None = None) -> Fault:
    """The engine's process ends."""
    return Fault(FaultKind.DIE, _moment(executed, tokens))


def hang(*, executed: bool = False, tokens: int | None = None) -> Fault:
    """This call gets no reply; the engine answers other calls."""
    return Fault(FaultKind.HANG, _moment(executed, tokens))


def freeze(*, executed: bool = False, tokens: int | None = None) -> Fault:
    """Stand still as under SIGSTOP from this call on, until ``thaw`` or a kill."""
    return Fault(FaultKind.FREEZE, _moment(executed, tokens))


def slow(seconds: float) -> Fault:
    """The call takes so much longer."""
    return Fault(FaultKind.SLOW, seconds=seconds)


def garble() -> Fault:
    """The call is carried out and answered, and one tensor is not what it should be afterwards:
    the same one, and the same wrong contents, on every engine."""
    return Fault(FaultKind.GARBLE, "after")


def _moment(executed: bool, tokens: int | None) -> Moment:
    return "after" if executed else "before" if tokens is None else tokens


class CallGate:
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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the caller among those that stand before it."""
        self.entered.set()
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def open(self) -> None:
        """Let the waiting calls through, and all later ones."""
        self.is_open = True
        self._notify()


@dataclass(slots=True)
class _Row:
    operation: str
    fault: Fault
    num_before: int
    num_left: int


@dataclass(slots=True)
class FaultPlan:
    """The plan of one engine."""

    gates: dict[str, CallGate] = field(default_factory=dict)
    _rows: list[_Row] = field(default_factory=list)

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
        self._rows.append(_Row(operation, fault, nth - 1, times))

    def clear(self) -> None:
        """Forget what is planned, and open every gate."""
        self._rows.clear()
        for gate in self.gates.values():
            gate.open()
        self.gates.clear()

    def for_call(self, operation: str) -> Fault | None:
        """What strikes the call that has just arrived; that is used up now.

        A row of its operation goes before one of any, an earlier row before a later one.
        """
        if not self._rows:
            return None
        struck: _Row | None = None
        rows = [row for row in self._rows if row.operation in (operation, ANY)]
        for row in sorted(rows, key=lambda row: row.operation == ANY):
            if row.num_before:
                row.num_before -= 1
            elif struck is None:
                struck = row
                row.num_left -= 1
        if struck is None:
            return None
        self._rows = [row for row in self._rows if row.num_left]
        return struck.fault


OPERATIONS = frozenset(name for name in vars(Engine) if not name.startswith("_")) - {
    "aclose",
    "stream_generate",
} | {ANY}
_PATTERN = re.compile(
    r"(?P<operation>\w+)(#(?P<nth>\d+))?:(?P<kind>\w+)(=(?P<value>[\d.]+))?(@(?P<moment>\w+))?"
)


# They strike at no other moment than their own.
_TIMED = (FaultKind.REJECT, FaultKind.SLOW, FaultKind.GARBLE)


class FaultSpec(NamedTuple):
    """One fault and the call it strikes."""

    operation: str
    fault: Fault
    nth: int = 1

    def add_to(self, plan: FaultPlan) -> None:
        """Plan it."""
        plan.strike(self.operation, self.fault, nth=self.nth)


def parse_fault(text: str) -> FaultSpec:
    """The fault a text describes.

    Raises:
        ValueError: it describes none; the message shows the form.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"fault {text!r} is not OPERATION[#NTH]:FAULT[=VALUE][@MOMENT]")
    operation, kind, value, moment = match.group("operation", "kind", "value", "moment")
    if operation not in OPERATIONS:
        raise ValueError(
            f"fault {text!r}: no operation {operation!r}; known: {', '.join(sorted(OPERATIONS))}"
        )
    if kind not in list(FaultKind):
        raise ValueError(f"fault {text!r}: no fault {kind!r}; known: {', '.join(FaultKind)}")
    nth = int(match["nth"] or 1)
    if nth < 1:
        raise ValueError(f"fault {text!r}: calls are counted from 1")
    fault = _with_value(text, Fault(FaultKind(kind)), value)
    return FaultSpec(operation, _at(text, fault, operation, moment or "before"), nth)


def _with_value(text: str, fault: Fault, value: str | None) -> Fault:
    if fault.kind is FaultKind.SLOW:
        if value is None:
            raise ValueError(f"fault {text!r}: slow needs its seconds, as in slow=5")
        return replace(fault, seconds=float(value))
    if fault.kind is FaultKind.REJECT:
        return replace(fault, status=int(value or 502), body="a planned fault")
    if value is not None:
        raise ValueError(f"fault {text!r}: {fault.kind} takes no value")
    return fault


def _at(text: str, fault: Fault, operation: str, moment: str) -> Fault:
    if fault.kind is FaultKind.GARBLE and moment in ("before", "after"):
        return replace(fault, moment="after")
    if moment == "before":
        return fault
    if fault.kind in _TIMED:
        raise ValueError(f"fault {text!r}: {fault.kind} strikes before the call, nowhere else")
    if moment == "after":
        return replace(fault, moment="after")
    if moment.isdigit() and operation == "generate":
        return replace(fault, moment=int(moment))
    raise ValueError(f"fault {text!r}: no moment {moment!r}; known: before, after, a token count")
