"""``GET /metrics``, and the metrics that drivers report of their steps.

Counting a request costs a list index; the text is made on request.

Always true: every exported metric is one of ``METRICS``, and exported once.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from rollout.router.http.routes import COMPLETION_PATHS

if TYPE_CHECKING:
    from rollout.router.proxy.context import Proxy

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

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
    "router_session_turns": (
        "counter",
        ("drift",),
        "Turns of agents' sessions, by how their prompts differ from a new tokenisation.",
    ),
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

_NUM_KEPT = 32
_LARGEST_STEP = 1 << 53
_LARGEST_NUMBER = sys.float_info.max
_MAX_NAMES = 512
_MAX_NAME_CHARACTERS = 200


@dataclass(slots=True)
class Latency:
    """Requests of one route, by how long they took."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """Cumulative buckets, as Prometheus defines them."""
        bounds = (*map(str, BUCKETS_S), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Latencies:
    """By route and engine; unknown paths share a label, so that clients cannot make more."""

    def __init__(self) -> None:
        self.by_label: dict[tuple[str, str], Latency] = {}

    def observe(self, path: str, engine_id: str, took_s: float) -> None:
        label = (path if path in COMPLETION_PATHS else "other", engine_id)
        latency = self.by_label.get(label)
        if latency is None:
            latency = self.by_label[label] = Latency()
        latency.counts[bisect_left(BUCKETS_S, took_s)] += 1
        latency.sum_s += took_s


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
            "router_session_turns": [
                ((drift.value,), (num,)) for drift, num in self._proxy.sessions.num_turns.items()
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


_Text = Annotated[str, Field(max_length=2400)]
_Number = Annotated[int, Field(ge=0, lt=1 << 53)]


class ShownSample(TypedDict):
    """One sample that people read, on the page and in the report of a run.

    Attributes:
        prompt: its text, or its first ids.
        tokens: of the reply.
        engines, versions: that generated it.
        status: why it is not whole; empty if it is.
    """

    prompt: _Text
    reply: _Text
    reward: Annotated[float, Field(allow_inf_nan=False)] | None
    tokens: _Number
    engines: Annotated[list[_Text], Field(max_length=16)]
    versions: Annotated[list[_Number], Field(max_length=16)]
    status: _Text


_SAMPLES = TypeAdapter(Annotated[list[ShownSample], Field(max_length=16)])


class StepMetrics:
    """The last steps that drivers reported, oldest first; each has a serial number.

    Drivers report to the router because every driver can reach it.  Nothing else uses the numbers.

    Attributes:
        of_server: the server's metrics of the last step boundary, which drivers read here.
    """

    def __init__(self) -> None:
        self.of_server: Mapping[str, float] = {}
        self._reported: deque[dict[str, Any]] = deque(maxlen=_NUM_KEPT)
        self._num_reported = 0

    def put(self, report: Any) -> None:
        """Keep ``{"step": 3, "metrics": {name: number}}``, with histograms if it has them:
        ``lengths`` {bound: number} and ``logprob_gaps`` {engine id: {bound: number}}; and with
        ``samples``, as ``ShownSample``.

        Raises:
            ValueError: it has another form.
        """
        step = report.get("step") if isinstance(report, Mapping) else None
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) > _LARGEST_STEP:
            raise ValueError("step metrics are an object with 'step', an integer, and 'metrics'")
        read = {
            "metrics": _numbers(report.get("metrics", {})),
            "lengths": _numbers(report.get("lengths", {})),
            "logprob_gaps": _histograms(report.get("logprob_gaps", {})),
            "samples": _SAMPLES.validate_python(report.get("samples", [])),
        }
        self._num_reported += 1
        about = {"serial": self._num_reported, "at_s": round(time.time(), 3), "step": step}
        self._reported.append(about | read)

    def last(self) -> list[dict[str, Any]]:
        """All reported steps that are kept."""
        return list(self._reported)


def _histograms(values: Any) -> dict[str, dict[str, float]]:
    if not isinstance(values, Mapping) or len(values) > _MAX_NAMES:
        raise ValueError(f"log-prob gaps are an object of at most {_MAX_NAMES} engines")
    if any(len(name) > _MAX_NAME_CHARACTERS for name in values):
        raise ValueError(f"an engine's name has over {_MAX_NAME_CHARACTERS} characters")
    return {name: _numbers(of_engine) for name, of_engine in values.items()}


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping) or len(values) > _MAX_NAMES:
        raise ValueError(f"step metrics are an object of at most {_MAX_NAMES} numbers")
    for name, value in values.items():
        if len(name) > _MAX_NAME_CHARACTERS:
            raise ValueError(f"a metric's name has {len(name)} characters: {name[:40]}...")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"metric {name!r} is not a number: {value!r:.60}")
        # An integer may have too many digits for a float, and to be written.
        if not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
            is_long = isinstance(value, int)
            raise ValueError(f"metric {name!r} is {'too large' if is_long else value}")
    return dict(values)
