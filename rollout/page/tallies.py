"""What spans add up to since the beginning, and all metrics of one server as Prometheus sees them.

Always true: every metric that is told is one of ``METRICS``, with its unit at the end of its name;
a counter never goes back while the server lives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from rollout.timeline.analysis import Step
from rollout.timeline.span import Kind, Outcome, Span

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Name -> kind, labels, help.  The documentation, the dashboard and the alerts are held to this.
METRICS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "rollout_up": ("gauge", (), "1 while the server answers."),
    "rollout_phase": ("gauge", ("phase",), "1 for the phase the server is in."),
    "rollout_phase_running_seconds": (
        "gauge",
        ("command",),
        "How long the running phase has run; nothing while none runs.",
    ),
    "rollout_phase_budget_seconds": ("gauge", ("command",), "Deadline of the running phase."),
    "rollout_phase_seconds": ("histogram", ("command",), "Phases that have ended."),
    "rollout_phase_failures": ("counter", ("command",), "Phases that failed or were cancelled."),
    "rollout_engine_phase_seconds": (
        "counter",
        ("engine", "command"),
        "Time an engine spent in a phase, over all steps.",
    ),
    "rollout_engine_failures": ("counter", ("engine", "command"), "Calls an engine failed."),
    "rollout_sent_bytes": ("counter", ("engine",), "Request bodies sent to an engine in phases."),
    "rollout_freed_bytes": ("counter", ("engine",), "Memory an engine gave back in releases."),
    "rollout_boundary_lost_seconds": (
        "counter",
        (),
        "Time without generation that was not the trainer's.",
    ),
    "rollout_trainer_seconds": ("counter", (), "Time the engines' memory was the trainer's."),
    "rollout_steps": ("counter", (), "Times the server went down and came back to serving."),
    "rollout_events": ("counter", ("event",), "What happened: fenced, restarted, gate ..."),
    "rollout_weight_version": ("gauge", (), "The version published last."),
    "rollout_engine_weight_version": ("gauge", ("engine",), "The version an engine holds."),
    "rollout_engine_state": ("gauge", ("engine", "state"), "1 for the state an engine is in."),
    "rollout_engines": ("gauge", ("state",), "Engines by state."),
    "rollout_engine_resident_bytes": ("gauge", ("engine",), "Host memory of an engine."),
    "rollout_gate": ("gauge", ("state",), "1 for the state the gate is in."),
    "rollout_gate_state_seconds": ("gauge", ("state",), "How long the gate is in this state."),
    "rollout_store_version": ("gauge", (), "The newest version the weight store holds."),
    "rollout_store_lag": ("gauge", (), "Versions the weight store is behind."),
    "rollout_store_bytes": ("gauge", (), "Host memory the weight store holds."),
    "rollout_driver_step": ("gauge", (), "The step a driver told of last."),
    "rollout_driver_figure": ("gauge", ("figure",), "Its figures, as reward/mean."),
}
# What ``rollout_events`` counts.
EVENTS = ("gate", "fenced", "restarted", "adopted")
# The states whose number is told also when it is 0: what is asked for first.
_NONE_OF = {"serving": 0, "fenced": 0}
_FAMILIES: Mapping[str, Any] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = (*map(str, BUCKETS_S), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Tallies:
    """Counters over all spans and steps of one server."""

    def __init__(self) -> None:
        self.phases: dict[str, _Histogram] = {}
        self.counters: dict[str, Counter[tuple[str, ...]]] = {
            name: Counter() for name, (kind, _, _) in METRICS.items() if kind == "counter"
        }
        # From the beginning, and not from the first time on: Prometheus sees an increase only where
        # there was something before.
        for name, of_name in self.counters.items():
            if not METRICS[name][1]:
                of_name[()] = 0
        for event in EVENTS:
            self._add("rollout_events", 0, event)

    def take(self, spans: Iterable[Span]) -> None:
        """Count spans that have ended; each is given once."""
        for span in spans:
            if span.kind is Kind.PHASE:
                self.phases.setdefault(span.name, _Histogram()).observe(span.elapsed_s)
                self._add("rollout_phase_failures", span.outcome is not Outcome.OK, span.name)
            elif span.kind is Kind.ENGINE:
                self._take_engine(span)
            elif span.kind is Kind.EVENT:
                self._add("rollout_events", 1, span.name)

    def take_steps(self, steps: Iterable[Step]) -> None:
        """Count steps that are whole; each is given once."""
        for step in steps:
            self._add("rollout_steps", 1)
            self._add("rollout_boundary_lost_seconds", step.lost_s)
            self._add("rollout_trainer_seconds", step.trainer_s)

    def _take_engine(self, span: Span) -> None:
        self._add("rollout_engine_phase_seconds", span.elapsed_s, span.engine_id, span.name)
        failed = span.outcome is not Outcome.OK
        self._add("rollout_engine_failures", failed, span.engine_id, span.name)
        self._add("rollout_sent_bytes", span.num_bytes, span.engine_id)
        self._add("rollout_freed_bytes", max(0, span.freed_bytes or 0), span.engine_id)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        self.counters[name][labels] += amount  # type: ignore[assignment]


class _Told(Collector):
    def __init__(self, tallies: Tallies, snapshot: Mapping[str, Any]) -> None:
        self._tallies = tallies
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        for name, (kind, labels, told) in METRICS.items():
            if kind == "histogram":
                family = HistogramMetricFamily(name, told, labels=labels)
                for command, one in self._tallies.phases.items():
                    family.add_metric([command], one.cumulative(), one.sum_s)
                yield family
                continue
            values = (
                self._tallies.counters[name].items()
                if kind == "counter"
                else _gauges(name, self._snapshot)
            )
            plain = _FAMILIES[kind](name, told, labels=labels)
            for of_labels, value in values:
                plain.add_metric(list(of_labels), value)
            yield plain


def exposition(tallies: Tallies, snapshot: Mapping[str, Any]) -> str:
    """All metrics of one server, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(tallies, snapshot))
    return generate_latest(registry).decode()


def _gauges(name: str, now: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    """The samples of one gauge, from a snapshot."""
    engines, gate = now.get("engines", ()), now.get("gate", {})
    figures, store = now.get("figures", ()), now.get("store") or {}
    last = figures[-1] if figures else {"metrics": {}}
    running = [one for one in now.get("running", ()) if one["kind"] == Kind.PHASE.value]
    state = gate.get("state", "")
    simple: dict[str, Any] = {
        "rollout_up": 1.0 if now.get("is_answering") else 0.0,
        "rollout_weight_version": now.get("weight_version"),
        "rollout_store_version": store.get("version"),
        "rollout_store_lag": store.get("lag"),
        "rollout_store_bytes": store.get("bytes"),
        "rollout_driver_step": last.get("step"),
    }
    labelled: dict[str, list[tuple[tuple[str, ...], Any]]] = {
        "rollout_phase": [((now.get("phase", ""),), 1.0)] if now.get("phase") else [],
        "rollout_phase_running_seconds": [((one["name"],), one["elapsed_s"]) for one in running],
        "rollout_phase_budget_seconds": [
            ((one["name"],), one.get("budget_s", 0.0)) for one in running
        ],
        "rollout_engine_weight_version": [
            ((one["engine_id"],), one["weight_version"]) for one in engines
        ],
        "rollout_engine_state": [((one["engine_id"], one["state"]), 1.0) for one in engines],
        "rollout_engines": [
            ((of_state,), num)
            for of_state, num in (_NONE_OF | Counter(one["state"] for one in engines)).items()
        ],
        "rollout_engine_resident_bytes": [
            ((one["engine_id"],), one["resident_bytes"]) for one in engines
        ],
        "rollout_gate": [((state,), 1.0)] if state else [],
        "rollout_gate_state_seconds": [((state,), gate.get("in_state_s"))] if state else [],
        "rollout_driver_figure": [((key,), value) for key, value in last["metrics"].items()],
    }
    samples = labelled[name] if name in labelled else [((), simple[name])]
    for labels, value in samples:
        if value is not None:
            yield labels, float(value)
