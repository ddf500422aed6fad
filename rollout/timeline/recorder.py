"""Spans as they happen, kept in memory and in a file.

Always true:
- a span that was begun ends, also when what it covers raises or is cancelled;
- what is kept in memory is bounded; who asks for what came since a cursor gets what is left of it;
- recording never waits: text is made and written by a thread of its own, whose trouble is logged
  once and reaches nobody.

Within ``Timeline.span``, fan-outs and HTTP calls of the same task, and of tasks it starts, record
themselves: nothing is passed along.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

from engines.observe import WATCHER, WatchedCall
from rollout.timeline.span import Excerpt, Kind, Outcome, Span

CAPACITY = 16384


class Sink(Protocol):
    """Where finished spans go besides memory."""

    def put(self, span: Span) -> None:
        """Take one; returns at once."""
        ...

    def close(self) -> None:
        """Everything taken is where it belongs when this returns."""
        ...


class Timeline:
    """What one server, or one group, records.

    Args:
        source: its name in every span.
        clock: Unix seconds, that never go back.
    """

    def __init__(
        self,
        source: str,
        *,
        sinks: Sequence[Sink] = (),
        capacity: int = CAPACITY,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.source = source
        self._sinks = tuple(sinks)
        self._clock = clock or _SteadyClock()
        self._ids = itertools.count(1)
        self._ended: deque[Span] = deque(maxlen=capacity)
        self._num_ended = 0
        self._running: dict[int, Span] = {}

    @contextmanager
    def span(
        self, kind: Kind, name: str, *, engine_id: str = "", budget_s: float = 0.0
    ) -> Iterator[Span]:
        """Covers what is in the block, and makes what it calls record itself here."""
        above = WATCHER.get()
        span = Span(
            kind,
            name,
            self.source,
            self._clock(),
            engine_id=engine_id,
            span_id=next(self._ids),
            parent=above.span.span_id if isinstance(above, _Within) and above.of is self else 0,
            budget_s=budget_s,
        )
        self._running[span.span_id] = span
        token = WATCHER.set(_Within(self, span))
        try:
            yield span
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            WATCHER.reset(token)
            self._end(span)

    def event(self, name: str, said: str = "", *, engine_id: str = "") -> None:
        """Something happened, at this moment."""
        span = Span(
            Kind.EVENT,
            name,
            self.source,
            self._clock(),
            engine_id=engine_id,
            span_id=next(self._ids),
            said=said,
        )
        self._running[span.span_id] = span
        self._end(span)

    def since(self, cursor: int = 0) -> Excerpt:
        """What has ended since ``cursor`` was given out, as far as it is kept, and what runs."""
        num_new = min(self._num_ended - cursor, len(self._ended))
        new = itertools.islice(self._ended, len(self._ended) - num_new, None)
        now_s = self._clock()
        running = (replace(one, elapsed_s=now_s - one.start_s) for one in self._running.values())
        return Excerpt(self._num_ended, tuple(new), tuple(running))

    async def aclose(self) -> None:
        """Write what is left."""
        for sink in self._sinks:
            await asyncio.to_thread(sink.close)

    def _end(self, span: Span) -> None:
        span.elapsed_s = self._clock() - span.start_s if span.kind is not Kind.EVENT else 0.0
        if span.outcome is Outcome.RUNNING:
            span.outcome = Outcome.OK
        del self._running[span.span_id]
        self._ended.append(span)
        self._num_ended += 1
        for sink in self._sinks:
            sink.put(span)


class _Within:
    """A span that is open in this task; ``engines.observe.Watcher``."""

    def __init__(self, of: Timeline, span: Span) -> None:
        self.of = of
        self.span = span

    @contextmanager
    def watch_call(self, engine: str, operation: str, budget_s: float) -> Iterator[WatchedCall]:
        engine_id = self.span.engine_id or engine
        with self.of.span(Kind.CALL, operation, engine_id=engine_id, budget_s=budget_s) as call:
            try:
                yield call
            finally:
                self.span.num_bytes += call.num_bytes


def engine_span(engine_id: str, name: str, budget_s: float) -> AbstractContextManager[Span | None]:
    """One engine's part in what this task records; None if it records nothing."""
    above = WATCHER.get()
    if not isinstance(above, _Within):
        return nullcontext()
    return above.of.span(Kind.ENGINE, name, engine_id=engine_id, budget_s=budget_s)


def current() -> Span | None:
    """The span this task is in, to say more of it."""
    above = WATCHER.get()
    return above.span if isinstance(above, _Within) else None


def happened(name: str, said: str = "", *, engine_id: str = "") -> None:
    """An event on the timeline of this task, if it has one."""
    above = WATCHER.get()
    if isinstance(above, _Within):
        above.of.event(name, said, engine_id=engine_id)


def fail(span: Span, error: BaseException) -> None:
    """It ended with this error."""
    is_cancelled = isinstance(error, asyncio.CancelledError)
    span.outcome = Outcome.CANCELLED if is_cancelled else Outcome.FAILED
    span.said = str(error) or type(error).__name__


class _SteadyClock:
    """Unix seconds that never go back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()
