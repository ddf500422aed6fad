"""``GET /metrics``; the text is made on request.

Always true: every exported metric is one of ``METRICS``, and exported once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from rollout.router.proxy.context import Proxy

# Name -> kind, labels, help.  Tests compare documentation, dashboard and alerts with this.
METRICS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "router_held": ("gauge", (), "Requests that wait at the gate."),
    "router_held_bytes": ("gauge", (), "Bodies of requests that wait at the gate."),
    "router_connections": ("gauge", (), "Open connections to engines."),
    "router_in_flight": ("gauge", ("engine", "state"), "Requests on an engine."),
    "router_engine_failures": ("counter", ("engine",), "Connections an engine failed."),
    "router_admitted": ("counter", (), "Requests that were admitted."),
    "router_refused": ("counter", (), "Requests that were refused."),
    "router_retried": ("counter", (), "Requests sent to another engine from their beginning."),
    "router_failovers": (
        "counter",
        (),
        "Requests that continued on another engine with their tokens.",
    ),
    "router_failovers_refused": (
        "counter",
        ("why",),
        "Lost engines whose tokens could not be kept, so that a request started over or failed.",
    ),
    "router_contracts_refused": (
        "counter",
        ("why",),
        "Requests that ended because no tokens could fulfil their contract.",
    ),
    "router_tokens_kept": (
        "counter",
        (),
        "Tokens carried over to another engine, which only prefills them.",
    ),
    "router_tokens_recomputed": ("counter", (), "Tokens that were generated a second time."),
    "router_cut": ("counter", (), "Requests evicted from an engine that was lost."),
    "router_unusable_replies": ("counter", (), "Replies whose tokens the router could not read."),
    "router_broken_replies": ("counter", (), "Responses that were begun and not completed."),
    "router_clients_left": ("counter", (), "Requests whose client left."),
    "router_expired": ("counter", (), "Requests that took longer than request_timeout_s."),
    "router_gate_seconds": ("counter", ("state",), "Time that the gate was in a state."),
    "router_request_seconds": (
        "histogram",
        ("route", "engine"),
        "From a request's head to the last byte of its response.",
    ),
}
_FAMILIES: Mapping[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}

# The values of the labels, and the further arguments of ``add_metric``.
_Sample = tuple[tuple[str, ...], tuple[Any, ...]]


class _RouterCollector(Collector):
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def collect(self) -> Iterable[Metric]:
        samples = self._samples()
        for name, (kind, labels, help_text) in METRICS.items():
            family = _FAMILIES[kind](name, help_text, labels=labels)
            for of_labels, values in samples[name]:
                family.add_metric(of_labels, *values)
            yield family

    def _samples(self) -> dict[str, list[_Sample]]:
        """The current values of every metric, by its labels."""
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
            metric = f"router_{name.removeprefix('num_')}"
            if not METRICS[metric][1]:  # metrics per engine come from the gate's stats
                single[metric] = value
        return {
            **{name: [((), (value,))] for name, value in single.items()},
            "router_in_flight": [
                ((engine["engine_id"], engine["state"]), (engine["num_in_flight"],))
                for engine in engines
            ],
            "router_engine_failures": [
                ((engine["engine_id"],), (engine["num_failures"],)) for engine in engines
            ],
            "router_failovers_refused": [
                ((why,), (num,)) for why, num in self._proxy.counts.num_failovers_refused.items()
            ],
            "router_contracts_refused": [
                ((why,), (num,)) for why, num in self._proxy.counts.num_contracts_refused.items()
            ],
            "router_gate_seconds": [
                ((state,), (spent_s,)) for state, spent_s in gate.seconds_by_state().items()
            ],
            "router_request_seconds": [
                (label, (latency.cumulative(), latency.sum_s))
                for label, latency in self._proxy.latencies.by_label.items()
            ],
        }


def metrics_text(proxy: Proxy) -> bytes:
    """All metrics of one router, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RouterCollector(proxy))
    return generate_latest(registry)
