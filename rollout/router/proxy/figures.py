"""What the router counts of its requests and keeps of drivers' steps.

Counting a request costs a list index.
"""

from __future__ import annotations

import secrets
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from rollout.router.http.routes import COMPLETION_PATHS

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_NUM_REPORTS = 32
_MAX_REPORTS_BYTES = 4 << 20
"""Bound for the JSON of loaded reports; as objects they take up to twenty times as much."""
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
    """Latencies by route and engine.  Unknown paths share a label, so that clients cannot make
    more."""

    def __init__(self) -> None:
        self.by_label: dict[tuple[str, str], Latency] = {}

    def observe(self, path: str, engine_id: str, took_s: float) -> None:
        label = (path if path in COMPLETION_PATHS else "other", engine_id)
        latency = self.by_label.get(label)
        if latency is None:
            latency = self.by_label[label] = Latency()
        latency.counts[bisect_left(BUCKETS_S, took_s)] += 1
        latency.sum_s += took_s


_Text = Annotated[str, Field(max_length=2400)]
_Number = Annotated[int, Field(ge=0, lt=1 << 53)]


class ShownSample(TypedDict):
    """One sample that people read, on the page and in the report of a run.

    Attributes:
        prompt: its text, or its first ids.
        tokens: of the reply.
        engines, versions: that generated it.
        status: why it is not whole, or empty if it is.
    """

    prompt: _Text
    reply: _Text
    reward: Annotated[float, Field(allow_inf_nan=False)] | None
    tokens: _Number
    engines: Annotated[list[_Text], Field(max_length=16)]
    versions: Annotated[list[_Number], Field(max_length=16)]
    status: _Text


_DRIVER = TypeAdapter(Annotated[str, Field(max_length=64)])
_SAMPLES = TypeAdapter(Annotated[list[ShownSample], Field(max_length=16)])


class StepMetrics:
    """The last steps that drivers reported, oldest first.

    Each has the name of this process of the router, which no other has, and a serial number in it:
    a router in the place of a lost one counts from 1 again.  Drivers report to the router because
    every driver can reach it.

    Attributes:
        of_server: the server's metrics of the last step boundary, which drivers read here.
    """

    def __init__(self) -> None:
        self.of_server: Mapping[str, float] = {}
        self._reported: deque[tuple[dict[str, Any], int]] = deque()
        self._num_bytes = 0
        self._name = secrets.token_hex(8)
        self._num_reported = 0

    def put(self, report: Any, num_bytes: int) -> None:
        """Keep ``{"step": 3, "metrics": {name: number}}``; with ``driver``, a name that no other
        driver has; with histograms if it has them: ``lengths`` {bound: number} and ``logprob_gaps``
        {engine id: {bound: number}}; and with ``samples``, as ``ShownSample``.

        Args:
            num_bytes: of its JSON.

        Raises:
            ValueError: it has another form.
        """
        step = report.get("step") if isinstance(report, Mapping) else None
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) > _LARGEST_STEP:
            raise ValueError("step metrics are an object with 'step', an integer, and 'metrics'")
        read: dict[str, Any] = {
            "metrics": _numbers(report.get("metrics", {})),
            "lengths": _numbers(report.get("lengths", {})),
            "logprob_gaps": _histograms(report.get("logprob_gaps", {})),
            "samples": _SAMPLES.validate_python(report.get("samples", [])),
        }
        if driver := _DRIVER.validate_python(report.get("driver", "")):
            read["driver"] = driver
        self._num_reported += 1
        about = {
            "router": self._name,
            "serial": self._num_reported,
            "at_s": round(time.time(), 3),
            "step": step,
        }
        self._reported.append((about | read, num_bytes))
        self._num_bytes += num_bytes
        while len(self._reported) > _NUM_REPORTS or self._num_bytes > _MAX_REPORTS_BYTES:
            self._num_bytes -= self._reported.popleft()[1]

    def last(self) -> list[dict[str, Any]]:
        """All reported steps that are kept."""
        return [report for report, _ in self._reported]


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
