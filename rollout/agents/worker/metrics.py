"""``GET /metrics`` of one worker.

Always true: every exported metric is one of ``METRICS``, and exported once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.agents.turns.store import SessionStore

# Name -> kind, labels, help.  Tests compare documentation, dashboard and alerts with this.
METRICS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "agents_session_turns": (
        "counter",
        ("drift",),
        "Turns of agents' sessions, by how their prompts differ from a new tokenisation.",
    ),
    "agents_session_bytes": ("gauge", (), "Bytes of the turns of all sessions of a worker."),
}


def metrics_text(store: SessionStore) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(store))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, store: SessionStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        (turns, (_, labels, of_turns)), (size, (_, _, of_size)) = METRICS.items()
        counter = CounterMetricFamily(turns, of_turns, labels=labels)
        for drift, num in self._store.num_turns.items():
            counter.add_metric((drift.value,), num)
        yield counter
        yield GaugeMetricFamily(size, of_size, value=self._store.num_bytes)
