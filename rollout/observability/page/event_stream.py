"""The stream of state changes, computed once for all clients of the page.

Always true: a new client first gets the whole state, then every change.  A client that reads too
slowly is disconnected and connects again.  Refreshing takes at most about 2 % of one thread while
clients are connected, and almost nothing otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from engines.process.background import Then, keep_task
from rollout.observability.page.state_cache import IDLE_S, StateCache
from rollout.observability.timeline.span import START, Kind

_SOON_S = 1.0
_COST = 50
_MAX_BEHIND = 20
# The spans that the page draws as lanes.
DRAWN_KINDS = frozenset({Kind.PHASE, Kind.ENGINE, Kind.RANK, Kind.EVENT})
_MAX_FIRST_SPANS = 20_000
# Lists that only grow: a change contains only their new entries.
_GROWING = ("events", "gate_events", "figures", "samples", "steps", "pushes")

Change = tuple[str, Any]


class EventStream:
    """Refreshes the state on a timer, and sends its changes to all subscribers."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        self._subscribers: set[asyncio.Queue[Change | None]] = set()
        self._has_subscriber = asyncio.Event()
        self._state: dict[str, Any] = {}
        self._cursor = START

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Refresh the state during the block."""
        task = keep_task(self._run, "page-feed", Then.STARTS_AGAIN)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self._cache.aclose()

    def disconnect_all(self) -> None:
        """End the stream of every subscriber."""
        for subscriber in self._subscribers:
            subscriber.put_nowait(None)

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[Change]]:
        """The whole state, and then the changes."""
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        await self._cache.refresh(_SOON_S)
        self._publish_changes()
        spans = self._cache.history.spans_since(START, DRAWN_KINDS)[-_MAX_FIRST_SPANS:]
        queue.put_nowait(("state", self._state))
        queue.put_nowait(("spans", [span.to_dict() for span in spans]))
        self._subscribers.add(queue)
        self._has_subscriber.set()
        try:
            yield self._drain(queue)
        finally:
            self._subscribers.discard(queue)

    @staticmethod
    async def _drain(queue: asyncio.Queue[Change | None]) -> AsyncIterator[Change]:
        while (change := await queue.get()) is not None:
            yield change

    async def _run(self) -> None:
        while True:
            # CPU time of this thread, which only runs the page: waiting for a busy server does not
            # count, and that is when users watch.
            began_s = time.thread_time()
            await self._cache.refresh()
            self._publish_changes()
            if self._subscribers:
                self._cache.request_loads()
            took_s = time.thread_time() - began_s
            self._has_subscriber.clear()
            pause_s = max(_SOON_S, _COST * took_s) if self._subscribers else IDLE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_subscriber.wait(), min(pause_s, IDLE_S))

    def _publish_changes(self) -> None:
        now = self._cache.snapshot()
        before, self._state = self._state, now
        spans = self._cache.history.spans_since(self._cursor, DRAWN_KINDS)
        self._cursor = self._cache.history.cursor
        if not self._subscribers:
            return
        self._publish("change", difference(before, now))
        if spans:
            self._publish("spans", [span.to_dict() for span in spans])

    def _publish(self, name: str, values: Any) -> None:
        for subscriber in list(self._subscribers):
            if subscriber.qsize() >= _MAX_BEHIND:
                self._subscribers.discard(subscriber)
                subscriber.put_nowait(None)
            else:
                subscriber.put_nowait((name, values))


def difference(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The changes: single values, engines that changed, the new entries of growing lists."""
    changes = {
        name: value
        for name, value in now.items()
        if name not in (*_GROWING, "engines") and before.get(name) != value
    }
    known = {engine["engine_id"]: engine for engine in before.get("engines", ())}
    engines = now.get("engines", [])
    ids = [engine["engine_id"] for engine in engines]
    changes["engines"] = [engine for engine in engines if known.get(engine["engine_id"]) != engine]
    if set(known) - set(ids):
        changes["engine_ids"] = ids
    for name in _GROWING:
        changes[name] = _new_entries(before.get(name, []), now.get(name, []))
    return changes


def _new_entries(before: list[Any], now: list[Any]) -> list[Any]:
    for index in reversed(range(len(now))):
        if before and now[index] == before[-1]:
            return now[index + 1 :]
    return now
