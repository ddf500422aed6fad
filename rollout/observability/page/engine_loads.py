"""The queue and the tokens per second of each engine, requested from the engines.

Always true: only serving engines are requested, each with a deadline and at most once in ``MIN_S``;
one that does not answer has no figures.  Many engines are requested less often, so that the page
takes no more than about 2 % of one thread for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import aiohttp

from engines.kinds import kind_of
from engines.plain_json import WRONG_FORM
from engines.process.background import Then, keep_task
from engines.protocol import Loads
from engines.protocol.kind import Kind
from rollout.core.types import ServerStatus
from rollout.observability.page.outgoing_http import get, outgoing_session
from rollout.rules.lifecycle import Phase

logger = logging.getLogger(__name__)

MIN_S = 2.0
_TIMEOUT_S = 2.0
_AT_ONCE = 16
_MAX_BYTES = 4 << 20
# Of one request and its reply, times 50: for 2 % of a thread.
_PAUSE_PER_ENGINE_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """An engine that can be requested."""

    engine_id: str
    url: str
    kind: Kind
    key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine reported last.

    Attributes:
        num_waiting: requests in its queue.
        tokens_per_s: generated since the report before, or None if that is not known.
    """

    num_waiting: int
    tokens_per_s: float | None


class EngineLoads:
    """Requests the loads of engines in the background, and keeps the last of each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[str, EngineLoad] = {}
        # Of each engine with a counter of tokens: its URL, when, and the count.
        self._counts: dict[str, tuple[str, float, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._next_s = 0.0

    def get(self, engine_id: str) -> EngineLoad | None:
        """The last load of an engine, or None if it is not known now."""
        return self._loads.get(engine_id)

    def request_soon(self, targets: Iterable[LoadTarget]) -> None:
        """Request all targets in the background, unless it is too soon or the last time runs."""
        if self._clock() < self._next_s or (self._task is not None and not self._task.done()):
            return
        self._task = keep_task(partial(self.request, list(targets)), "page-loads", Then.IS_OVER)

    async def aclose(self) -> None:
        """End what runs in the background."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def request(self, targets: list[LoadTarget]) -> None:
        """Request all targets, and forget all other engines."""
        self._next_s = self._clock() + max(MIN_S, _PAUSE_PER_ENGINE_S * len(targets))
        limit = asyncio.Semaphore(_AT_ONCE)
        async with outgoing_session(_TIMEOUT_S) as session:

            async def fetch(target: LoadTarget) -> EngineLoad | None:
                url = target.url + target.kind.loads_path
                try:
                    async with limit:
                        raw = await get(session, url, key=target.key, max_bytes=_MAX_BYTES)
                    reply = target.kind.read_loads(raw)
                except (aiohttp.ClientError, OSError, TimeoutError, *WRONG_FORM) as error:
                    logger.debug("engine %s: no load: %s", target.engine_id, error)
                    return None
                return EngineLoad(reply.num_waiting_reqs, self._rate(target, reply))

            loads = await asyncio.gather(*map(fetch, targets))
        ids = [target.engine_id for target in targets]
        self._loads = {name: load for name, load in zip(ids, loads, strict=True) if load}
        self._counts = {name: self._counts[name] for name in ids if name in self._counts}

    def _rate(self, target: LoadTarget, reply: Loads) -> float | None:
        """Tokens per second: of the engine's counter if it has one, else as it reports."""
        if reply.num_output_tokens is None:
            return reply.tokens_per_s
        at_s, count = self._clock(), reply.num_output_tokens
        url, before_s, before = self._counts.get(target.engine_id, ("", 0.0, 0))
        self._counts[target.engine_id] = (target.url, at_s, count)
        # A restarted engine counts from 0.
        if url != target.url or count < before or at_s <= before_s:
            return None
        return (count - before) / (at_s - before_s)


def load_targets(status: ServerStatus) -> list[LoadTarget]:
    """The engines of a server that serve."""
    return [
        LoadTarget(
            engine.engine_id, engine.endpoint.url, kind_of(group.kind), engine.access.sampling
        )
        for group in status.groups
        for engine in group.engines
        if engine.state == Phase.SERVING
    ]
