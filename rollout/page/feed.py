"""What has changed, for everybody who watches: one gathering, however many look.

Always true: a new watcher first gets everything; after that each gets every change, or, if it
reads too slowly, is let go and comes again.  Looking costs the server at most a few hundredths of
its time, and almost nothing while nobody looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from rollout.page.observatory import Observatory
from rollout.timeline.span import Kind

IDLE_S = 10.0
_SOON_S = 1.0
_COST = 50
_MAX_BEHIND = 20
_DRAWN = frozenset({Kind.PHASE, Kind.ENGINE, Kind.EVENT})
_MAX_FIRST_SPANS = 20_000
# Lists that only grow: a change tells what is new in them.
_GROWING = ("events", "figures", "steps")

Change = tuple[str, Any]


class Feed:
    """Gathers on a timer while it runs, and tells who has subscribed."""

    def __init__(self, observatory: Observatory) -> None:
        self._observatory = observatory
        self._watchers: set[asyncio.Queue[Change | None]] = set()
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._told: dict[str, Any] = {}
        self._cursor = 0

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="page-feed")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def let_go(self) -> None:
        """Nobody is told anything more."""
        for watcher in self._watchers:
            watcher.put_nowait(None)

    @asynccontextmanager
    async def subscribed(self) -> AsyncIterator[AsyncIterator[Change]]:
        """What happens from now on, after all that is known now."""
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        await self._observatory.refresh(_SOON_S)
        self._tell_changes()
        spans = self._observatory.spans(0, _DRAWN)[-_MAX_FIRST_SPANS:]
        queue.put_nowait(("state", self._told))
        queue.put_nowait(("spans", [one.to_dict() for one in spans]))
        self._watchers.add(queue)
        self._wanted.set()
        try:
            yield self._drain(queue)
        finally:
            self._watchers.discard(queue)

    @staticmethod
    async def _drain(queue: asyncio.Queue[Change | None]) -> AsyncIterator[Change]:
        while (change := await queue.get()) is not None:
            yield change

    async def _run(self) -> None:
        while True:
            # Of this thread, which only the page is on: waiting for a busy server costs it nothing,
            # and it is then that people look.
            began_s = time.thread_time()
            await self._observatory.refresh()
            self._tell_changes()
            took_s = time.thread_time() - began_s
            self._wanted.clear()
            pause_s = max(_SOON_S, _COST * took_s) if self._watchers else IDLE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), min(pause_s, IDLE_S))

    def _tell_changes(self) -> None:
        now = self._observatory.snapshot()
        before, self._told = self._told, now
        spans = self._observatory.spans(self._cursor, _DRAWN)
        self._cursor = self._observatory.num_spans
        if not self._watchers:
            return
        self._tell("change", difference(before, now))
        if spans:
            self._tell("spans", [one.to_dict() for one in spans])

    def _tell(self, name: str, told: Any) -> None:
        for watcher in list(self._watchers):
            if watcher.qsize() >= _MAX_BEHIND:
                self._watchers.discard(watcher)
                watcher.put_nowait(None)
            else:
                watcher.put_nowait((name, told))


def difference(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What of ``now`` differs: single values, engines that changed, the new ends of lists."""
    told = {
        name: value
        for name, value in now.items()
        if name not in (*_GROWING, "engines") and before.get(name) != value
    }
    known = {one["engine_id"]: one for one in before.get("engines", ())}
    engines = now.get("engines", [])
    told["engines"] = [one for one in engines if known.get(one["engine_id"]) != one]
    if set(known) - {one["engine_id"] for one in engines}:
        told["engine_ids"] = [one["engine_id"] for one in engines]
    for name in _GROWING:
        told[name] = _new_end(before.get(name, []), now.get(name, []))
    return told


def _new_end(before: list[Any], now: list[Any]) -> list[Any]:
    if not before:
        return now
    last = before[-1]
    for index in range(len(now) - 1, -1, -1):
        if now[index] == last:
            return now[index + 1 :]
    return now
