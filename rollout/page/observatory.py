"""All that is known of one server, gathered again and again: what page, metrics and doctor show.

Always true: one gathering at a time; a server that does not answer leaves what was known last, and
that is said; what is kept is bounded.  Used on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from rollout.fanout import describe
from rollout.lifecycle import Command
from rollout.observation import Observation
from rollout.page.tallies import Tallies
from rollout.timeline.analysis import Step, steps
from rollout.timeline.span import Kind, Outcome, Span
from rollout.types import EngineStatus, GroupStatus, ServerStatus

logger = logging.getLogger(__name__)

_MAX_SPANS = 60_000
_MAX_EVENTS = 300
_MAX_FIGURES = 5_000
_MAX_STEPS = 500
_TIMEOUT_S = 10.0
_QUIET_S = 10.0

Observe = Callable[[Mapping[str, int]], Awaitable[Observation]]


class Observatory:
    """Asks ``observe`` and keeps what comes.

    Args:
        observe: asks the server for what is new since these cursors, by source.
        on_figures: told each step that a driver tells of, once.
        timeout_s: how long one answer may take.
    """

    def __init__(
        self,
        observe: Observe,
        *,
        on_figures: Callable[[Mapping[str, Any]], None] = lambda told: None,
        timeout_s: float = _TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tallies = Tallies()
        self._observe = observe
        self._on_figures = on_figures
        self._timeout_s = timeout_s
        self._clock = clock
        self._cursors: dict[str, int] = {}
        self._spans: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._num_spans = 0
        self._events: deque[Span] = deque(maxlen=_MAX_EVENTS)
        self._figures: deque[Mapping[str, Any]] = deque(maxlen=_MAX_FIGURES)
        self._last_serial = 0
        self._steps: deque[tuple[int, Step]] = deque(maxlen=_MAX_STEPS)
        self._num_steps = 0
        self._recent: list[Span] = []
        self._errors: dict[str, Span] = {}
        self._running: tuple[Span, ...] = ()
        self._last: Observation | None = None
        self._answered_s = 0.0
        self._trouble = "it has not been asked yet"
        self._turn = asyncio.Lock()

    # -- gathering --------------------------------------------------------------------------

    async def refresh(self, max_age_s: float = 0.0) -> None:
        """Ask the server, unless what is known is younger than ``max_age_s``."""
        async with self._turn:
            if self._clock() - self._answered_s < max_age_s:
                return
            try:
                async with asyncio.timeout(self._timeout_s):
                    seen = await self._observe(dict(self._cursors))
            except Exception as error:  # what was known last is shown, with this
                self._trouble = describe(error)
                return
            self._take(seen)

    def _take(self, seen: Observation) -> None:
        self._last, self._answered_s = seen, self._clock()
        self._trouble = "; ".join(seen.troubles)
        new: list[Span] = []
        running: list[Span] = []
        for source, excerpt in seen.timelines.items():
            self._cursors[source] = excerpt.cursor
            new += excerpt.spans
            running += excerpt.running
        self._running = tuple(sorted(running, key=lambda one: one.start_s))
        new.sort(key=lambda one: one.end_s)
        for span in new:
            self._keep(span)
        self.tallies.take(new)
        self._find_steps(new)
        for told in seen.router.get("figures", ()):
            if told["serial"] > self._last_serial:
                self._last_serial = told["serial"]
                self._figures.append(told)
                self._on_figures(told)

    def _keep(self, span: Span) -> None:
        self._spans.append(span)
        self._num_spans += 1
        if span.kind is Kind.EVENT or span.outcome in (Outcome.FAILED, Outcome.CANCELLED):
            if span.kind is not Kind.CALL:
                self._events.append(span)
            if span.engine_id and span.outcome is Outcome.FAILED:
                self._errors[span.engine_id] = span

    def _find_steps(self, new: list[Span]) -> None:
        """Steps that the new spans have made whole; what may belong to the next one is kept."""
        self._recent += [one for one in new if one.kind in (Kind.PHASE, Kind.ENGINE)]
        self._recent = self._recent[-_MAX_SPANS:]
        if not any(one.kind is Kind.PHASE and one.name == Command.CONTINUE for one in new):
            return
        found = steps(self._recent)
        for step in found:
            self._num_steps += 1
            self._steps.append((self._num_steps, step))
        if found:
            end_s = found[-1].end_s
            self._recent = [one for one in self._recent if one.start_s > end_s]
        self.tallies.take_steps(found)

    # -- what is known ----------------------------------------------------------------------

    @property
    def num_engines(self) -> int:
        return sum(len(group.engines) for group in self._last.status.groups) if self._last else 0

    @property
    def num_spans(self) -> int:
        """All that were ever gathered: the cursor for ``spans``."""
        return self._num_spans

    def snapshot(self) -> dict[str, Any]:
        """Where everything is now, ready for JSON."""
        now_s = self._clock()
        known: dict[str, Any] = {
            "now_s": round(now_s, 3),
            "is_answering": self._is_fresh(now_s),
            "answered_s": round(self._answered_s, 3),
            "trouble": self._trouble,
            "running": [one.to_dict() for one in self._running],
            "events": [one.to_dict() for one in self._events],
            "figures": list(self._figures)[-500:],
            "steps": [_step_dict(number, one) for number, one in self._steps][-100:],
        }
        if self._last is not None:
            known |= self._of_server(self._last.status, self._last.router)
        return known

    def _is_fresh(self, now_s: float) -> bool:
        """Whether the last answer is one: no older than two quiet rounds and one timed out."""
        return self._last is not None and now_s - self._answered_s < 2 * _QUIET_S + self._timeout_s

    def _of_server(self, status: ServerStatus, router: Mapping[str, Any]) -> dict[str, Any]:
        by_engine = {one["engine_id"]: one for one in router.get("engines", ())}
        doing = {one.engine_id: one for one in self._running if one.kind is Kind.ENGINE}
        calling = {one.engine_id: one for one in self._running if one.kind is Kind.CALL}
        return {
            "server": status.name,
            "phase": status.phase,
            "weight_version": status.weight_version,
            "router_url": status.router_url,
            "gate": {"state": status.gate, **router.get("gate", {})},
            "lock_owner": status.lock_owner,
            "router": {
                name: value for name, value in router.items() if isinstance(value, int | float)
            },
            "groups": [_group_dict(group) for group in status.groups],
            "engines": [
                self._engine_dict(group, engine, by_engine, doing, calling)
                for group in status.groups
                for engine in group.engines
            ],
            "store": _store_dict(status),
        }

    def _engine_dict(
        self,
        group: GroupStatus,
        engine: EngineStatus,
        routed: Mapping[str, Mapping[str, Any]],
        doing: Mapping[str, Span],
        calling: Mapping[str, Span],
    ) -> dict[str, Any]:
        in_router = routed.get(engine.engine_id, {})
        error = self._errors.get(engine.engine_id)
        said: dict[str, Any] = {
            "engine_id": engine.engine_id,
            "group": group.name,
            "state": engine.state,
            "weight_version": engine.weight_version,
            "url": engine.endpoint.url,
            "node_id": engine.node_id,
            "pid": engine.pid,
            "resident_bytes": engine.resident_bytes,
            "released": list(engine.released),
            "is_stale": engine.is_stale,
            "fenced_because": engine.fenced_because,
            "routing": in_router.get("state", ""),
            "because": in_router.get("because", ""),
            "num_in_flight": in_router.get("num_in_flight", 0),
            "num_failures": in_router.get("num_failures", 0),
            "doing": None,
            "calling": None,
            "last_error": None,
        }
        for name, spans in (("doing", doing), ("calling", calling)):
            if span := spans.get(engine.engine_id):
                said[name] = {
                    "name": span.name,
                    "start_s": round(span.start_s, 3),
                    "budget_s": span.budget_s,
                }
        if error is not None:
            said["last_error"] = {"name": error.name, "said": error.said, "at_s": error.end_s}
        return said

    def spans(self, since: int, kinds: frozenset[Kind]) -> list[Span]:
        """What was gathered after the first ``since`` spans, as far as it is kept."""
        num_new = min(max(0, self._num_spans - since), len(self._spans))
        new = list(self._spans)[len(self._spans) - num_new :]
        return [one for one in new if one.kind in kinds]

    def step(self, number: int) -> dict[str, Any] | None:
        """One step with all its spans; None if it is not known (any more)."""
        for known, step in self._steps:
            if known == number:
                inside = [
                    one.to_dict()
                    for one in self._spans
                    if step.start_s <= one.start_s <= step.end_s
                ]
                return _step_dict(number, step) | {"spans": inside}
        return None


def _group_dict(group: GroupStatus) -> dict[str, Any]:
    return {
        "name": group.name,
        "worker_type": group.worker_type.value,
        "phase": group.phase,
        "needs_offload": group.needs_offload,
    }


def _store_dict(status: ServerStatus) -> dict[str, Any] | None:
    """What the weight store holds, and how far it is behind; None where there is none."""
    store = status.store
    if store is None:
        return None
    return {
        "is_on": store.is_on,
        "because": store.because,
        "version": store.version,
        "is_writing": store.is_writing,
        "bytes": sum(store.node_bytes.values()),
        "write_s": store.write_s,
        "num_dropped": store.num_dropped,
        # Nothing has been pushed yet, or nothing kept: then it is as far behind as pushes went.
        "lag": max(0, status.weight_version - (store.version or 0)),
    }


def _step_dict(number: int, step: Step) -> dict[str, Any]:
    told = asdict(step)
    told["failures"] = [one.to_dict() for one in step.failures]
    if step.checking is not None:
        told["checking"] = step.checking.to_dict()
    return {"number": number, **told}
