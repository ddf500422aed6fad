"""Collects a snapshot of a server: status, timelines and router, also while a command runs.

Always true: it calls no engine.  A part that does not reply in time is left out, and named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from engines.protocol.plain_text import describe
from rollout.control.group.server_group import ServerGroup
from rollout.control.server.router_client import RouterClient
from rollout.core.types import ServerStatus
from rollout.observability.server_snapshot import ServerSnapshot
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import START, Cursor, Excerpt

T = TypeVar("T")

_TIMEOUT_S = 5.0


async def take_snapshot(
    status: Awaitable[ServerStatus],
    timeline: Timeline,
    groups: Mapping[str, ServerGroup],
    router: RouterClient,
    cursors: Mapping[str, Cursor],
) -> ServerSnapshot:
    """A snapshot of a server; its timelines begin at ``cursors``, by source."""
    troubles: list[str] = []
    name = timeline.source
    current, router_stats, *excerpts = await asyncio.gather(
        status,
        _unless_late("router", router.stats, troubles),
        *(
            _unless_late(
                f"group {group}",
                partial(api.recorded, cursors.get(f"{name}/{group}", START)),
                troubles,
            )
            for group, api in groups.items()
        ),
    )
    timelines = {
        f"{name}/{group}": excerpt
        for group, excerpt in zip(groups, excerpts, strict=True)
        if isinstance(excerpt, Excerpt)
    }
    timelines[name] = timeline.since(cursors.get(name, START))
    return ServerSnapshot(current, timelines, router_stats or {}, tuple(troubles))


async def _unless_late(
    part: str, call: Callable[[], Awaitable[T]], troubles: list[str]
) -> T | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await call()  # not earlier: this may be cancelled before it begins
    except Exception as error:  # the other parts are still useful
        troubles.append(f"{part} does not answer: {describe(error)}")
        return None
