"""The server's client of its router: every call has a deadline, and outlives a lost router.

Always true:
- a call without a reply in time raises an error that names the router;
- a router that serves again begins with the last gate, members and metrics, or with a gate that is
  shut where a call is under way that shuts it;
- a call that a router may have lost is repeated: the same call twice has the effect of one;
- one call runs at a time, so that a late call cannot overtake a newer one;
- a router that hangs is ended while somebody waits for its ``failures``, and another one starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from engines.protocol import Endpoint, ProcessIdentity
from rollout.core.errors import ActorLost, PhaseTimeout
from rollout.router.host import RouterHost
from rollout.rules.routing import Backend

logger = logging.getLogger(__name__)

# A router starts a process and binds its port.
_START_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 15.0
# For the router's work before and after its own wait.
_MARGIN_S = 15.0
# Between two tries of a call that did not reach a router.
_AGAIN_S = 0.02
_OF_WEIGHTS = ("weight_version", "base_version", "adapters")

T = TypeVar("T")
Members = tuple[int, list[Backend]]
End = Callable[[ProcessIdentity], None]


class RouterClient:
    """The methods of a ``RouterHost``, with deadlines.

    Args:
        router: in this process, or an actor that Ray starts again.
        end: kills the process of that actor, or None where the router is a thread of this process.

    Attributes:
        metrics: what the router was given last for drivers.
    """

    def __init__(self, server: str, router: RouterHost, end: End | None = None) -> None:
        self._name = f"router of server {server}"
        self._router = router
        self._end = end
        self._process: ProcessIdentity | None = None
        self.metrics: Mapping[str, float] = {}
        self._endpoint: Endpoint | None = None
        self._gate: tuple[str, dict[str, Any]] = ("closed", {})
        self._weights: dict[str, Any] = {}
        self._members: Members | None = None
        self._call_lock = asyncio.Lock()

    @property
    def url(self) -> str:
        """Base URL of the router, or empty if it does not run."""
        return self._endpoint.url if self._endpoint else ""

    async def start(self) -> Endpoint:
        starting = self._router.start()
        self._endpoint = await self._within("start", starting, _START_TIMEOUT_S)
        return self._endpoint

    async def rejoin(self, endpoint: Endpoint) -> int:
        """Use the router that outlived a lost server.

        Returns:
            The epoch of its last members, also of a list that the lost server had sent and that
            the router has not got so far: one is sent at a time.
        """
        self._endpoint = endpoint
        stats = await self._call("stats", lambda router: router.stats(), _START_TIMEOUT_S)
        self.metrics = stats["server_metrics"]
        return int(stats["epoch"]) + 1

    def serves(self) -> tuple[int, Members | None, str, dict[str, Any]]:
        """The router was lost and begins again: at which port, and see ``RouterHost.begin_as``.

        The port is 0 as long as this client knows none.
        """
        self._process = None
        logger.warning("%s was lost; another process begins to serve at %s", self._name, self.url)
        state, why = self._gate
        port = self._endpoint.port if self._endpoint else 0
        return port, self._members, state, {**why, **self._weights, "metrics": self.metrics}

    async def stop(self, budget_s: float) -> None:
        self._endpoint = None
        await self._within("stop", self._router.stop(budget_s), budget_s + _MARGIN_S)

    async def set_gate(self, state: str, **why: Any) -> None:
        gate = state, {name: value for name, value in why.items() if name != "metrics"}
        async with self._call_lock:
            if state != "open":
                self._gate = gate
            await self._call("set_gate", lambda router: router.set_gate(state, **why))
            self._gate = gate
            self.metrics = why.get("metrics", self.metrics)
            self._weights |= {name: why[name] for name in _OF_WEIGHTS if name in why}

    async def set_members(self, epoch: int, members: list[Backend]) -> None:
        async with self._call_lock:
            await self._call("set_members", lambda router: router.set_members(epoch, members))
            self._members = epoch, members

    async def drained(self, timeout_s: float, engine_id: str = "") -> None:
        await self._call(
            "drained", lambda router: router.drained(timeout_s, engine_id), timeout_s + _MARGIN_S
        )

    async def pinned(self) -> dict[str, int]:
        return await self._call("pinned", lambda router: router.pinned())

    async def unpinned(self, name: str, timeout_s: float) -> bool:
        return await self._call(
            "unpinned", lambda router: router.unpinned(name, timeout_s), timeout_s + _MARGIN_S
        )

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        if self._process is None:
            await self.stats()
        try:
            return await self._call(
                "failures", lambda router: router.failures(timeout_s), timeout_s + _MARGIN_S
            )
        except PhaseTimeout:
            await self._end_if_it_hangs()
            raise

    async def _end_if_it_hangs(self) -> None:
        """Kill a router that lives and does not answer; a lost one comes back by itself."""
        hanging = self._process
        if self._end is None or hanging is None:
            return
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S) as limit:
                await self._router.stats()
        except ActorLost:
            return
        except TimeoutError:
            if not limit.expired():
                raise
            logger.error(
                "%s at %s hangs: it has not answered two calls; it is killed, and another begins",
                self._name,
                self.url,
            )
            self._end(hanging)

    async def stats(self) -> dict[str, Any]:
        stats = await self._call("stats", lambda router: router.stats())
        self._process = stats.get("process")
        return stats

    async def _call(
        self,
        what: str,
        call: Callable[[RouterHost], Awaitable[T]],
        budget_s: float = _CALL_TIMEOUT_S,
    ) -> T:
        """Its reply; the call is repeated to a router that was lost, until it serves again."""
        return await self._within(what, self._reply_to(call), budget_s)

    async def _reply_to(self, call: Callable[[RouterHost], Awaitable[T]]) -> T:
        while True:
            try:
                return await call(self._router)
            except ActorLost as error:
                if error.is_dead:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _within(self, what: str, call: Awaitable[T], budget_s: float) -> T:
        try:
            async with asyncio.timeout(budget_s) as limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
        at = self.url or "an address that is not known yet"
        raise PhaseTimeout(
            f"{self._name} at {at} did not answer {what} within {budget_s:g} s",
            phase=what,
            budget_s=budget_s,
            late={self._name: what},
        )
