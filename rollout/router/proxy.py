"""What all exchanges of one router share: gate, connections, deadlines, and how they ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rollout.router.client_side import ClientSide
from rollout.router.figures import Figures
from rollout.router.gate import Gate
from rollout.router.headers import Headers
from rollout.router.heads import KnownHeads, RequestHead
from rollout.router.keys import Keys
from rollout.router.message import Request, prompt_of, session_of
from rollout.router.metrics import Latencies
from rollout.router.pool import Pool
from rollout.router.recordings import Recordings
from rollout.router.settings import RouterSettings
from rollout.routing import Hint

SWEEP_S = 0.5


@dataclass(slots=True)
class Counts:
    """How requests ended that did not simply end.

    Attributes:
        num_cut: taken off an engine that its owner pushed as lost.
        num_broken_replies: begun and not completed.
        num_failovers: requests that went on elsewhere with what tokens they had.
        num_tokens_kept: carried over to another engine, which only prefills them.
        num_tokens_recomputed: had come, and were generated again.
    """

    num_retried: int = 0
    num_engine_failures: int = 0
    num_broken_replies: int = 0
    num_clients_left: int = 0
    num_cut: int = 0
    num_expired: int = 0
    num_failovers: int = 0
    num_tokens_kept: int = 0
    num_tokens_recomputed: int = 0


class Proxy:
    """The data path of one router."""

    def __init__(self, gate: Gate, pool: Pool, settings: RouterSettings) -> None:
        self.gate = gate
        self.pool = pool
        self.hold_timeout_s = settings.hold_timeout_s
        self.max_body_bytes = settings.max_body_bytes
        self.request_timeout_s = settings.request_timeout_s
        self.wants_hint = gate.policy.wants_session or gate.policy.wants_prompt
        self.token_failover = settings.token_failover
        self.failover_interval = settings.failover_interval
        self.max_failovers = settings.max_failovers
        self.keys = Keys(settings.client_key, settings.control_key)
        self.recordings = Recordings(
            max_bytes=settings.max_recorded_bytes,
            max_sessions=settings.max_sessions,
            ttl_s=settings.session_ttl_s,
        )
        self.latencies = Latencies()
        self.figures = Figures()
        self.counts = Counts()
        self.known_heads: KnownHeads[RequestHead] = KnownHeads()
        self.live: set[ClientSide] = set()
        self.now_s: Callable[[], float] = lambda: 0.0
        self.call_later: Callable[..., asyncio.TimerHandle]
        self._sweeping: asyncio.Task[None] | None = None

    def open(self) -> None:
        loop = asyncio.get_running_loop()
        self.now_s = loop.time
        self.call_later = loop.call_later
        self.pool.open()
        self._sweeping = loop.create_task(self._sweep(), name="router-sweep")

    def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        self.stop_live()
        self.pool.close()

    def stop_live(self) -> None:
        """End what still runs: refuse what has not begun to answer, cut the rest."""
        for exchange in list(self.live):
            exchange.stop()

    def hint_of(self, request: Request, headers: Headers) -> Hint:
        """What the policy wants to know of a request."""
        policy = self.gate.policy
        return Hint(
            session_of(request.body, headers) if policy.wants_session else "",
            prompt_of(request.body) if policy.wants_prompt else b"",
            self.now_s(),
        )

    def stats(self) -> dict[str, int]:
        return asdict(self.counts)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.pool.sweep()
            self.recordings.forget_old(self.now_s())
            since_s = self.now_s() - self.request_timeout_s
            for exchange in [one for one in self.live if one.began_s < since_s]:
                exchange.expire(self.request_timeout_s)
