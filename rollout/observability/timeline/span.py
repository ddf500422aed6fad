"""A span: one named interval of time on a timeline, with its outcome and measured values.

Always true: a span is unchanged after a round trip through JSON; unknown values are omitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType
from typing import Any


class Kind(StrEnum):
    """What a span covers: a phase of a server, of a group in it, of an engine, a call, an event,
    or a stage of a push on one rank of the trainer."""

    PHASE = "phase"
    GROUP = "group"
    ENGINE = "engine"
    CALL = "call"
    EVENT = "event"
    RANK = "rank"


GATHER, COPY, ENGINE = "gather", "copy", "engine"
"""Names of a rank's spans: the stages of a push, as in ``PushStage``."""


class Outcome(StrEnum):
    """How a span ended, or that it still runs."""

    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Span:
    """Times are Unix seconds.

    Attributes:
        span_id: unique within its source; ``parent`` is the id of the enclosing span, 0 for none.
        source: what recorded it: a server, or a group as ``server/group``.
        name: the command, the operation (``flush_cache``), or that of the event.
        engine_id: the engine it belongs to, or empty if it belongs to all.
        budget_s: seconds from its start to its deadline; 0 for none.
        ``said``: the text of the error or event, or the buckets of a rank's stage.
        num_bytes: size of the request bodies sent to the engine, or of a rank's tensors.
        memory_before_bytes, memory_after_bytes: on the engine's GPUs by all programs, or of its
            processes if it has none, where measured.
        num_gpus: GPUs of an engine that released or resumed memory.
        weight_version: the version that was pushed, verified or served.
        verified_by: how the weights were verified: ``fingerprint``, ``canary``, ``version``.
        read_bytes: weight bytes that the engine read for its fingerprints, or None if not reported.
        launch: the launch of the run that recorded it; empty in memory, set in files.
        rank: rank of the trainer, or None if the span belongs to none.
        route, density: a rank's stage; see ``PushStage``.
        traceparent: the trace of the caller, as in W3C Trace Context, of a span without a parent.
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
    num_gpus: int = 0
    weight_version: int | None = None
    verified_by: str = ""
    read_bytes: int | None = None
    launch: str = ""
    rank: int | None = None
    route: str = ""
    density: float | None = None
    traceparent: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.elapsed_s

    @property
    def freed_bytes(self) -> int | None:
        """Memory that the engine gave back, or None if it was not measured."""
        if self.memory_before_bytes is None or self.memory_after_bytes is None:
            return None
        return self.memory_before_bytes - self.memory_after_bytes

    def to_dict(self) -> dict[str, Any]:
        """The values for JSON; those that have their default are omitted."""
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
        """The inverse of ``to_dict``; keys that a later version added are ignored.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: ``values`` is no span.
        """
        known = {name: value for name, value in values.items() if name in _KINDS}
        for name, value in known.items():
            if not isinstance(value, _KINDS[name]) or isinstance(value, bool):
                raise ValueError(f"a span has {name} = {value!r:.60}")
        known["kind"] = Kind(values["kind"])
        known["outcome"] = Outcome(values["outcome"])
        return cls(**known)


_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in one timeline.

    Attributes:
        timeline: the name that this ``Timeline`` alone has; another one begins at its first span.
        num_ended: its spans in front of this place.
    """

    timeline: str = ""
    num_ended: int = 0

    def __str__(self) -> str:
        return f"{self.timeline}-{self.num_ended}"

    @classmethod
    def of_text(cls, text: str) -> Cursor:
        """The one that has this text; ``START`` for any other text."""
        timeline, _, number = text.partition("-")
        is_one = number.isascii() and number.isdigit() and len(number) < _MOST_DIGITS
        return cls(timeline, int(number)) if is_one else START


START = Cursor()
"""Before the first span of any timeline."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The part of a timeline after a cursor.

    Attributes:
        cursor: for the next request.
        spans: finished after the cursor, in the order of their ends.
        running: not yet finished; ``elapsed_s`` is the time since their start.
    """

    cursor: Cursor
    spans: tuple[Span, ...]
    running: tuple[Span, ...]


_OPTIONAL = tuple((field.name, field.default) for field in dataclasses.fields(Span)[6:])
_KINDS: Mapping[str, tuple[type, ...]] = {
    field.name: {
        "float": (int, float),
        "float | None": (int, float, NoneType),
        "int": (int,),
        "int | None": (int, NoneType),
    }.get(str(field.type), (str,))
    for field in dataclasses.fields(Span)
}
"""The types of values, by name."""
