"""Several rollout servers on the same GPUs: policy, reference, reward, judge.

Always true: offload and onload are one transaction over all servers.  The trainer's GPUs are
shared by all, so no server releases before every server has flushed, and none serves before
every server can.  One transaction runs at a time.  Either one repeated, also after a failure, goes
on from where each group is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Protocol

from rollout.errors import ConfigError
from rollout.fanout import barrier, describe
from rollout.lifecycle import OFFLOAD, SERVE, Command
from rollout.lock import CommandLock
from rollout.types import EngineReport, EngineStatus, ServerStatus, StepReport
from rollout.weights.manifest import Manifest
from rollout.weights.push import WeightPush

logger = logging.getLogger(__name__)


class ServerPort(Protocol):
    """A ``RolloutServer``, here or in an actor.  Every method starts its work at once."""

    def start(self) -> Awaitable[ServerStatus]: ...
    def stop(self) -> Awaitable[None]: ...
    def offload(self) -> Awaitable[StepReport]: ...
    def onload(self, push: WeightPush | None = None) -> Awaitable[StepReport]: ...
    def update_and_continue(self, push: WeightPush) -> Awaitable[StepReport]: ...
    def pause_generation(self) -> Awaitable[StepReport]: ...
    def flush_cache(self) -> Awaitable[StepReport]: ...
    def release_memory_occupation(self) -> Awaitable[StepReport]: ...
    def onload_weights(self) -> Awaitable[StepReport]: ...
    def update_weights(self, push: WeightPush) -> Awaitable[StepReport]: ...
    def verify(self) -> Awaitable[StepReport]: ...
    def onload_kv(self) -> Awaitable[StepReport]: ...
    def continue_generation(self) -> Awaitable[StepReport]: ...
    def catch_up(self) -> Awaitable[StepReport]: ...
    def remove_engine(self, engine_id: str, keep_process: bool) -> Awaitable[EngineReport]: ...
    def add_engine(self, engine_id: str) -> Awaitable[EngineStatus]: ...
    def advance(self, command: Command) -> Awaitable[StepReport]: ...
    def status(self) -> Awaitable[ServerStatus]: ...
    def expected_manifest(self) -> Awaitable[Manifest | None]: ...


class Deployment:
    """The lifecycle of all servers together.

    Args:
        stop_budget_s: what a server gets to stop; None where it keeps a deadline of its own.
        lock_timeout_s: how long a transaction waits for the one before it.
    """

    def __init__(
        self,
        servers: Mapping[str, ServerPort],
        *,
        stop_budget_s: float | None = None,
        lock_timeout_s: float = 900.0,
    ) -> None:
        self._servers = dict(servers)
        self._stop_budget_s = stop_budget_s
        self._lock = CommandLock(lock_timeout_s)

    async def start(self) -> dict[str, ServerStatus]:
        """Start all servers; if one does not start, all are stopped again."""
        try:
            return await barrier({name: one.start() for name, one in self._servers.items()})
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ask all servers to stop.  One that is lost or hangs is told; its maker ends it."""
        await barrier({name: self._stop(name, one) for name, one in self._servers.items()})

    async def _stop(self, name: str, server: ServerPort) -> None:
        try:
            async with asyncio.timeout(self._stop_budget_s):
                await server.stop()
        except Exception as error:  # nothing may keep the maker from ending what is left
            logger.error("server %s did not stop by itself: %s", name, describe(error))

    async def offload(self) -> dict[str, StepReport]:
        """Every server paused, then every one flushed, then every one released."""
        async with self._lock.held("offload"):
            return await self._advance(*OFFLOAD)

    async def onload(self, pushes: Mapping[str, WeightPush]) -> dict[str, StepReport]:
        """Every server's weights, then new weights where there are any, then serve.

        Raises:
            ConfigError: a push for a server that does not exist.
        """
        for name in pushes:
            self._server(name, "push weights to")
        async with self._lock.held("onload"):
            return await self._onload(pushes)

    async def _onload(self, pushes: Mapping[str, WeightPush]) -> dict[str, StepReport]:
        # What a failed offload left behind could not be given its weights.
        await barrier({name: self._servers[name].catch_up() for name in pushes})
        reports = await self._advance(Command.RESUME_WEIGHTS)
        updated = await barrier(
            {name: self._servers[name].update_weights(push) for name, push in pushes.items()}
        )
        served = await self._advance(*SERVE)
        for name, report in reports.items():
            if name in updated:
                report = report.merged(updated[name])
            reports[name] = report.merged(served[name])
        return reports

    async def remove_engine(
        self, server: str, engine_id: str, keep_process: bool = False
    ) -> EngineReport:
        """Take an engine of one server out; the lifecycle of all goes on."""
        return await self._server(server, "remove an engine of").remove_engine(
            engine_id, keep_process
        )

    async def add_engine(self, server: str, engine_id: str) -> EngineStatus:
        """Take the place of a removed engine of one server back."""
        return await self._server(server, "add an engine to").add_engine(engine_id)

    def _server(self, name: str, what_for: str) -> ServerPort:
        if name not in self._servers:
            raise ConfigError(
                f"no server {name!r} to {what_for}; known: {', '.join(self._servers)}"
            )
        return self._servers[name]

    async def status(self) -> dict[str, ServerStatus]:
        """Where every server is."""
        return await barrier({name: one.status() for name, one in self._servers.items()})

    async def _advance(self, *commands: Command) -> dict[str, StepReport]:
        """Each command on all servers before the next on any; whoever is further on is left."""
        reports = {name: StepReport() for name in self._servers}
        for command in commands:
            done = await barrier(
                {name: one.advance(command) for name, one in self._servers.items()}
            )
            reports = {name: reports[name].merged(done[name]) for name in reports}
        return reports
