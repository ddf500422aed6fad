"""The metrics of one server for Prometheus: counters over its spans, gauges of its state.

Always true: every exported metric is listed in ``METRICS``, its name ends with its unit; a counter
never decreases while the server runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engines.protocol.adapter_names import version_of
from rollout.driver.logprobs.gap_figures import BUCKET_NAMES
from rollout.observability.step_reports import standing
from rollout.observability.timeline.analysis import PushTotals, Step
from rollout.observability.timeline.span import Kind, Outcome, Span

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Name -> kind, labels, help.  Tests compare documentation, dashboard and alerts with this table.
METRICS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "rollout_up": ("gauge", (), "1 while the server answers."),
    "rollout_phase": ("gauge", ("phase",), "1 for the phase the server is in."),
    "rollout_phase_running_seconds": (
        "gauge",
        ("command",),
        "Time since the running phase began; no sample while none runs.",
    ),
    "rollout_phase_budget_seconds": ("gauge", ("command",), "Deadline of the running phase."),
    "rollout_phase_seconds": ("histogram", ("command",), "Duration of finished phases."),
    "rollout_phase_failures": ("counter", ("command",), "Phases that failed or were cancelled."),
    "rollout_engine_phase_seconds": (
        "counter",
        ("engine", "command"),
        "Time an engine spent in a phase, over all steps.",
    ),
    "rollout_engine_failures": ("counter", ("engine", "command"), "Failed calls of an engine."),
    "rollout_sent_bytes": ("counter", ("engine",), "Request bodies sent to an engine in phases."),
    "rollout_freed_bytes": ("counter", ("engine",), "Memory that an engine freed in releases."),
    "rollout_boundary_lost_seconds": (
        "counter",
        (),
        "Time without generation, without the time in which the trainer had the GPUs.",
    ),
    "rollout_trainer_seconds": (
        "counter",
        (),
        "Time in which the trainer had the engines' memory.",
    ),
    "rollout_paused_seconds": ("counter", (), "Time without generation because of pushes."),
    "rollout_pushed_bytes": ("counter", ("route",), "Sent by the trainer's ranks in pushes."),
    "rollout_push_seconds": ("counter", ("route",), "Time of pushes that succeeded."),
    "rollout_push_density_ratio": (
        "gauge",
        (),
        "Share of elements that the last push changed; no sample where it sent whole tensors.",
    ),
    "rollout_unchanged_tensors": (
        "gauge",
        (),
        "Tensors that pushes should have changed and have not; no sample without fingerprints.",
    ),
    "rollout_adapter_version": ("gauge", ("adapter",), "The published version of an adapter."),
    "rollout_steps": ("counter", (), "Completed steps: from pause to serving again."),
    "rollout_events": ("counter", ("event",), "Events: fenced, restarted, gate ..."),
    "rollout_weight_version": ("gauge", (), "The last published version."),
    "rollout_engine_weight_version": ("gauge", ("engine",), "The version an engine holds."),
    "rollout_engine_state": ("gauge", ("engine", "state"), "1 for the state an engine is in."),
    "rollout_engines": ("gauge", ("state",), "Engines by state."),
    "rollout_engine_resident_bytes": ("gauge", ("engine",), "Host memory of an engine."),
    "rollout_engine_draft_accepted_ratio": (
        "gauge",
        ("engine",),
        "Share of the tokens that an engine's draft proposes which are right, since the last push; "
        "no sample while too few are known.",
    ),
    "rollout_gpu_used_bytes": ("gauge", ("engine", "gpu"), "GPU memory in use, by all programs."),
    "rollout_gpu_bytes": ("gauge", ("engine", "gpu"), "Memory of a GPU."),
    "rollout_gpu_busy_ratio": (
        "gauge",
        ("engine", "gpu"),
        "Share of time in which the GPU computed, for any program; no sample where unmeasured.",
    ),
    "rollout_gate": ("gauge", ("state",), "1 for the state the gate is in."),
    "rollout_gate_state_seconds": ("gauge", ("state",), "Time since the gate entered this state."),
    "rollout_store_version": ("gauge", (), "The newest version the weight store holds."),
    "rollout_store_lag": ("gauge", (), "Versions the weight store is behind."),
    "rollout_store_bytes": ("gauge", (), "Host memory the weight store holds."),
    "rollout_driver_step": ("gauge", (), "The last step that a driver reported."),
    "rollout_driver_figure": (
        "gauge",
        ("figure",),
        "The figures of that step, such as reward/mean; other: how many more it has.",
    ),
    "rollout_logprob_gap_nats": (
        "histogram",
        ("engine",),
        "Absolute difference of a token's log-prob between trainer and engine.",
    ),
}
# What ``rollout_events`` counts.
EVENTS = ("gate", "fenced", "restarted", "readmitted")
# States whose number is exported also when it is 0, because alerts and dashboards use them.
_ZERO_ENGINES = {"serving": 0, "fenced": 0}
# Every client of the router can name engines and figures: what is beyond has one label.
_MAX_ENGINES = 1_000
_MAX_DRIVER_FIGURES = 1_000
OTHER = "other"
_FAMILIES: Mapping[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}
_Samples = Mapping[tuple[str, ...], Any]


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


class MetricCounters:
    """Counters over all spans and steps of one server."""

    def __init__(self) -> None:
        self.phases: dict[str, _Histogram] = {}
        # Engine -> number of tokens up to each bound, and their sum.
        self.logprob_gaps: dict[str, Counter[str]] = {}
        # Exported as 0 from the start: Prometheus computes an increase only from a previous sample.
        self.counters: dict[str, dict[tuple[str, ...], float]] = {
            name: defaultdict(float, {} if labels else {(): 0.0})
            for name, (kind, labels, _) in METRICS.items()
            if kind == "counter"
        }
        for event in EVENTS:
            self._add("rollout_events", 0, event)

    def take(self, spans: Iterable[Span]) -> None:
        """Count finished spans; each must be passed once."""
        for span in spans:
            if span.kind is Kind.PHASE:
                self.phases.setdefault(span.name, _Histogram()).observe(span.elapsed_s)
                self._add("rollout_phase_failures", span.outcome is not Outcome.OK, span.name)
            elif span.kind is Kind.ENGINE:
                self._take_engine(span)
            elif span.kind is Kind.EVENT:
                self._add("rollout_events", 1, span.name)

    def take_steps(self, steps: Iterable[Step]) -> None:
        """Count complete steps; each must be passed once."""
        for step in steps:
            self._add("rollout_steps", 1)
            self._add("rollout_boundary_lost_seconds", step.lost_s)
            self._add("rollout_trainer_seconds", step.trainer_s)
            self._add("rollout_paused_seconds", step.paused_s)

    def take_pushes(self, pushes: Iterable[PushTotals]) -> None:
        """Count pushes that have succeeded; each must be passed once."""
        for push in pushes:
            self._add("rollout_pushed_bytes", push.num_bytes, push.route)
            self._add("rollout_push_seconds", push.elapsed_s, push.route)

    def take_logprob_gaps(self, gaps: Mapping[str, Mapping[str, float]]) -> None:
        """Count the histograms that a driver reported, by engine; each must be passed once.

        Every client of the router can report, so one that is not cumulative is left out.
        """
        for engine_id, histogram in gaps.items():
            counts = [histogram.get(name, -1) for name in BUCKET_NAMES]
            is_histogram = histogram.get("sum", -1) >= 0 <= counts[0] and counts == sorted(counts)
            if is_histogram:
                is_full = len(self.logprob_gaps) >= _MAX_ENGINES
                label = OTHER if is_full and engine_id not in self.logprob_gaps else engine_id
                known = self.logprob_gaps.setdefault(label, Counter())
                known.update({name: histogram[name] for name in (*BUCKET_NAMES, "sum")})

    def _take_engine(self, span: Span) -> None:
        self._add("rollout_engine_phase_seconds", span.elapsed_s, span.engine_id, span.name)
        failed = span.outcome is not Outcome.OK
        self._add("rollout_engine_failures", failed, span.engine_id, span.name)
        self._add("rollout_sent_bytes", span.num_bytes, span.engine_id)
        self._add("rollout_freed_bytes", max(0, span.freed_bytes or 0), span.engine_id)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        self.counters[name][labels] += amount


class _ServerCollector(Collector):
    def __init__(self, counters: MetricCounters, snapshot: Mapping[str, Any]) -> None:
        self._histograms: dict[str, Mapping[str, tuple[Any, float]]] = {
            "rollout_phase_seconds": {
                command: (histogram.cumulative(), histogram.sum_s)
                for command, histogram in counters.phases.items()
            },
            "rollout_logprob_gap_nats": {
                engine_id: ([(name, gap[name]) for name in BUCKET_NAMES], gap["sum"])
                for engine_id, gap in counters.logprob_gaps.items()
            },
        }
        self._values = counters.counters | _gauges(snapshot)
        self._server = snapshot.get("server", "")

    def collect(self) -> Iterable[Metric]:
        for name, (kind, labels, text) in METRICS.items():
            family = _FAMILIES[kind](name, text, labels=("server", *labels))
            if kind == "histogram":
                for label, (buckets, total) in self._histograms[name].items():
                    family.add_metric([self._server, label], buckets, total)
            else:
                for of_labels, value in self._values[name].items():
                    if value is not None:
                        family.add_metric((self._server, *of_labels), float(value))
            if family.samples:
                yield family


def render_metrics(counters: MetricCounters, snapshot: Mapping[str, Any]) -> str:
    """All metrics of one server, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ServerCollector(counters, snapshot))
    return generate_latest(registry).decode()


def _gauges(now: Mapping[str, Any]) -> dict[str, _Samples]:
    """Gauge -> labels -> value, from a snapshot, or None where a value is unknown."""
    engines, gate = now.get("engines", ()), now.get("gate", {})
    figures, store = now.get("figures", ()), now.get("store") or {}
    pushes, unchanged = now.get("pushes", ()), now.get("unchanged")
    last_step = figures[-1]["step"] if figures else None
    # A step has several reports: the rollout's, those of checks, an evaluation's.
    last: dict[str, float] = {}
    for report in standing(figures, last_step):
        last |= report["metrics"]
    if (num_more := len(last) - _MAX_DRIVER_FIGURES) > 0:
        last = dict(islice(last.items(), _MAX_DRIVER_FIGURES)) | {OTHER: num_more}
    running = [span for span in now.get("running", ()) if span["kind"] == Kind.PHASE.value]
    num_by_state = _ZERO_ENGINES | Counter(engine["state"] for engine in engines)
    simple = {
        "rollout_up": bool(now.get("is_answering")),
        "rollout_weight_version": now.get("weight_version"),
        "rollout_store_version": store.get("version"),
        "rollout_store_lag": store.get("lag"),
        "rollout_store_bytes": store.get("bytes"),
        "rollout_driver_step": last_step,
        "rollout_push_density_ratio": pushes[-1]["density"] if pushes else None,
        "rollout_unchanged_tensors": None
        if unchanged is None
        else sum(found["num_tensors"] for found in unchanged),
    }
    labelled: dict[str, Mapping[Any, Any]] = {
        "rollout_phase": {now.get("phase"): 1},
        "rollout_phase_running_seconds": {span["name"]: span["elapsed_s"] for span in running},
        "rollout_phase_budget_seconds": {span["name"]: span.get("budget_s", 0) for span in running},
        "rollout_engine_weight_version": {
            engine["engine_id"]: engine["weight_version"] for engine in engines
        },
        "rollout_engines": num_by_state,
        "rollout_engine_resident_bytes": {
            engine["engine_id"]: engine["resident_bytes"] for engine in engines
        },
        "rollout_engine_draft_accepted_ratio": {
            engine["engine_id"]: engine["drafts"]["share"]
            for engine in engines
            if engine.get("drafts")
        },
        "rollout_adapter_version": {
            adapter: version_of(name) for adapter, name in (gate.get("adapters") or {}).items()
        },
        "rollout_gate": {gate.get("state"): 1},
        "rollout_gate_state_seconds": {gate.get("state"): gate.get("in_state_s")},
        "rollout_driver_figure": last,
    }
    gpus = {(engine["engine_id"], gpu["uuid"]): gpu for engine in engines for gpu in engine["gpus"]}
    return {
        "rollout_gpu_used_bytes": {labels: gpu["used_bytes"] for labels, gpu in gpus.items()},
        "rollout_gpu_bytes": {labels: gpu["total_bytes"] for labels, gpu in gpus.items()},
        "rollout_gpu_busy_ratio": {
            labels: gpu["busy_percent"] / 100
            for labels, gpu in gpus.items()
            if gpu["busy_percent"] is not None
        },
        "rollout_engine_state": {(engine["engine_id"], engine["state"]): 1 for engine in engines},
        **{name: {(): value} for name, value in simple.items()},
        **{
            name: {(label,): value for label, value in values.items() if label}
            for name, values in labelled.items()
        },
    }
