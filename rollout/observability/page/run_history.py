"""What a server has done, as its page keeps it: spans, events, steps, figures of the driver.

Always true: memory is bounded; spans and figures are taken once, in the order in which they ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from secrets import token_hex
from typing import Any

from rollout.observability.page.prometheus import MetricCounters
from rollout.observability.step_reports import Taken
from rollout.observability.timeline.analysis import PushTotals, Step, pushes, steps
from rollout.observability.timeline.span import Cursor, Kind, Outcome, Span
from rollout.rules.lifecycle import Command

_MAX_SPANS = 60_000
_MAX_EVENTS = 300
_MAX_FIGURES = 5_000
_MAX_FIGURE_BYTES = 64 << 20
_BYTES_PER_NUMBER = 150
"""A float, its entry in a table and the head of its name."""
_MAX_STEPS = 500
_MAX_SAMPLED_STEPS = 20
_SHOWN_STEPS = 100
_SHOWN_FIGURES = 500


class RunHistory:
    """The past of one server.

    Args:
        reports: of drivers, which a process before this one had taken.

    Attributes:
        counters: over all spans and steps that this process has taken, for the metrics.
        errors: the last failure of each engine that has one.
    """

    def __init__(self, reports: Sequence[Mapping[str, Any]] = ()) -> None:
        self.counters = MetricCounters()
        self._name = token_hex(8)
        self._num_spans = 0
        self.errors: dict[str, Span] = {}
        self._spans: deque[Span] = deque(maxlen=_MAX_SPANS)
        # Events of the gate are apart: many of them would displace the others.
        self._events: deque[Span] = deque(maxlen=_MAX_EVENTS)
        self._gate_events: deque[Span] = deque(maxlen=_MAX_EVENTS)
        self._figures: deque[Mapping[str, Any]] = deque()
        self._figure_bytes = 0
        # Apart, because they are large: only the last are kept.
        self._samples: deque[Mapping[str, Any]] = deque(maxlen=_MAX_SAMPLED_STEPS)
        self._taken = Taken(reports)
        self._steps = _StepLog()
        self._pushes: deque[PushTotals] = deque(maxlen=_SHOWN_STEPS)
        for report in reports:
            self._keep_report(report)

    def take_spans(self, new: list[Span]) -> None:
        """Keep finished spans."""
        new = sorted(new, key=lambda span: span.end_s)
        for span in new:
            self._keep(span)
        self.counters.take(new)
        self.counters.take_steps(self._steps.take(new))
        # Ranks report a push when its step is over, all spans at once.
        pushed = pushes(new, (step for _, step in self._steps.numbered))
        self._pushes += pushed
        self.counters.take_pushes(pushed)

    def take_figures(self, reports: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Keep the reports of drivers; returns those that are new."""
        new = self._taken.new(reports)
        for report in new:
            self._keep_report(report)
            self.counters.take_logprob_gaps(report.get("logprob_gaps", {}))
        return new

    def _keep_report(self, report: Mapping[str, Any]) -> None:
        figures = dict(report)
        if samples := figures.pop("samples", ()):
            self._samples.append({"step": report["step"], "samples": samples})
        self._keep_figures(figures)

    def _keep_figures(self, figures: Mapping[str, Any]) -> None:
        """Every client of the router may report, so what is kept has a bound in bytes."""
        self._figures.append(figures)
        self._figure_bytes += _bytes_of(figures)
        while len(self._figures) > _MAX_FIGURES or self._figure_bytes > _MAX_FIGURE_BYTES:
            self._figure_bytes -= _bytes_of(self._figures.popleft())

    def _keep(self, span: Span) -> None:
        self._spans.append(span)
        self._num_spans += 1
        has_failed = span.outcome in (Outcome.FAILED, Outcome.CANCELLED)
        is_push = span.kind is Kind.PHASE and span.name == Command.UPDATE_WEIGHTS
        if span.kind is Kind.EVENT and span.name == "gate":
            self._gate_events.append(span)
        elif span.kind is Kind.EVENT or is_push or (has_failed and span.kind is not Kind.CALL):
            self._events.append(span)
        if span.engine_id and span.outcome is Outcome.FAILED:
            self.errors[span.engine_id] = span

    # -- reading ----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Events, figures, samples, steps and pushes, ready for JSON."""
        return {
            "events": [span.to_dict() for span in self._events],
            "gate_events": [span.to_dict() for span in self._gate_events],
            "figures": list(self._figures)[-_SHOWN_FIGURES:],
            "samples": list(self._samples),
            "steps": [_step_dict(number, step) for number, step in self._steps.numbered][
                -_SHOWN_STEPS:
            ],
            "pushes": [asdict(push) for push in self._pushes],
        }

    @property
    def cursor(self) -> Cursor:
        """Behind all spans so far, for ``spans_since``."""
        return Cursor(self._name, self._num_spans)

    def spans_since(self, cursor: Cursor, kinds: frozenset[Kind]) -> list[Span]:
        """The kept spans of these kinds behind a cursor; all for one of another process."""
        num_known = cursor.num_ended if cursor.timeline == self._name else 0
        num_new = min(max(0, self._num_spans - num_known), len(self._spans))
        new = list(self._spans)[len(self._spans) - num_new :]
        return [span for span in new if span.kind in kinds]

    def step(self, number: int) -> dict[str, Any] | None:
        """One step with all its spans, or None if it does not exist or was dropped."""
        for known, step in self._steps.numbered:
            if known == number:
                inside = [
                    span.to_dict()
                    for span in self._spans
                    if step.start_s <= span.start_s <= step.end_s
                ]
                return _step_dict(number, step) | {"spans": inside}
        return None


class _StepLog:
    """The steps that spans have completed.

    Attributes:
        numbered: the last ones, each with its number.
    """

    def __init__(self) -> None:
        self.numbered: deque[tuple[int, Step]] = deque(maxlen=_MAX_STEPS)
        self._num = 0
        self._open: list[Span] = []  # may belong to the next step

    def take(self, new: Sequence[Span]) -> list[Step]:
        """The steps that these spans complete."""
        self._open += [span for span in new if span.kind in (Kind.PHASE, Kind.ENGINE)]
        self._open = self._open[-_MAX_SPANS:]
        if not any(
            span.kind is Kind.PHASE and span.name == Command.CONTINUE_GENERATION for span in new
        ):
            return []
        completed = steps(self._open)
        for step in completed:
            self._num += 1
            self.numbered.append((self._num, step))
        if completed:
            end_s = completed[-1].end_s
            self._open = [span for span in self._open if span.start_s > end_s]
        return completed


def _bytes_of(figures: Mapping[str, Any]) -> int:
    """About the memory of a report, without its samples."""
    tables = [figures.get("metrics", {}), figures.get("lengths", {})]
    gaps: Mapping[str, Mapping[str, float]] = figures.get("logprob_gaps", {})
    tables += gaps.values()
    names = [*gaps, *(name for table in tables for name in table)]
    return sum(_BYTES_PER_NUMBER + 4 * len(name) for name in names) + 1024


def _step_dict(number: int, step: Step) -> dict[str, Any]:
    failures = [span.to_dict() for span in step.failures]
    return {"number": number, **asdict(step), "failures": failures}
