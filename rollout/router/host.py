"""The router in a thread of its own.

Always true: gate and proxy are touched only by the router's event loop.  The methods here may be
awaited on any loop; each returns when the router has done what it was asked, so after
``set_gate("holding")`` no request is admitted any more.  Work on the caller's loop never delays
a request, and requests never delay the caller.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import uvicorn
import uvloop

from engines.protocol import Endpoint
from rollout.choosing import policy_of
from rollout.errors import PhaseTimeout, RolloutError
from rollout.router.app import control_app
from rollout.router.control import ControlClient
from rollout.router.gate import ConnectionFailure, Gate, GateState
from rollout.router.limits import check_file_descriptors
from rollout.router.listening import Server, bind
from rollout.router.pool import Pool
from rollout.router.protocol import RouterProtocol
from rollout.router.proxy import Proxy
from rollout.router.settings import RouterSettings
from rollout.routing import Member, Policy

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CONTROL_TIMEOUT_S = 10.0
_CLIENT_KEEPALIVE_S = 75
_STOP_GRACE_S = 5.0


class RouterHost:
    """Starts, steers and stops one router.

    Args:
        policy: a way to choose of your own, instead of the one that ``settings`` names.
        on_engine_failure: called on the event loop that awaited ``start``, for every request
            that lost its engine.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        policy: Policy | None = None,
        on_engine_failure: Callable[[ConnectionFailure], None] | None = None,
    ) -> None:
        self._settings = settings
        self._on_engine_failure = on_engine_failure
        self._gate = Gate(
            max_held=settings.max_held_requests,
            policy=policy
            or policy_of(
                settings.policy,
                session_ttl_s=settings.session_ttl_s,
                max_sessions=settings.max_sessions,
            ),
            on_failure=self._pass_failure_on,
            on_idle=self._wake_drained,
        )
        pool = Pool(
            connect_timeout_s=settings.connect_timeout_s,
            max_connections=check_file_descriptors(settings.max_connections),
        )
        self._control = ControlClient(
            connect_timeout_s=settings.connect_timeout_s,
            total_timeout_s=_CONTROL_TIMEOUT_S,
        )
        self._proxy = Proxy(self._gate, pool, settings)
        self._drained: dict[asyncio.Future[None], str] = {}
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._failed: dict[str, str] = {}
        self._has_failed = asyncio.Event()
        self._owner: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._server: Server | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> Endpoint:
        """Bind, serve, and say where.  The gate is closed and there are no engines yet.

        Raises:
            ConfigError: host and port cannot be bound.
        """
        if self._thread is not None:
            raise RolloutError("a router is started once; make another RouterHost")
        self._owner = asyncio.get_running_loop()
        listener = bind(self._settings.host, self._settings.port)
        endpoint = Endpoint(self._settings.host, listener.getsockname()[1])
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(listener, started),
            name=f"router-{endpoint.port}",
            daemon=True,
        )
        self._thread.start()
        await asyncio.wrap_future(started)
        logger.info("router listens on %s", endpoint.url)
        return endpoint

    async def stop(self, budget_s: float) -> None:
        """Refuse what is new, let finish what is in flight up to the budget, cut the rest.

        Raises:
            PhaseTimeout: the router's thread did not end.
        """
        if self._thread is None or self._ended.done():
            return
        with suppress(RolloutError):  # another stop was quicker
            await self._call(self._close(budget_s))
        try:
            await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(self._ended)), budget_s + _STOP_GRACE_S
            )
        except TimeoutError:
            raise PhaseTimeout(
                f"router did not stop within {budget_s + _STOP_GRACE_S:.0f} s",
                phase="stop",
                budget_s=budget_s,
            ) from None
        self._thread.join()

    async def _close(self, budget_s: float) -> None:
        assert self._server is not None
        self._gate.set_state(GateState.CLOSED, reason="the router is stopping", phase="stop")
        self._server.stop_within(budget_s)

    # -- the lifecycle's side ---------------------------------------------------------------

    async def set_gate(
        self,
        state: GateState | str,
        *,
        reason: str = "",
        phase: str = "",
        weight_version: int | None = None,
    ) -> None:
        """Open, hold or close; ``weight_version`` None keeps the one there is."""

        async def apply() -> None:
            self._gate.set_state(
                GateState(state), reason=reason, phase=phase, weight_version=weight_version
            )

        await self._call(apply())

    async def set_members(self, epoch: int, members: Sequence[Member]) -> bool:
        """The full set of engines; False if ``epoch`` is not newer than the one there is."""

        async def apply() -> bool:
            return self._gate.set_members(epoch, members)

        return await self._call(apply())

    async def stats(self) -> dict[str, Any]:
        """What ``GET /engines`` shows, and what drivers have told."""

        async def read() -> dict[str, Any]:
            figures = self._proxy.figures.last()
            return {**self._gate.stats(), **self._proxy.stats(), "figures": figures}

        return await self._call(read())

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        """Engines that lost a request and left routing since the last call, and why.

        Returns when there is one, or empty after ``timeout_s``.  For the loop that awaited
        ``start``, and for one caller.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_failed.wait(), timeout_s)
        failed, self._failed = self._failed, {}
        self._has_failed.clear()
        return list(failed.items())

    async def drained(self, timeout_s: float, engine_id: str = "") -> None:
        """Wait until no engine, or not this one, has a request; held requests do not count.

        Raises:
            PhaseTimeout: ``late`` names the engines that still have some, and how many.
        """
        await self._call(self._wait_drained(timeout_s, engine_id))

    async def _wait_drained(self, timeout_s: float, engine_id: str) -> None:
        if self._is_drained(engine_id):
            return
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drained[drained] = engine_id
        try:
            await asyncio.wait_for(drained, timeout_s)
        except TimeoutError:
            late = {one: f"{num} requests in flight" for one, num in self._late(engine_id)}
            words = ", ".join(f"{one} has {what}" for one, what in late.items())
            raise PhaseTimeout(
                f"router not drained within {timeout_s:.1f} s: {words}",
                phase="drain",
                budget_s=timeout_s,
                late=late,
            ) from None
        finally:
            del self._drained[drained]

    def _late(self, engine_id: str) -> list[tuple[str, int]]:
        if engine_id:
            return [(engine_id, self._gate.num_on(engine_id))]
        return sorted(self._gate.in_flight.by_engine().items())

    def _is_drained(self, engine_id: str) -> bool:
        return not (self._gate.num_on(engine_id) if engine_id else self._gate.in_flight)

    # -- within -----------------------------------------------------------------------------

    def _wake_drained(self) -> None:
        for drained, engine_id in self._drained.items():
            if not drained.done() and self._is_drained(engine_id):
                drained.set_result(None)

    def _pass_failure_on(self, failure: ConnectionFailure) -> None:
        if self._owner is None or self._owner.is_closed():
            return
        with suppress(RuntimeError):  # it was closed just now
            self._owner.call_soon_threadsafe(self._note_failure, failure)

    def _note_failure(self, failure: ConnectionFailure) -> None:
        if failure.has_left_routing:
            self._failed[failure.engine_id] = failure.message
            self._has_failed.set()
        if self._on_engine_failure is not None:
            self._on_engine_failure(failure)

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` on the router's loop; if the router ends first, say so."""
        if self._loop is None or self._ended.done():
            work.close()
            raise RolloutError("the router is not running")
        try:
            call = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # its loop was closed since
            work.close()
            raise RolloutError("the router is not running") from None
        self._calls.add(call)
        if self._ended.done():
            call.cancel()
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RolloutError("the router stopped before it could answer") from None
        finally:
            self._calls.discard(call)

    def _run(self, listener: socket.socket, started: concurrent.futures.Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(listener, started))
        except BaseException as error:
            logger.exception("router thread failed")
            if not started.done():
                why = RolloutError(f"the router could not start: {type(error).__name__}: {error}")
                why.__cause__ = error
                started.set_exception(why)
        finally:
            listener.close()
            self._ended.set_result(None)
            for call in list(self._calls):
                call.cancel()

    async def _serve(
        self, listener: socket.socket, started: concurrent.futures.Future[None]
    ) -> None:
        self._loop = asyncio.get_running_loop()

        def on_started() -> None:
            started.set_result(None)

        self._server = Server(
            uvicorn.Config(
                control_app(self._proxy, self._control),
                http=partial(RouterProtocol, self._proxy),  # type: ignore[arg-type]
                ws="none",
                lifespan="on",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                date_header=False,
                backlog=4096,
                timeout_keep_alive=_CLIENT_KEEPALIVE_S,
            ),
            on_started,
            self._proxy.stop_live,
        )
        await self._server.serve(sockets=[listener])
