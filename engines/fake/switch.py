"""Faults as text, for a command line: ``release_memory_occupation#2:die@after``.

    OPERATION[#NTH]:FAULT[=VALUE][@MOMENT]

``OPERATION`` is a name of ``protocol.Engine`` or ``any``; ``#2`` strikes at its second call;
``FAULT`` is reject, lose, die, hang, freeze, slow or garble; ``VALUE`` is the status of a
``reject`` or the seconds of a ``slow``; ``MOMENT`` is ``before`` (left out: this), ``after`` the
call took effect, or a number of tokens of a generation.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from engines.fake.faults import ANY, Fault, FaultKind, FaultPlan
from engines.protocol import Engine

OPERATIONS = frozenset(name for name in vars(Engine) if not name.startswith("_")) - {
    "aclose",
    "stream_generate",
} | {ANY}
_TIMED = (FaultKind.REJECT, FaultKind.SLOW, FaultKind.GARBLE)
_PATTERN = re.compile(
    r"(?P<operation>\w+)(#(?P<nth>\d+))?:(?P<kind>\w+)(=(?P<value>[\d.]+))?(@(?P<moment>\w+))?"
)


class Switch(NamedTuple):
    """One fault and the call it strikes."""

    operation: str
    fault: Fault
    nth: int = 1

    def turn_on(self, plan: FaultPlan) -> None:
        """Plan it."""
        plan.strike(self.operation, self.fault, nth=self.nth)


def parse_switch(text: str) -> Switch:
    """The fault a text describes.

    Raises:
        ValueError: it describes none; the message says what would.
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
    return Switch(operation, _at(text, fault, operation, moment or "before"), nth)


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
        return replace(fault, executed=True)
    if moment == "before":
        return fault
    if fault.kind in _TIMED:
        raise ValueError(f"fault {text!r}: {fault.kind} strikes before the call, nowhere else")
    if moment == "after":
        return replace(fault, executed=True)
    if moment.isdigit() and operation == "generate":
        return replace(fault, tokens=int(moment))
    raise ValueError(f"fault {text!r}: no moment {moment!r}; known: before, after, a token count")
