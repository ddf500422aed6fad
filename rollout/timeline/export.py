"""Spans as a trace that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) open.

Always true: a process per server, in it a lane for its phases and one per engine; a lane's spans
nest or follow one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout.timeline.span import Kind, Outcome, Span

_LANE_OF_PHASES = "phases"


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The trace as JSON; times are microseconds since the first span."""
    spans = sorted(spans, key=lambda one: (one.start_s, -one.elapsed_s))
    origin_s = spans[0].start_s if spans else 0.0
    lanes: dict[tuple[str, str], tuple[int, int]] = {}
    servers: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        server = span.source.partition("/")[0]
        lane = (server, span.engine_id or _LANE_OF_PHASES)
        if lane not in lanes:
            events += _names(lane, servers, lanes)
        pid, tid = lanes[lane]
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
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began_unix_s": origin_s},
    }


def _names(
    lane: tuple[str, str], servers: dict[str, int], lanes: dict[tuple[str, str], tuple[int, int]]
) -> list[dict[str, Any]]:
    server, name = lane
    told = []
    if server not in servers:
        servers[server] = len(servers) + 1
        told.append(_meta("process_name", servers[server], 0, server))
    lanes[lane] = pid, tid = servers[server], len(lanes) + 1
    told.append(_meta("thread_name", pid, tid, name))
    return told


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _arguments(span: Span) -> dict[str, Any]:
    hidden = ("kind", "name", "start_s", "elapsed_s", "span_id", "parent")
    return {name: value for name, value in span.to_dict().items() if name not in hidden}
