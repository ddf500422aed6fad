"""The launches of one run: their spans are in the same files, and each is a run of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.core.errors import ConfigError
from rollout.observability.timeline.span import Kind, Span


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a run.

    Attributes:
        launch: its id; empty for one that recorded none.
        is_stopped: its groups were stopped.  Otherwise it was killed, or still runs.
    """

    launch: str
    began_s: float
    ended_s: float
    num_spans: int
    is_stopped: bool


def launches_of(spans: Iterable[Span]) -> list[Launch]:
    """The launches that recorded these spans, the first one first."""
    by_launch: dict[str, list[Span]] = {}
    for span in spans:
        by_launch.setdefault(span.launch, []).append(span)
    found = [_launch(name, own) for name, own in by_launch.items()]
    return sorted(found, key=lambda launch: launch.began_s)


def _launch(name: str, spans: Sequence[Span]) -> Launch:
    return Launch(
        name,
        min(span.start_s for span in spans),
        max(span.end_s for span in spans),
        len(spans),
        any(span.kind is Kind.GROUP and span.name == "stop" for span in spans),
    )


def choose_launch(spans: Sequence[Span], wanted: str) -> Launch:
    """The launch with this id; the last one if ``wanted`` is empty.

    Raises:
        ConfigError: there is no such launch.
    """
    known = launches_of(spans)
    for launch in reversed(known):
        if wanted in ("", launch.launch):
            return launch
    names = ", ".join(launch.launch or "(no id)" for launch in known)
    raise ConfigError(f"--launch {wanted!r}: no such launch; there are: {names}")
