"""Looking into a server: one answer with all there is to see, also while a command runs.

Always true: it asks no engine anything; a part that does not answer in time is left out, and named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from rollout.fanout import describe
from rollout.observation import Observation
from rollout.ports import GroupPort, RouterPort
from rollout.timeline.recorder import Timeline
from rollout.timeline.span import Excerpt
from rollout.types import ServerStatus

T = TypeVar("T")

_TIMEOUT_S = 5.0


class Window:
    """What a server shows of itself, its groups and its router."""

    def __init__(
        self,
        status: Callable[[], Awaitable[ServerStatus]],
        timeline: Timeline,
        groups: Mapping[str, GroupPort],
        router: RouterPort,
    ) -> None:
        self._status = status
        self._timeline = timeline
        self._groups = groups
        self._router = router

    async def observe(self, cursors: Mapping[str, int]) -> Observation:
        """Everything; of the timelines only what is new since ``cursors``, by source."""
        troubles: list[str] = []
        name = self._timeline.source
        status, router, *excerpts = await asyncio.gather(
            self._status(),
            self._stats(troubles),
            *(
                _unless_late(
                    f"group {group}", port.recorded(cursors.get(f"{name}/{group}", 0)), troubles
                )
                for group, port in self._groups.items()
            ),
        )
        timelines = {
            f"{name}/{group}": excerpt
            for group, excerpt in zip(self._groups, excerpts, strict=True)
            if isinstance(excerpt, Excerpt)
        }
        timelines[name] = self._timeline.since(cursors.get(name, 0))
        return Observation(status, timelines, router, tuple(troubles))

    async def _stats(self, troubles: list[str]) -> dict[str, Any]:
        return await _unless_late("router", self._router.stats(), troubles) or {}


async def _unless_late(who: str, asked: Awaitable[T], troubles: list[str]) -> T | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await asked
    except Exception as error:  # what the others say is still worth having
        troubles.append(f"{who} does not answer: {describe(error)}")
        return None
