"""``GET /metrics``.  Counting a request costs a list index; text is made when it is asked for.

Always true: every metric that is told is one of ``METRICS``, once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from rollout.router.proxy import Proxy

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Name -> kind, labels, help.  The documentation, the dashboard and the alerts are held to this.
METRICS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "router_held": ("gauge", (), "Requests that wait at the gate."),
    "router_held_bytes": ("gauge", (), "Bodies of requests that wait at the gate."),
    "router_connections": ("gauge", (), "Open connections to engines."),
    "router_in_flight": ("gauge", ("engine", "state"), "Requests on an engine."),
    "router_engine_failures": ("counter", ("engine",), "Connections an engine failed."),
    "router_admitted": ("counter", (), "Requests that were let through the gate."),
    "router_refused": ("counter", (), "Requests that were sent away at the gate."),
    "router_retried": ("counter", (), "Requests sent to another engine from their beginning."),
    "router_failovers": (
        "counter",
        (),
        "Requests that went on elsewhere with the tokens they had.",
    ),
    "router_tokens_kept": (
        "counter",
        (),
        "Tokens carried over to another engine, which only prefills them.",
    ),
    "router_tokens_recomputed": ("counter", (), "Tokens that had come, and were generated again."),
    "router_cut": ("counter", (), "Requests taken off an engine that was lost."),
    "router_broken_replies": ("counter", (), "Answers that were begun and not completed."),
    "router_clients_left": ("counter", (), "Requests whose client went away."),
    "router_expired": ("counter", (), "Requests that took longer than request_timeout_s."),
    "router_gate_seconds": ("counter", ("state",), "Time the gate was in a state."),
    "router_request_seconds": (
        "histogram",
        ("route", "engine"),
        "From a request's head to the last byte of its answer.",
    ),
}
_FAMILIES: Mapping[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}
_KNOWN_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})


@dataclass(slots=True)
class Latency:
    """Requests of one route, by how long they took."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets as Prometheus counts them: each holds those before it."""
        bounds = (*map(str, BUCKETS_S), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Latencies:
    """By route and engine; unknown paths share a label, so that clients cannot make more."""

    def __init__(self) -> None:
        self.by_label: dict[tuple[str, str], Latency] = {}

    def observe(self, path: str, engine_id: str, took_s: float) -> None:
        label = (path if path in _KNOWN_PATHS else "other", engine_id)
        latency = self.by_label.get(label)
        if latency is None:
            latency = self.by_label[label] = Latency()
        latency.counts[bisect_left(BUCKETS_S, took_s)] += 1
        latency.sum_s += took_s


# The labels' values, and what the family takes after them.
_Sample = tuple[tuple[str, ...], tuple[Any, ...]]


class _RouterCollector(Collector):
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def collect(self) -> Iterable[Metric]:
        samples = self._samples()
        for name, (kind, labels, told) in METRICS.items():
            family = _FAMILIES[kind](name, told, labels=labels)
            for of_labels, values in samples[name]:
                family.add_metric(of_labels, *values)
            yield family

    def _samples(self) -> dict[str, list[_Sample]]:
        """By metric, what it is now for each of its labels."""
        gate = self._proxy.gate
        stats = gate.stats()
        engines = stats["engines"]
        single = {
            "router_held": stats["gate"]["num_held"],
            "router_held_bytes": stats["gate"]["held_bytes"],
            "router_connections": self._proxy.pool.num_open,
            "router_admitted": stats["num_admitted"],
            "router_refused": stats["num_refused"],
        }
        for name, value in self._proxy.stats().items():
            told = f"router_{name.removeprefix('num_')}"
            if not METRICS[told][1]:  # what is told engine by engine is not told once more
                single[told] = value
        return {
            **{name: [((), (value,))] for name, value in single.items()},
            "router_in_flight": [
                ((one["engine_id"], one["state"]), (one["num_in_flight"],)) for one in engines
            ],
            "router_engine_failures": [
                ((one["engine_id"],), (one["num_failures"],)) for one in engines
            ],
            "router_gate_seconds": [
                ((state,), (spent_s,)) for state, spent_s in gate.seconds_by_state().items()
            ],
            "router_request_seconds": [
                (label, (latency.cumulative(), latency.sum_s))
                for label, latency in self._proxy.latencies.by_label.items()
            ],
        }


def exposition(proxy: Proxy) -> bytes:
    """All metrics of one router, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RouterCollector(proxy))
    return generate_latest(registry)
