"""One stretch of time with a name, and what is known of it.

Always true: a span goes through JSON and back unchanged; what is not known is left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a span covers: a server's phase, a group's part in it, an engine's, a call, a moment."""

    PHASE = "phase"
    GROUP = "group"
    ENGINE = "engine"
    CALL = "call"
    EVENT = "event"


class Outcome(StrEnum):
    """How it ended, if it has."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Span:
    """Times are Unix seconds.

    Attributes:
        span_id: unique within its source; ``parent`` is the span it is a part of, 0 for none.
        source: who recorded it: a server, or a group as ``server/group``.
        name: the command (``pause``), the operation (``flush_cache``), or what happened.
        engine_id: whose it is; empty for what concerns all.
        budget_s: its deadline, from its start; 0 for none.
        said: why it failed, or what happened.
        num_bytes: what went to the engine.
        memory_before_bytes, memory_after_bytes: of the engine's processes, where measured.
        weight_version: what was brought, proved or served.
        proved_by: what an engine showed of its weights: ``fingerprint``, ``canary``, ``version``.
        read_bytes, read_cpu_s: of weights for its fingerprints, where it tells.
    """

    kind: Kind
    name: str
    source: str
    start_s: float
    elapsed_s: float = 0.0
    outcome: Outcome = Outcome.RUNNING
    engine_id: str = ""
    span_id: int = 0
    parent: int = 0
    budget_s: float = 0.0
    said: str = ""
    num_bytes: int = 0
    memory_before_bytes: int | None = None
    memory_after_bytes: int | None = None
    weight_version: int | None = None
    proved_by: str = ""
    read_bytes: int | None = None
    read_cpu_s: float | None = None

    @property
    def end_s(self) -> float:
        return self.start_s + self.elapsed_s

    @property
    def freed_bytes(self) -> int | None:
        """How much less memory the engine has than before; None where it was not measured."""
        if self.memory_before_bytes is None or self.memory_after_bytes is None:
            return None
        return self.memory_before_bytes - self.memory_after_bytes

    def to_dict(self) -> dict[str, Any]:
        """What is known, ready for JSON."""
        values: dict[str, Any] = {
            "kind": self.kind.value,
            "name": self.name,
            "source": self.source,
            "start_s": round(self.start_s, 6),
            "elapsed_s": round(self.elapsed_s, 6),
            "outcome": self.outcome.value,
        }
        for name, default in _OPTIONAL:
            value = getattr(self, name)
            if value != default:
                values[name] = value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Span:
        """What ``to_dict`` made; unknown keys of a later version are passed over.

        Raises:
            KeyError, TypeError, ValueError: it is no span.
        """
        known = {name: value for name, value in values.items() if name in _NAMES}
        known["kind"] = Kind(values["kind"])
        known["outcome"] = Outcome(values["outcome"])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What a timeline has recorded since a cursor.

    Attributes:
        cursor: for the next question.
        spans: that have ended since, in the order of their ends.
        running: that have begun and not ended; ``elapsed_s`` is theirs so far.
    """

    cursor: int
    spans: tuple[Span, ...]
    running: tuple[Span, ...]


_OPTIONAL = tuple((one.name, one.default) for one in dataclasses.fields(Span)[6:])
_NAMES = frozenset(one.name for one in dataclasses.fields(Span))


def read_lines(lines: Iterable[str]) -> list[Span]:
    """Spans from JSON lines; a line cut short by a crash is passed over."""
    spans = []
    for line in lines:
        try:
            spans.append(Span.from_dict(json.loads(line)))
        except (KeyError, TypeError, ValueError):
            continue
    return spans
