"""The timeline of a server or group: spans are recorded in memory and passed to sinks.

Always true:
- a span that has begun ends, also when its block raises or is cancelled;
- memory is bounded: the oldest spans are dropped, and ``Timeline.since`` returns those that remain;
- a cursor of another timeline, as that of a lost group, skips no span of this one;
- recording never waits: a separate thread encodes and writes, and its errors are only logged.

Inside a ``Timeline.span`` block, fan-outs and HTTP calls of the same task, and of the tasks it
starts, record themselves through a context variable; no timeline is passed to them.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from engines.http.call_watcher import WATCHER
from engines.http.trace_context import traceparent_of_call
from engines.protocol.plain_text import shortened
from rollout.observability.timeline.sink import SpanSink
from rollout.observability.timeline.span import START, Cursor, Excerpt, Kind, Outcome, Span

CAPACITY = 16384
_SAID_CHARACTERS = 4000


class Timeline:
    """The recorded spans of one server or one group.

    Args:
        source: name of the server or group, written into every span.
        capacity: number of finished spans that are kept in memory.
        clock: Unix seconds that never decrease.
    """

    def __init__(
        self,
        source: str,
        *,
        sinks: Sequence[SpanSink] = (),
        capacity: int = CAPACITY,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.source = source
        self._sinks = tuple(sinks)
        self._clock = clock or _steady_clock()
        self._ids = itertools.count(1)
        self._ended: deque[Span] = deque(maxlen=capacity)
        self._name = secrets.token_hex(8)
        self._num_ended = 0
        self._running: dict[int, Span] = {}

    @contextmanager
    def span(
        self, kind: Kind, name: str, *, engine_id: str = "", budget_s: float = 0.0
    ) -> Iterator[Span]:
        """Record the block as a span; spans that begin inside it become its children."""
        span = self._begin(kind, name, engine_id)
        span.budget_s = budget_s
        outer = WATCHER.get()
        if isinstance(outer, _SpanWatcher) and outer.timeline is self:
            span.parent = outer.span.span_id
            span.traceparent = ""
        token = WATCHER.set(_SpanWatcher(self, span))
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            WATCHER.reset(token)
            self._end(span)

    def event(self, name: str, message: str = "", *, engine_id: str = "") -> None:
        """Record an event at the current time."""
        span = self._begin(Kind.EVENT, name, engine_id)
        span.said = shortened(message, _SAID_CHARACTERS)
        self._end(span)

    def add(self, spans: Iterable[Span]) -> None:
        """Record finished spans that another process has measured."""
        for span in spans:
            span = replace(span, source=self.source, span_id=next(self._ids), parent=0)
            self._keep(span)

    def since(self, cursor: Cursor = START) -> Excerpt:
        """The kept spans that ended after ``cursor`` was returned, and the running ones."""
        num_known = cursor.num_ended if cursor.timeline == self._name else 0
        num_new = min(self._num_ended - num_known, len(self._ended))
        new = itertools.islice(self._ended, len(self._ended) - num_new, None)
        now_s = self._clock()
        running = (replace(span, elapsed_s=now_s - span.start_s) for span in self._running.values())
        return Excerpt(Cursor(self._name, self._num_ended), tuple(new), tuple(running))

    async def aclose(self) -> None:
        """Close the sinks; queued spans are written first."""
        for sink in self._sinks:
            await asyncio.to_thread(sink.close)

    def _begin(self, kind: Kind, name: str, engine_id: str) -> Span:
        span_id = next(self._ids)
        span = Span(kind, name, self.source, self._clock(), engine_id=engine_id, span_id=span_id)
        span.traceparent = traceparent_of_call()
        self._running[span_id] = span
        return span

    def _end(self, span: Span) -> None:
        span.elapsed_s = self._clock() - span.start_s if span.kind is not Kind.EVENT else 0.0
        if span.outcome is Outcome.RUNNING:
            span.outcome = Outcome.OK
        del self._running[span.span_id]
        self._keep(span)

    def _keep(self, span: Span) -> None:
        self._ended.append(span)
        self._num_ended += 1
        for sink in self._sinks:
            sink.put(span)


class _SpanWatcher:
    """The open span of a task; an ``engines.http.call_watcher.Watcher``."""

    def __init__(self, timeline: Timeline, span: Span) -> None:
        self.timeline = timeline
        self.span = span

    def watch_engine(
        self, engine_id: str, operation: str, budget_s: float
    ) -> AbstractContextManager[Span]:
        return self.timeline.span(Kind.ENGINE, operation, engine_id=engine_id, budget_s=budget_s)

    @contextmanager
    def watch_call(
        self, engine: str, operation: str, budget_s: float, num_bytes: int
    ) -> Iterator[None]:
        engine_id = self.span.engine_id or engine
        with self.timeline.span(
            Kind.CALL, operation, engine_id=engine_id, budget_s=budget_s
        ) as call:
            call.num_bytes = num_bytes
            self.span.num_bytes += num_bytes
            yield


def engine_span(engine_id: str, name: str, budget_s: float) -> AbstractContextManager[Span | None]:
    """A span for one engine under the span of this task, or None if the task has no span."""
    outer = WATCHER.get()
    if not isinstance(outer, _SpanWatcher):
        return nullcontext()
    return outer.watch_engine(engine_id, name, budget_s)


def current_span() -> Span | None:
    """The open span of this task, so that the caller can add values to it."""
    outer = WATCHER.get()
    return outer.span if isinstance(outer, _SpanWatcher) else None


def record_event(name: str, message: str = "", *, engine_id: str = "") -> None:
    """Record an event on the timeline of this task, if it has one."""
    outer = WATCHER.get()
    if isinstance(outer, _SpanWatcher):
        outer.timeline.event(name, message, engine_id=engine_id)


def fail(span: Span, error: BaseException) -> None:
    """Mark a span as failed, or as cancelled, with the text of its error."""
    is_cancelled = isinstance(error, asyncio.CancelledError)
    span.outcome = Outcome.CANCELLED if is_cancelled else Outcome.FAILED
    span.said = shortened(str(error) or type(error).__name__, _SAID_CHARACTERS)


def _steady_clock() -> Callable[[], float]:
    """A clock of Unix seconds that never decrease."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()
