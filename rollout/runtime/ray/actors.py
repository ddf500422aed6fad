"""The actor classes: the plain classes, with the differences for an actor.

All are async actors.  Every error of this library survives pickling, so it needs no translation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import ray
from engines.protocol import Endpoint

from rollout.config import ServerConfig
from rollout.config.run_dir import RunFolder
from rollout.control.group.engine_recovery import LostState
from rollout.control.group.server_group import GroupSettings, ServerGroup
from rollout.control.server.journal import JournalRecord, ServerJournal, read
from rollout.control.server.server import RolloutServer
from rollout.core.errors import RolloutError
from rollout.core.types import EngineSlot, GroupStatus, NodeShare, ServerStatus
from rollout.observability.page.page_host import create_page
from rollout.observability.timeline.span_file import create_timeline
from rollout.rules.lifecycle import Command
from rollout.runtime.ray.actor_factory import LostGroup, ServerActors, ServerParts
from rollout.runtime.ray.engine_launcher import EnginePlacement, RayLauncher
from rollout.runtime.ray.router_actor import was_restarted
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
        self._launcher = RayLauncher(placement, slots)
        super().__init__(
            settings,
            slots,
            self._launcher,
            timeline=create_timeline(settings.log_dir, settings.source, otel=settings.otel),
        )
        self._lost_group = lost_group

    async def start(self) -> GroupStatus:
        keep_what_is_loaded()
        lost = self._lost_group
        if lost is None:
            return await super().start()
        engines = {engine.engine_id: engine for engine in lost.state.known.engines}
        running = await asyncio.gather(
            *(
                self._launcher.find(
                    self._starter.spec(self._slots[name], engine.process_name),
                    engine,
                    lost.hosts.get(name, ()),
                )
                for name, engine in engines.items()
            )
        )
        return await self.take_over(lost.state, dict(zip(engines, running, strict=True)))


def lost_groups(record: JournalRecord, parts: ServerParts) -> dict[str, LostState]:
    """The groups of a lost server, by its record."""
    lost: dict[str, LostState] = {}
    for name, (settings, _) in parts.groups.items():
        phase = record.phases[name]
        known = GroupStatus(
            name,
            settings.group.worker_type,
            phase,
            settings.group.needs_offload,
            tuple(one.status(phase) for one in record.engines if one.group == name),
            kind=settings.group.engine.kind.value,
        )
        command = record.unfinished.get(name)
        lost[name] = LostState(known, Command(command) if command else None, record.base_version)
    return lost


def at_page_of(config: ServerConfig, record: JournalRecord) -> ServerConfig:
    """The settings of a server whose page is where that of a lost one was."""
    if not record.page:
        return config
    page = config.page.model_copy(update={"port": Endpoint.of_url(record.page).port})
    return config.model_copy(update={"page": page})


class RolloutServerActor(RolloutServer):
    """A ``RolloutServer`` that creates its group actors; they end with it.

    If its process is lost, Ray starts it again.  It continues by the journal, and calls wait until
    it has taken the place of the lost one.
    """

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
        self._lost: JournalRecord | None = None
        if was_restarted():
            self._lost = read(journal.path)
            if why := self._lost.why_lost:
                raise RolloutError(f"server {name} cannot go on: {why}; launch it again")
            config = at_page_of(config, self._lost)
            # Ray refuses a call while it starts an actor again, and repeats this one.
            this_actor = ray.get_runtime_context().current_actor
            this_actor.take_place.options(max_task_retries=-1).remote()
        groups = None if self._lost is None else lost_groups(self._lost, parts)
        self._parts = ServerActors(name, parts, groups)
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
        if self._lost is not None:
            self._lock.opened.clear()

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

    async def take_place(self) -> None:
        """Continue in the place of the lost process of this server, once."""
        lost, self._lost = self._lost, None
        if lost is None:
            return
        keep_what_is_loaded()
        try:
            await super().continue_lost(lost)
        finally:
            self._lock.opened.set()

    async def end(self) -> None:
        """``stop``, then end the actors that it created."""
        await self._lock.opened.wait()
        try:
            await self.stop()
        finally:
            self._parts.end()


# Commands wait for the lock, and what recovery calls does not wait.
_WAIT = (
    *("status", "observe", "log_tail", "fence", "add_engine", "expected_manifest"),
    *("fingerprint_methods", "make_way_in_store", "offer_to_store"),
)


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, once the server has taken the place of a lost one."""

    @wraps(method)
    async def call(server: RolloutServerActor, *args: Any, **kwargs: Any) -> Any:
        await server._lock.opened.wait()
        return await method(server, *args, **kwargs)

    return call


for _name in _WAIT:
    setattr(RolloutServerActor, _name, _waiting(getattr(RolloutServer, _name)))
