"""The launches of one run: their spans are in the same files, and a command shows one of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rollout.cli.lib.output import print_json, show, table
from rollout.core.errors import ConfigError
from rollout.observability.timeline.span import Kind, Span

NOT_STOPPED = "not stopped: it was killed, or it runs"


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a run.

    Attributes:
        launch: its id, or empty for one that recorded none.
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


def spans_of_launch(recorded: Sequence[Span], wanted: str) -> tuple[Launch, list[Span]]:
    """The launch with this id, or the last one, and its spans.

    Raises:
        ConfigError: there is no such launch.
    """
    known = launches_of(recorded)
    for launch in reversed(known):
        if wanted in ("", launch.launch):
            return launch, [span for span in recorded if span.launch == launch.launch]
    names = ", ".join(launch.launch or "(no id)" for launch in known)
    raise ConfigError(f"--launch {wanted!r}: no such launch; there are: {names}")


def show_launches(spans: Sequence[Span], *, as_json: bool) -> None:
    """Print the launches that recorded these spans."""
    found = launches_of(spans)
    if as_json:
        print_json([asdict(launch) for launch in found])
        return
    rows = table("launch", "began (UTC)", "seconds", "spans", "end")
    for launch in found:
        rows.add_row(
            launch.launch or "(no id)",
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(launch.began_s)),
            f"{launch.ended_s - launch.began_s:.0f}",
            str(launch.num_spans),
            end_text(launch),
        )
    show(rows)


def end_text(launch: Launch) -> str:
    """How it ended."""
    return "stopped" if launch.is_stopped else NOT_STOPPED
