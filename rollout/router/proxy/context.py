"""What all exchanges of one router share: gate, connections, deadlines and counts."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

from engines.process.background import Then, keep_task
from engines.protocol.old_state import namespace
from rollout.config import RouterConfig
from rollout.config.base import is_loopback
from rollout.router.continuation.core import Decode
from rollout.router.gate.gate import Gate
from rollout.router.http.auth import BearerKeys
from rollout.router.http.engine_pool import EnginePool
from rollout.router.http.head_cache import HeadCache, RequestHead
from rollout.router.http.incoming_body import IncomingBodies
from rollout.router.http.reading_process import ReadingProcess
from rollout.router.http.request import Request, affinity_in, prompt_of
from rollout.router.proxy.figures import Latencies, StepMetrics
from rollout.rules.routing import NO_HINT, Hint

logger = logging.getLogger(__name__)

SWEEP_S = 0.5
_MAX_RECEIVING_BYTES = 1 << 30
_MANY_OBJECTS = 10_000
_LONG_S = 3600.0
_MANY_VERSIONS = 64


def log_router_error(where: str, error: BaseException) -> None:
    """Log an error of the router's own, with its traceback."""
    logger.error("router error in %s", where, exc_info=error)


@dataclass(slots=True)
class Counts:
    """Counts of requests that did not simply succeed.

    Attributes:
        num_cut: evicted from an engine that a newer membership took away.
        num_unusable_replies: replies whose tokens could not be read; their requests ended.
        num_broken_replies: responses that were begun and not completed.
        num_failovers: requests that continued on another engine with their tokens.
        num_contracts_refused: why no tokens could fulfil a contract -> how often.
        num_failovers_refused: why tokens of a lost engine could not be kept -> how often.
        num_tokens_kept: carried over to another engine, which only prefills them.
        num_tokens_recomputed: generated a second time.
    """

    num_retried: int = 0
    num_engine_failures: int = 0
    num_unusable_replies: int = 0
    num_broken_replies: int = 0
    num_clients_left: int = 0
    num_cut: int = 0
    num_expired: int = 0
    num_failovers: int = 0
    num_contracts_refused: dict[str, int] = field(default_factory=dict)
    num_failovers_refused: dict[str, int] = field(default_factory=dict)
    num_tokens_kept: int = 0
    num_tokens_recomputed: int = 0

    def refuse_contract(self, why: str) -> None:
        """Count a request that ended because its contract could not be fulfilled."""
        self.num_contracts_refused[why] = self.num_contracts_refused.get(why, 0) + 1

    def refuse_failover(self, why: str) -> None:
        """Count a lost engine whose tokens could not be kept."""
        self.num_failovers_refused[why] = self.num_failovers_refused.get(why, 0) + 1


class LiveRequest(Protocol):
    """A request that has begun and not ended."""

    began_s: float

    def expire(self, after_s: float) -> None:
        """The request has taken too long."""
        ...

    def stop(self) -> None:
        """The router stops now."""
        ...


class Proxy:
    """The data path of one router.

    Args:
        run: of its run alone; a part of the names of cached prefixes.
        max_clients: connections of clients.

    Attributes:
        is_loopback_only: only this machine can reach the router.
        bodies: of requests that have not arrived completely.
        reading: where what is long is read.
        decode: text of token ids, as soon as the tokenizer is loaded, or None where it cannot be.
        reads_tokens: set by the first reply that is read as tokens, which needs ``decode``.
    """

    def __init__(
        self,
        gate: Gate,
        pool: EnginePool,
        config: RouterConfig,
        run: str,
        max_clients: int = sys.maxsize,
    ) -> None:
        # What names the prefixes that weights of a version computed in this run.
        self.namespace: Callable[[int | None], str] = lru_cache(_MANY_VERSIONS)(
            partial(namespace, run)
        )
        self.max_clients = max_clients
        self.is_loopback_only = is_loopback(config.host)
        self.gate = gate
        self.pool = pool
        self.config = config
        self.wants_hint = gate.policy.wants_affinity or gate.policy.wants_prompt
        self.keys = BearerKeys(config.client_key, config.control_key)
        self.latencies = Latencies()
        self.step_metrics = StepMetrics()
        self.counts = Counts()
        self.head_cache: HeadCache[RequestHead] = HeadCache()
        self.live: set[LiveRequest] = set()
        self.bodies = IncomingBodies(max(_MAX_RECEIVING_BYTES, 4 * config.max_body_bytes))
        self.decode: Decode | None = None
        self.reading = ReadingProcess()
        self.reads_tokens = asyncio.Event()
        self.now_s: Callable[[], float] = lambda: 0.0
        self.call_later: Callable[..., asyncio.TimerHandle]
        self._sweeping: asyncio.Task[None] | None = None
        self._collected_s = 0.0

    def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.now_s = loop.time
        self._collected_s = loop.time()
        self.call_later = loop.call_later
        self.gate.call_soon = loop.call_soon
        self.pool.open()
        self._sweeping = keep_task(self._sweep, "router-sweep", Then.STARTS_AGAIN)

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        self.stop_live()
        self.pool.close()
        self.reading.close()

    def stop_live(self) -> None:
        """End all live requests: refuse those without a response so far, cut the rest."""
        for exchange in list(self.live):
            exchange.stop()

    def hint_of(self, request: Request) -> Hint:
        """The affinity and prompt of a request, as far as the policy uses them.

        The header goes before the body.
        """
        policy, body, affinity = self.gate.policy, request.body, ""
        if policy.wants_affinity:
            in_head = request.head.affinity
            affinity = affinity_in(request) if in_head is None else in_head
        prompt = prompt_of(body) if policy.wants_prompt else b""
        if not (affinity or prompt):
            return NO_HINT
        return Hint(affinity, prompt, self.now_s(), len(body))

    def stats(self) -> dict[str, Any]:
        return asdict(self.counts)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for sweep in (
                self._expire,
                self._expire_bodies,
                self.pool.sweep,
                self._collect,
            ):
                try:
                    sweep()
                except Exception as error:
                    log_router_error(sweep.__qualname__, error)

    def _expire(self) -> None:
        since_s = self.now_s() - self.config.request_timeout_s
        for live in [live for live in self.live if live.began_s < since_s]:
            live.expire(self.config.request_timeout_s)

    def _expire_bodies(self) -> None:
        self.bodies.expire(self.now_s())

    def _collect(self) -> None:
        """Collect what is young while no request waits for it, and all of it after a long time.

        Requests leave no garbage, so it comes from what is rare.  What lives long would cost as
        much each time.
        """
        if gc.isenabled() or gc.get_count()[0] < _MANY_OBJECTS:
            return
        if self.now_s() > self._collected_s + _LONG_S:
            gc.collect()
            self._collected_s = self.now_s()
        elif not self.live:
            gc.collect(1)
