"""``GET /metrics``.  Counting a request costs a list index; text is made when it is asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
_KNOWN_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})


@dataclass(slots=True)
class Latency:
    """Requests of one route, by how long they took."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0


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


class _RouterCollector(Collector):
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def collect(self) -> Iterable[Metric]:
        gate = self._proxy.gate
        stats = gate.stats()
        yield GaugeMetricFamily("router_held", "Requests that wait.", stats["gate"]["num_held"])
        yield GaugeMetricFamily(
            "router_held_bytes", "Bodies of requests that wait.", stats["gate"]["held_bytes"]
        )
        yield GaugeMetricFamily(
            "router_connections", "Open connections to engines.", self._proxy.pool.num_open
        )
        in_flight = GaugeMetricFamily(
            "router_in_flight", "Requests on an engine.", labels=["engine", "state"]
        )
        failures = CounterMetricFamily(
            "router_engine_failures", "Connections an engine failed.", labels=["engine"]
        )
        for engine in stats["engines"]:
            in_flight.add_metric([engine["engine_id"], engine["state"]], engine["num_in_flight"])
            failures.add_metric([engine["engine_id"]], engine["num_failures"])
        yield in_flight
        yield failures
        for name, value in {
            "num_admitted": stats["num_admitted"],
            "num_refused": stats["num_refused"],
            **self._proxy.stats(),
        }.items():
            what = name.removeprefix("num_")
            yield CounterMetricFamily(f"router_{what}", f"Requests: {what}.", value)
        seconds = CounterMetricFamily(
            "router_gate_seconds", "Time the gate was in a state.", labels=["state"]
        )
        for state, spent_s in gate.seconds_by_state().items():
            seconds.add_metric([state], spent_s)
        yield seconds
        yield self._latency()

    def _latency(self) -> Metric:
        family = HistogramMetricFamily(
            "router_request_seconds",
            "From a request's head to the last byte of its answer.",
            labels=["route", "engine"],
        )
        for label, latency in self._proxy.latencies.by_label.items():
            buckets, total = [], 0
            for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), latency.counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(label, buckets, latency.sum_s)
        return family


def exposition(proxy: Proxy) -> bytes:
    """All metrics of one router, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RouterCollector(proxy))
    return generate_latest(registry)
