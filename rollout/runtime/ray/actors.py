"""The actor classes: the plain classes, with the differences for an actor.

All are async actors.  Every error of this library survives pickling, so it needs no translation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.config import ServerConfig
from rollout.config.run_dir import RunFolder
from rollout.control.group.server_group import GroupSettings, ServerGroup
from rollout.control.server.journal import ServerJournal
from rollout.control.server.server import RolloutServer
from rollout.core.types import EngineSlot, GroupStatus, NodeShare, ServerStatus
from rollout.observability.page.page_host import create_page
from rollout.observability.timeline.span_file import create_timeline
from rollout.rules.deadlines import kill_timeout_s
from rollout.runtime.ray.actor_factory import LostGroup, ServerActors, ServerParts, running_engines
from rollout.runtime.ray.engine_launcher import EnginePlacement, RayLauncher
from rollout.runtime.worker_process import keep_what_is_loaded
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.store import WeightStore


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
            self._parts.routers(),
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

    async def start(self, expect_version: int = 0) -> ServerStatus:
        keep_what_is_loaded()
        return await super().start(expect_version)

    async def end(self) -> None:
        """``stop``, then end the actors that it created."""
        try:
            await self.stop()
        finally:
            self._parts.end()
