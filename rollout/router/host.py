"""The router in a thread of its own.

Always true: gate and proxy are touched only by the router's event loop.  The methods here may be
awaited on any loop; each returns when the router has carried it out, so after
``set_gate("holding")`` no request is admitted any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import uvloop

from engines.http.uvicorn_server import HttpServer, traffic_config
from engines.process.process_identity import identify
from engines.protocol import Endpoint
from rollout.config import RouterConfig
from rollout.core.errors import ActorLost, PhaseTimeout, RolloutError
from rollout.core.http_thread import HttpThread
from rollout.router.gate.gate import ConnectionFailure, Gate, GateState
from rollout.router.http.engine_pool import EnginePool, check_file_descriptors
from rollout.router.pins import LINGERS_S
from rollout.router.proxy.client_connection import ClientConnection
from rollout.router.proxy.context import Proxy
from rollout.rules.load_balancing import make_policy
from rollout.rules.routing import Backend, RoutingPolicy

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STOP_GRACE_S = 5.0
_AFFINITY_TTL_S = 3600.0
_MAX_AFFINITIES = 100_000


def new_run() -> str:
    """A name that no other run has; stores of cached prefixes outlive runs, and their names."""
    return secrets.token_hex(8)


class RouterHost:
    """Starts, steers and stops one router.

    Attributes:
        why_not_serving: it does not serve so far, and its methods raise ``ActorLost``.

    Args:
        policy: chooses engines, instead of the policy that ``config`` names.
        on_engine_failure: called on the event loop that awaited ``start``, for every request
            that lost its engine.
        run: names the prefixes that engines cache for it; the same for a router that is started
            again, and for no other.  Default: one of its own.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        policy: RoutingPolicy | None = None,
        on_engine_failure: Callable[[ConnectionFailure], None] | None = None,
        run: str = "",
    ) -> None:
        self._config = config
        self._on_engine_failure = on_engine_failure
        self._waits = _Waits()
        self._gate = Gate(
            max_held=config.max_held_requests,
            policy=policy
            or make_policy(
                config.policy,
                affinity_ttl_s=_AFFINITY_TTL_S,
                max_affinities=_MAX_AFFINITIES,
            ),
            on_failure=self._note_failure,
            on_idle=self._waits.wake,
        )
        connections = check_file_descriptors(
            config.max_connections,
            is_default="max_connections" not in config.model_fields_set,
        )
        pool = EnginePool(
            connect_timeout_s=config.connect_timeout_s,
            max_connections=connections.engines,
        )
        self._proxy = Proxy(
            self._gate,
            pool,
            config,
            run or new_run(),
            connections.clients,
        )
        self._failed: dict[str, str] = {}
        self._has_failed = asyncio.Event()
        self._owner: asyncio.AbstractEventLoop | None = None
        self._thread = HttpThread("router", loop_factory=uvloop.new_event_loop)
        self._lacks_pins = False
        self.why_not_serving = ""

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> Endpoint:
        """Bind, serve, and return where.  The gate is closed and there are no engines yet.

        Raises:
            ConfigError: host and port cannot be bound.
            RolloutError: it could not start, or was started before.
        """
        self._owner = asyncio.get_running_loop()
        endpoint = await self._thread.start(self._config.host, self._config.port, self._make_server)
        logger.info("router listens on %s", endpoint.url)
        return endpoint

    async def stop(self, budget_s: float) -> None:
        """Refuse what is new, let finish what is in flight up to the budget, cut the rest.

        Raises:
            PhaseTimeout: the router's thread did not end.
        """
        if not self._thread.is_running:
            return
        timeout_s = budget_s + _STOP_GRACE_S
        try:
            with suppress(RolloutError):  # another stop was quicker
                await self._thread.call(self._close(budget_s))
            # What is spliced ends at the budget; the second more is for the control application.
            await self._thread.stop(budget_s + 1.0, timeout_s=timeout_s)
        except TimeoutError:
            raise PhaseTimeout(
                f"router did not stop within {timeout_s:.0f} s", phase="stop", budget_s=budget_s
            ) from None

    async def _close(self, budget_s: float) -> None:
        self._gate.set_state(GateState.CLOSED, reason="the router is stopping", phase="stop")
        asyncio.get_running_loop().call_later(budget_s, self._proxy.stop_live)

    # -- the lifecycle's side ---------------------------------------------------------------

    async def set_gate(
        self,
        state: GateState | str,
        *,
        reason: str = "",
        phase: str = "",
        needs_push: int | None = None,
        weight_version: int | None = None,
        base_version: int | None = None,
        adapters: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Open, hold or close; see ``Gate.set_state``.

        Args:
            metrics: of the step boundary that ends, for drivers; None keeps those of the last.
        """

        why = {
            "reason": reason,
            "phase": phase,
            "needs_push": needs_push,
            "weight_version": weight_version,
            "base_version": base_version,
            "adapters": adapters,
        }
        await self._on_loop(lambda: self._set_gate(state, metrics, **why))

    def _set_gate(
        self, state: GateState | str, metrics: Mapping[str, float] | None = None, **why: Any
    ) -> None:
        self._gate.set_state(GateState(state), **why)
        if metrics is not None:
            self._proxy.step_metrics.of_server = metrics

    async def begin_as(
        self, members: tuple[int, Sequence[Backend]] | None, state: str, why: Mapping[str, Any]
    ) -> None:
        """Serve, with the members, the gate and the metrics that the lost router had.

        Clients pin again what they had pinned there: until then, any version may be one of those.

        Args:
            why: see ``set_gate``.
        """

        def has_all_pins() -> None:
            self._lacks_pins = False
            self._waits.wake()

        async def begin() -> None:
            if members is not None:
                self._gate.set_members(*members)
            self._set_gate(state, **why)
            self._lacks_pins = True
            asyncio.get_running_loop().call_later(LINGERS_S, has_all_pins)

        await self._thread.call(begin())
        self.why_not_serving = ""  # an earlier call could be one that these are older than

    async def set_members(self, epoch: int, members: Sequence[Backend]) -> bool:
        """The full set of engines; False if ``epoch`` is not newer than the one there is."""
        return await self._on_loop(lambda: self._gate.set_members(epoch, members))

    async def stats(self) -> dict[str, Any]:
        """What ``GET /engines`` shows, the figures that drivers have reported, its process."""
        gate, proxy = self._gate, self._proxy
        return await self._on_loop(
            lambda: {
                **gate.stats(),
                **proxy.stats(),
                "figures": proxy.step_metrics.last(),
                "server_metrics": proxy.step_metrics.of_server,
                "process": identify(os.getpid()),
            }
        )

    async def _on_loop(self, work: Callable[[], T]) -> T:
        """Call ``work`` on the router's event loop."""

        async def run() -> T:
            return work()

        self._check_serves()
        return await self._thread.call(run())

    def _check_serves(self) -> None:
        if self.why_not_serving:
            why = f"this router does not serve now: {self.why_not_serving}"
            raise ActorLost(why, may_have_executed=False)

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        """Engines that lost a request and left routing since the last call, and why.

        Returns when there is one, or empty after ``timeout_s``.  For one caller.
        """
        self._check_serves()
        return await self._thread.call(self._wait_failed(timeout_s))

    async def _wait_failed(self, timeout_s: float) -> list[tuple[str, str]]:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_failed.wait(), timeout_s)
        failed, self._failed = self._failed, {}
        self._has_failed.clear()
        return list(failed.items())

    async def pinned(self) -> dict[str, int]:
        """The adapters' versions that requests and pins stay with, and how many do."""
        return await self._on_loop(lambda: dict(self._gate.pinned))

    async def unpinned(self, name: str, timeout_s: float) -> bool:
        """Wait until no request and no pin stays with this version of an adapter; whether so.

        Args:
            name: as engines know it.
        """
        return await self._thread.call(
            self._waits.wait(lambda: self._lacks_pins or name in self._gate.pinned, timeout_s)
        )

    async def drained(self, timeout_s: float, engine_id: str = "") -> None:
        """Wait until no engine, or not this one, has a request; held requests do not count.

        Raises:
            PhaseTimeout: ``late`` names the engines that still have some, and how many.
        """
        self._check_serves()
        await self._thread.call(self._wait_drained(timeout_s, engine_id))

    async def _wait_drained(self, timeout_s: float, engine_id: str) -> None:
        if await self._waits.wait(lambda: bool(self._late(engine_id)), timeout_s):
            return
        in_flight = sorted(self._late(engine_id).items())
        late = {name: f"{num} requests in flight" for name, num in in_flight}
        words = ", ".join(f"{name} has {what}" for name, what in late.items())
        raise PhaseTimeout(
            f"router not drained within {timeout_s:.1f} s: {words}",
            phase="drain",
            budget_s=timeout_s,
            late=late,
        )

    def _late(self, engine_id: str) -> dict[str, int]:
        """The engines that still have requests, or this one if it has, and how many."""
        if not engine_id:
            return self._gate.in_flight.by_engine()
        num = self._gate.num_on(engine_id)
        return {engine_id: num} if num else {}

    def _note_failure(self, failure: ConnectionFailure) -> None:
        if failure.has_left_routing:
            self._failed[failure.engine_id] = failure.message
            self._has_failed.set()
        if self._on_engine_failure is not None and self._owner is not None:
            with suppress(RuntimeError):  # it was closed
                self._owner.call_soon_threadsafe(self._on_engine_failure, failure)

    def _make_server(self) -> HttpServer:
        # Here, because FastAPI takes a quarter of the time of ``import rollout``.
        from rollout.router.control_api import control_app

        return HttpServer(
            traffic_config(
                control_app(self._proxy, connect_timeout_s=self._config.connect_timeout_s),
                http=partial(ClientConnection, self._proxy),
            )
        )


class _Waits:
    """Waits until requests have ended."""

    def __init__(self) -> None:
        self._busy: dict[asyncio.Future[None], Callable[[], bool]] = {}

    async def wait(self, is_busy: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until it is not busy; False if it still is after ``timeout_s``."""
        if not is_busy():
            return True
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._busy[idle] = is_busy
        try:
            await asyncio.wait_for(idle, timeout_s)
        except TimeoutError:
            return False
        finally:
            del self._busy[idle]
        return True

    def wake(self) -> None:
        """End the waits that are over."""
        for idle, is_busy in self._busy.items():
            if not idle.done() and not is_busy():
                idle.set_result(None)
