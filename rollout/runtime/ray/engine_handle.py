"""One running engine on Ray: a process on each of its nodes, each owned by an actor.

Always true: ``kill`` and ``stop`` return only after each process of the engine has ended or its
node is lost, also if its actor was lost before.  An engine ends with any of its actors.  These
belong to no other actor, so that they outlive a lost group and a lost server; they end when the
server's actor has ended for good.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from engines.launch import EngineLauncher, EngineSpec, NodeLauncher, RunningEngine
from engines.process.background import Then, keep_task
from engines.protocol import NO_ACCESS, Endpoint, EngineAccess, GpuMemory, ProcessIdentity

from rollout.core.errors import ActorLost, ConfigError
from rollout.core.fanout import barrier
from rollout.runtime.ray.nodes import confirm_ended
from rollout.runtime.ray.remote_call import RemoteCall

logger = logging.getLogger(__name__)

_MEASURE_TIMEOUT_S = 5.0
_NAME_TIMEOUT_S = 10.0
_NAME_POLL_S = 0.1
# A server's actor that has no name twice in a row, at this interval, has ended for good.
_LOOK_S = 2.0
_MISSED = 2
# Of the deadline for a kill, together less than all: the actor's part, and without it the node's.
_SHARE_OF_ACTOR = 0.5
_SHARE_OF_NODE = 0.4


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """The process that an actor has started, on its node, and what calls to it carry."""

    endpoint: Endpoint
    pid: int | None
    processes: tuple[ProcessIdentity, ...]
    node_id: str
    access: EngineAccess = NO_ACCESS


@dataclass(frozen=True, slots=True)
class ActorName:
    """The name of an actor in its namespace."""

    namespace: str
    name: str

    def find(self) -> Any:
        """Its handle, or None if no actor lives that has this name.  Blocks."""
        try:
            return ray.get_actor(self.name, self.namespace)
        except ValueError:
            return None

    def wait_free(self) -> bool:
        """Wait until no actor has this name; False if one has it after ``_NAME_TIMEOUT_S``."""
        until_s = time.monotonic() + _NAME_TIMEOUT_S
        while self.find() is not None:
            if time.monotonic() > until_s:
                return False
            time.sleep(_NAME_POLL_S)
        return True

    def once_free(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, which creates the actor of this name.  Blocks.

        Ray frees a name a moment after the kill of its actor, later on a busy host.

        Raises:
            ValueError: another actor still has the name after ``_NAME_TIMEOUT_S``.
        """
        until_s = time.monotonic() + _NAME_TIMEOUT_S
        while True:
            try:
                return make()
            except ValueError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(_NAME_POLL_S)


async def ended_for_good(server: ActorName, appears_s: float = 0.0) -> None:
    """Returns when this actor has ended for good, also if another one has its name by then.

    Args:
        appears_s: how long it may not have been created yet.
    """
    num_missed, ours = 0, None
    while num_missed < (_MISSED if ours else max(_MISSED, appears_s / _LOOK_S)):
        with suppress(Exception):  # the cluster does not answer
            found = await asyncio.to_thread(server.find)
            ours = ours or found
            # Another actor of that name is of a later launch.
            num_missed = 0 if found is not None and found == ours else num_missed + 1
        await asyncio.sleep(_LOOK_S)


class EngineActor:
    """Owns the process of one engine, or of its part on one node, on the node of its slot.

    In this file, because its process imports all of the file: it needs no server.

    Args:
        name: its own.
        server: when this actor has ended for good, it ends itself and its engine, also if another
            one has its name.
    """

    def __init__(self, launcher: EngineLauncher, name: ActorName, server: ActorName) -> None:
        if os.environ.get("ROLLOUT_LOG_LEVEL"):  # else the process does without that import
            from rollout.runtime.worker_process import keep_what_is_loaded

            keep_what_is_loaded()
        self._launcher = launcher
        self._watching = keep_task(
            partial(self._end_with, server, name), f"end-with:{server.name}", Then.STARTS_AGAIN
        )
        self._engine: RunningEngine | None = None

    async def hold_address(self, host: str) -> str:
        if not isinstance(self._launcher, NodeLauncher):
            raise ConfigError(
                f"{type(self._launcher).__name__} cannot start an engine over several nodes"
            )
        return self._launcher.hold_address(host)

    async def launch(self, spec: EngineSpec) -> StartedProcess:
        self._engine = await self._launcher.launch(spec)
        started = await self.started()
        assert started is not None
        return started

    async def started(self) -> StartedProcess | None:
        engine = self._engine
        if engine is None:
            return None
        node_id = ray.get_runtime_context().get_node_id()
        processes = tuple(engine.processes)
        return StartedProcess(engine.endpoint, engine.pid, processes, node_id, engine.access)

    async def resident_bytes(self) -> int | None:
        return await self._engine.resident_bytes() if self._engine else None

    async def gpu_memory(self) -> Sequence[GpuMemory] | None:
        return await self._engine.gpu_memory() if self._engine else None

    async def is_alive(self) -> bool:
        return self._engine is not None and await self._engine.is_alive()

    async def log_tail(self, lines: int) -> str:
        return await self._engine.log_tail(lines) if self._engine else ""

    async def stop(self, grace_s: float) -> bool:
        return await self._engine.stop(grace_s) if self._engine else False

    async def kill(self) -> None:
        if self._engine:
            await self._engine.kill()

    async def _end_with(self, server: ActorName, name: ActorName) -> None:
        await ended_for_good(server)
        logger.warning("actor %s has ended, and the engine of %s ends", server.name, name.name)
        try:
            await self.kill()
        finally:
            ray.kill(await asyncio.to_thread(name.find))


@dataclass(frozen=True, slots=True)
class EnginePart:
    """The part of an engine on one node.

    Attributes:
        actor: None if it is lost.
    """

    actor: Any
    started: StartedProcess


class RayEngine:
    """A ``RunningEngine`` owned by actors.

    Args:
        parts: in order of rank; the first takes the requests.
        kill_timeout_s: deadline for a kill; see ``EngineSpec``.
    """

    def __init__(self, engine_id: str, parts: Sequence[EnginePart], kill_timeout_s: float) -> None:
        self.engine_id = engine_id
        self.parts = tuple(parts)
        self.endpoint = self.parts[0].started.endpoint
        self.access = self.parts[0].started.access
        self.pid = self.parts[0].started.pid
        self.node_ids = tuple(part.started.node_id for part in self.parts)
        self.node_id = self.node_ids[0]
        self._name = f"engine {engine_id}"
        self._actor_s = _SHARE_OF_ACTOR * kill_timeout_s
        self._node_s = _SHARE_OF_NODE * kill_timeout_s

    @property
    def processes(self) -> tuple[ProcessIdentity, ...]:
        return tuple(identity for part in self.parts for identity in part.started.processes)

    async def resident_bytes(self) -> int | None:
        measured = await self._measure(lambda part: part.actor.resident_bytes.remote())
        return None if measured is None else sum(measured)

    async def gpu_memory(self) -> Sequence[GpuMemory] | None:
        measured = await self._measure(lambda part: part.actor.gpu_memory.remote())
        return None if measured is None else [gpu for gpus in measured for gpu in gpus]

    async def _measure(self, call: Callable[[EnginePart], Any]) -> list[Any] | None:
        """One figure from each part, or None if one of them has none."""
        try:
            async with asyncio.timeout(_MEASURE_TIMEOUT_S):
                measured = await self._all(call)
        except Exception:  # without this figure a phase must not fail
            return None
        return None if None in measured else measured

    async def is_alive(self) -> bool:
        """Whether all its processes run; it ends with any of its actors.

        Raises:
            ActorLost: it is unknown.
        """
        try:
            return all(await self._all(lambda part: part.actor.is_alive.remote()))
        except ActorLost as error:
            if not error.is_dead:
                raise
            return False

    async def log_tail(self, lines: int = 20) -> str:
        async with asyncio.timeout(_MEASURE_TIMEOUT_S):
            return "\n".join(await self._all(lambda part: part.actor.log_tail.remote(lines)))

    async def stop(self, grace_s: float) -> bool:
        async def stop(part: EnginePart) -> bool:
            async with asyncio.timeout(grace_s + self._actor_s):
                killed: bool = await self._call(part.actor.stop.remote(grace_s))
                return killed

        return any(await self._end_parts(stop))

    async def kill(self) -> None:
        async def kill(part: EnginePart) -> None:
            async with asyncio.timeout(self._actor_s):
                await self._call(part.actor.kill.remote())

        await self._end_parts(kill)

    async def _end_parts(self, call: Callable[[EnginePart], Awaitable[Any]]) -> list[Any]:
        async def end(part: EnginePart) -> Any:
            try:
                if part.actor is not None:
                    return await call(part)
            except (ActorLost, TimeoutError):
                ray.kill(part.actor)  # it may only hang
            finally:
                if part.actor is not None:
                    ray.kill(part.actor)
            started = part.started
            await confirm_ended(self.engine_id, started.node_id, started.processes, self._node_s)
            return True

        done = await barrier({str(rank): end(part) for rank, part in enumerate(self.parts)})
        return list(done.values())

    async def _all(self, call: Callable[[EnginePart], Any]) -> list[Any]:
        if any(part.actor is None for part in self.parts):
            raise ActorLost(f"{self._name} has lost its actor", actor=self._name, is_dead=True)
        calls = [self._call(call(part)) for part in self.parts]
        return list(await asyncio.gather(*calls))

    def _call(self, object_ref: Any) -> RemoteCall[Any]:
        return RemoteCall(object_ref, self._name)
