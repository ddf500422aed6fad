"""Spans as a trace for chrome://tracing and Perfetto (ui.perfetto.dev).

Always true: each server is a process with one lane for its phases, one per engine and one per
rank of the trainer; the spans of a lane are nested or follow one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout.observability.timeline.span import Kind, Outcome, Span

_LANE_OF_PHASES = "phases"


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The trace as JSON; times are microseconds since the first span."""
    spans = sorted(spans, key=lambda span: (span.start_s, -span.elapsed_s))
    origin_s = spans[0].start_s if spans else 0.0
    servers: dict[str, int] = {}
    lanes: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        pid = servers.setdefault(span.source.partition("/")[0], len(servers) + 1)
        tid = lanes.setdefault((pid, _lane(span)), len(lanes) + 1)
        event: dict[str, Any] = {
            "name": span.name,
            "cat": span.kind.value,
            "pid": pid,
            "tid": tid,
            "ts": round((span.start_s - origin_s) * 1e6, 3),
            "args": _arguments(span),
        }
        if span.kind is Kind.EVENT:
            event |= {"ph": "i", "s": "t"}
        else:
            event |= {"ph": "X", "dur": round(span.elapsed_s * 1e6, 3)}
        if span.outcome is Outcome.FAILED:
            event["cname"] = "terrible"
        events.append(event)
    names = [_meta("process_name", pid, 0, name) for name, pid in servers.items()]
    names += [_meta("thread_name", pid, tid, name) for (pid, name), tid in lanes.items()]
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
        "otherData": {"began_unix_s": origin_s},
    }


def _lane(span: Span) -> str:
    if span.rank is not None:
        return f"rank {span.rank}"
    return span.engine_id or _LANE_OF_PHASES


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _arguments(span: Span) -> dict[str, Any]:
    hidden = ("kind", "name", "start_s", "elapsed_s", "span_id", "parent")
    return {name: value for name, value in span.to_dict().items() if name not in hidden}
