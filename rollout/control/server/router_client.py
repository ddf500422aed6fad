"""The server's client of its router: every call has a deadline, and a lost router is replaced.

Always true:
- a call without a reply in time raises an error that names the router;
- a dead router is replaced by one on the same port, which first gets the last gate and members.  An
  unreachable router is not replaced, because two would serve;
- one call runs at a time, so that a late call cannot overtake a newer one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from engines.protocol import Endpoint
from rollout.core.errors import ActorLost, PhaseTimeout
from rollout.router.host import RouterHost
from rollout.rules.routing import Backend

logger = logging.getLogger(__name__)

# A new router starts a process and binds its port.
_START_TIMEOUT_S = 60.0
# For the router's work before and after its own wait.
_MARGIN_S = 15.0
_OF_WEIGHTS = ("weight_version", "base_version", "adapter")

T = TypeVar("T")
MakeRouter = Callable[[Endpoint], Awaitable[RouterHost]]
"""Creates a router that will listen on this endpoint, in the place of a lost one."""


class RouterClient:
    """The methods of a ``RouterHost``, with deadlines.

    Args:
        make_router: None if the router is in this process, and cannot be lost alone.
    """

    def __init__(
        self,
        server: str,
        router: RouterHost,
        timeout_s: float,
        make_router: MakeRouter | None = None,
    ) -> None:
        self._name = f"router of server {server}"
        self._router = router
        self._timeout_s = timeout_s
        self._make_router = make_router
        self._endpoint: Endpoint | None = None
        self._gate: tuple[str, dict[str, Any]] = ("closed", {})
        self._weights: dict[str, Any] = {}
        self._members: tuple[int, list[Backend]] | None = None
        self._call_lock = asyncio.Lock()

    @property
    def url(self) -> str:
        """Base URL of the router; empty if it does not run."""
        return self._endpoint.url if self._endpoint else ""

    async def start(self) -> Endpoint:
        starting = self._router.start()
        self._endpoint = await self._within("start", starting, _START_TIMEOUT_S)
        return self._endpoint

    async def stop(self, budget_s: float) -> None:
        self._endpoint = None
        await self._within("stop", self._router.stop(budget_s), budget_s + _MARGIN_S)

    async def set_gate(self, state: str, **why: Any) -> None:
        async with self._call_lock:
            await self._send("set_gate", lambda: self._router.set_gate(state, **why))
            self._gate = state, why
            self._weights |= {name: why[name] for name in _OF_WEIGHTS if name in why}

    async def set_members(self, epoch: int, members: list[Backend]) -> None:
        async with self._call_lock:
            await self._send("set_members", lambda: self._router.set_members(epoch, members))
            self._members = epoch, members

    async def drained(self, timeout_s: float, engine_id: str = "") -> None:
        await self._within(
            "drained", self._router.drained(timeout_s, engine_id), timeout_s + _MARGIN_S
        )

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        router = self._router
        try:
            return await self._within("failures", router.failures(timeout_s), timeout_s + _MARGIN_S)
        except ActorLost as error:
            if not error.is_dead or self._endpoint is None:
                raise
            async with self._call_lock:
                if router is self._router:  # it was not replaced meanwhile
                    await self._replace(error)
            return []

    async def stats(self) -> dict[str, Any]:
        return await self._within("stats", self._router.stats(), self._timeout_s)

    async def _send(self, what: str, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._within(what, call(), self._timeout_s)
        except ActorLost as error:
            if not error.is_dead or self._endpoint is None:
                raise
            await self._replace(error)
            # The dead router may have got the call, so the new one gets it again.
            await self._within(what, call(), self._timeout_s)

    async def _replace(self, error: ActorLost) -> None:
        assert self._endpoint is not None
        if self._make_router is None:
            raise error
        logger.error("%s is lost (%s); a new one takes its port", self._name, error)
        try:
            router = await self._within(
                "start", self._make_router(self._endpoint), _START_TIMEOUT_S
            )
            await self._within("start", router.start(), _START_TIMEOUT_S)
            self._router = router
            if self._members is not None:
                members = router.set_members(*self._members)
                await self._within("set_members", members, self._timeout_s)
            state, why = self._gate
            gate = router.set_gate(state, **why | self._weights)
            await self._within("set_gate", gate, self._timeout_s)
        except Exception as more:
            raise ActorLost(
                f"{self._name} at {self._endpoint.url} is lost ({error}) and could not be "
                f"replaced: {more}; the engines run, but get no requests: stop this "
                "deployment and launch it again",
                actor=error.actor,
                is_dead=error.is_dead,
            ) from more
        logger.warning("%s serves again at %s", self._name, self._endpoint.url)

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
