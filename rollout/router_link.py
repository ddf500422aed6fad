"""The server's line to its router: every call has a deadline, and a lost router is replaced.

Always true:
- a call that the router did not answer in time is an error that names the router;
- a router that has died is replaced by one on the same port, which is told what the last one was
  told (gate and members) before anything new; one that is only out of reach is not replaced, for
  two would serve;
- one call goes out at a time, so that a late one cannot overtake a newer one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from engines.protocol import Endpoint
from rollout.errors import ActorLost, PhaseTimeout
from rollout.ports import RouterPort
from rollout.routing import Member

logger = logging.getLogger(__name__)

# A new router starts a process, and binds its port.
_START_TIMEOUT_S = 60.0
# What the router does before and after it waits for something itself.
_MARGIN_S = 15.0

T = TypeVar("T")
Remake = Callable[[Endpoint], Awaitable[RouterPort]]
"""Makes a router that will listen there, in the place of one that was lost."""


class RouterLink:
    """A ``RouterPort`` in front of another.

    Args:
        remake: None where a router cannot be lost alone, since it is in this process.
    """

    def __init__(
        self, server: str, router: RouterPort, timeout_s: float, remake: Remake | None = None
    ) -> None:
        self._name = f"router of server {server}"
        self._router = router
        self._timeout_s = timeout_s
        self._remake = remake
        self._endpoint: Endpoint | None = None
        self._gate: tuple[str, dict[str, Any]] = ("closed", {})
        self._version: int | None = None
        self._members: tuple[int, list[Member]] | None = None
        self._line = asyncio.Lock()

    async def start(self) -> Endpoint:
        starting = self._router.start()
        self._endpoint = await self._within("start", starting, _START_TIMEOUT_S)
        return self._endpoint

    async def stop(self, budget_s: float) -> None:
        self._endpoint = None
        await self._within("stop", self._router.stop(budget_s), budget_s + _MARGIN_S)

    async def set_gate(self, state: str, **why: Any) -> None:
        async with self._line:
            await self._told("set_gate", lambda: self._router.set_gate(state, **why))
            self._gate = state, why
            self._version = why.get("weight_version", self._version)

    async def set_members(self, epoch: int, members: list[Member]) -> None:
        async with self._line:
            await self._told("set_members", lambda: self._router.set_members(epoch, members))
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
            async with self._line:
                if router is self._router:  # nobody else has replaced it
                    await self._replace(error)
            return []

    async def stats(self) -> dict[str, Any]:
        return await self._within("stats", self._router.stats(), self._timeout_s)

    async def _told(self, what: str, tell: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._within(what, tell(), self._timeout_s)
        except ActorLost as error:
            if not error.is_dead or self._endpoint is None:
                raise
            await self._replace(error)
            # The dead one may have heard it, but nobody listens to that one any more.
            await self._within(what, tell(), self._timeout_s)

    async def _replace(self, error: ActorLost) -> None:
        assert self._endpoint is not None
        if self._remake is None:
            raise error
        logger.error("%s is lost (%s); another one takes its port", self._name, error)
        try:
            router = await self._within("start", self._remake(self._endpoint), _START_TIMEOUT_S)
            await self._within("start", router.start(), _START_TIMEOUT_S)
            self._router = router
            if self._members is not None:
                members = router.set_members(*self._members)
                await self._within("set_members", members, self._timeout_s)
            state, why = self._gate
            gate = router.set_gate(state, **why | {"weight_version": self._version})
            await self._within("set_gate", gate, self._timeout_s)
        except Exception as more:
            raise ActorLost(
                f"{self._name} at {self._endpoint.url} is lost ({error}) and could not be "
                f"replaced: {more}; the engines live, but no request reaches them: stop this "
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
        at = self._endpoint.url if self._endpoint else "an address that is not known yet"
        raise PhaseTimeout(
            f"{self._name} at {at} did not answer {what} within {budget_s:g} s",
            phase=what,
            budget_s=budget_s,
            late={self._name: what},
        )
