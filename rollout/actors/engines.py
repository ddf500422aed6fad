"""One running engine behind Ray: a process on each of its nodes, each owned by an actor.

Always true: ``kill`` and ``stop`` return only when every process of the engine has ended on every
node, or its node is lost; an actor that is lost already does not change that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from engines.protocol import Endpoint, ProcessIdentity

from rollout.actors.calls import RemoteCall
from rollout.actors.nodes import confirm_ended
from rollout.errors import ActorLost
from rollout.fanout import barrier

_MEASURE_TIMEOUT_S = 5.0
# Together less than what a group allows for ending a fenced engine.
_KILL_TIMEOUT_S = 6.0
_CONFIRM_TIMEOUT_S = 12.0


@dataclass(frozen=True, slots=True)
class Started:
    """What an actor says of the process it has started."""

    endpoint: Endpoint
    pid: int | None
    processes: tuple[ProcessIdentity, ...]


@dataclass(frozen=True, slots=True)
class EnginePart:
    """An engine on one of its nodes."""

    node_id: str
    actor: Any
    started: Started


class RayEngine:
    """A ``RunningEngine`` owned by actors.

    Args:
        parts: in order of rank; the first takes the requests.
    """

    def __init__(self, engine_id: str, parts: Sequence[EnginePart]) -> None:
        self.engine_id = engine_id
        self.parts = tuple(parts)
        self.endpoint = self.parts[0].started.endpoint
        self.pid = self.parts[0].started.pid
        self.node_ids = tuple(part.node_id for part in self.parts)
        self.node_id = self.node_ids[0]
        self._name = f"engine {engine_id}"

    @property
    def processes(self) -> tuple[ProcessIdentity, ...]:
        return tuple(one for part in self.parts for one in part.started.processes)

    async def resident_bytes(self) -> int | None:
        try:
            async with asyncio.timeout(_MEASURE_TIMEOUT_S):
                measured = await self._all(lambda part: part.actor.resident_bytes.remote())
        except Exception:  # a figure for people: its absence must not fail a phase
            return None
        return None if None in measured else sum(measured)

    async def is_alive(self) -> bool:
        try:
            return all(await self._all(lambda part: part.actor.is_alive.remote()))
        except ActorLost as error:
            if error.is_dead:  # and the guard of the engine ends it with its owner
                return False
            raise

    async def log_tail(self, lines: int = 20) -> str:
        async with asyncio.timeout(_MEASURE_TIMEOUT_S):
            return "\n".join(await self._all(lambda part: part.actor.log_tail.remote(lines)))

    async def stop(self, grace_s: float) -> bool:
        async def stop(part: EnginePart) -> bool:
            async with asyncio.timeout(grace_s + _KILL_TIMEOUT_S):
                killed: bool = await self._call(part.actor.stop.remote(grace_s))
                return killed

        return any(await self._ended(stop))

    async def kill(self) -> None:
        async def kill(part: EnginePart) -> None:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await self._call(part.actor.kill.remote())

        await self._ended(kill)

    async def _ended(self, ask: Callable[[EnginePart], Awaitable[Any]]) -> list[Any]:
        async def end(part: EnginePart) -> Any:
            try:
                return await ask(part)
            except (ActorLost, TimeoutError):
                # Dead, its guard sees to the engine; hung, it is made to be dead.
                ray.kill(part.actor)
                await confirm_ended(
                    self.engine_id, part.node_id, part.started.processes, _CONFIRM_TIMEOUT_S
                )
                return True
            finally:
                ray.kill(part.actor)

        done = await barrier({str(rank): end(part) for rank, part in enumerate(self.parts)})
        return list(done.values())

    async def _all(self, ask: Callable[[EnginePart], Any]) -> list[Any]:
        calls = [self._call(ask(part)) for part in self.parts]
        return list(await asyncio.gather(*calls))

    def _call(self, object_ref: Any) -> RemoteCall[Any]:
        return RemoteCall(object_ref, self._name)
