"""The actor classes: the plain classes, with the differences for an actor.

All are async actors.  Every error of this library survives pickling, so it needs no translation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engines.launch import EngineLauncher, EngineSpec, NodeLauncher, RunningEngine
from engines.protocol import Endpoint, GpuMemory

from rollout.config import ServerConfig
from rollout.config.run_dir import RunFolder
from rollout.control.group.server_group import GroupSettings, ServerGroup
from rollout.control.server.journal import ServerJournal
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ConfigError
from rollout.core.types import EngineSlot, GroupStatus, NodeShare, ServerStatus
from rollout.observability.page.page_host import create_page
from rollout.observability.timeline.span_file import create_timeline
from rollout.router.host import RouterHost
from rollout.rules.deadlines import kill_timeout_s
from rollout.runtime.ray.actor_factory import LostGroup, ServerActors, ServerParts, running_engines
from rollout.runtime.ray.engine_handle import StartedProcess
from rollout.runtime.ray.engine_launcher import EnginePlacement, RayLauncher
from rollout.runtime.ray.worker_process import keep_what_is_loaded, take_short_turns
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.store import WeightStore


class EngineActor:
    """Owns the process of one engine, or of its part on one node, on the node of its slot."""

    def __init__(self, launcher: EngineLauncher) -> None:
        self._launcher = launcher
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
        return StartedProcess(engine.endpoint, engine.pid, tuple(engine.processes))

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


class ServerGroupActor(ServerGroup):
    """A ``ServerGroup`` whose engines are owned by actors on their slots.

    Args:
        lost_group: the group whose engines this one takes over; None for a new group.
    """

    def __init__(
        self,
        settings: GroupSettings,
        slots: Sequence[EngineSlot],
        placement: EnginePlacement,
        lost_group: LostGroup | None = None,
    ) -> None:
        super().__init__(
            settings,
            slots,
            RayLauncher(placement, slots),
            timeline=create_timeline(settings.log_dir, settings.source, otel=settings.otel),
        )
        self._lost_group = lost_group

    async def start(self) -> GroupStatus:
        keep_what_is_loaded()
        lost = self._lost_group
        if lost is None:
            return await super().start()
        running = await running_engines(lost, kill_timeout_s(self._settings.group.engine))
        return await self.take_over(lost.known, running, lost.version)


class RouterActor(RouterHost):
    """A ``RouterHost``: HTTP in its own thread, control through actor calls."""

    async def start(self) -> Endpoint:
        keep_what_is_loaded()
        take_short_turns()
        return await super().start()


class RolloutServerActor(RolloutServer):
    """A ``RolloutServer`` that creates its group and router actors; they end with it."""

    def __init__(
        self,
        name: str,
        run: RunFolder,
        config: ServerConfig,
        parts: ServerParts,
        journal: ServerJournal,
        store: StoreTerms | None = None,
        agents: Agents | None = None,
    ) -> None:
        weight_store: WeightStore | None = None
        if store is not None and agents is not None:
            weight_store = WeightStore(store, agents, config.weights.update)
        self._parts = ServerActors(name, config.router, parts)
        super().__init__(
            name,
            config,
            self._parts.groups(),
            self._parts.first_router(),
            store=weight_store,
            timeline=create_timeline(run.of_server(name), name, otel=config.timeline.otel),
            page=create_page(config, run, name),
            actor_factory=self._parts,
            journal=journal,
        )

    async def host_engine(
        self, engine_id: str, shares: Sequence[NodeShare], takes: Mapping[str, float]
    ) -> list[Any]:
        """Actors for the parts of an engine, in order of rank; they end with this actor.

        Args:
            takes: what each takes of its bundle, by Ray's names.
        """
        return self._parts.host_engine(engine_id, shares, takes)

    async def start(self) -> ServerStatus:
        keep_what_is_loaded()
        return await super().start()

    async def end(self) -> None:
        """``stop``, then end the actors that it created."""
        try:
            await self.stop()
        finally:
            self._parts.end()
