"""The actor of a server, which creates the actors of its parts and replaces lost ones.

It is an async actor: the plain class, with the differences for an actor.  Every error of this
library survives pickling, so it needs no translation.

Always true: the actors of engines outlive a lost group and a lost server, and are found by name.  A
lost actor is killed before another replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import ray
from engines.process.process_identity import is_visible, kill_all
from engines.protocol import Endpoint, ProcessIdentity

from rollout.config import ServerConfig
from rollout.config.run_dir import RunFolder
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.group.engine_recovery import LostState
from rollout.control.group.server_group import ServerGroup
from rollout.control.server.agents_client import AgentsClient, Worker
from rollout.control.server.group_registry import lost_groups
from rollout.control.server.journal import JournalRecord, ServerJournal, read
from rollout.control.server.server import RolloutServer
from rollout.core.errors import RolloutError
from rollout.core.types import EngineSlot, ServerStatus
from rollout.observability.page.page_host import PageHost
from rollout.observability.timeline.span_file import create_timeline
from rollout.router.host import RouterHost
from rollout.runtime.ray.engine_launcher import EnginePlacement
from rollout.runtime.ray.handles import remote_group, remote_router, remote_worker
from rollout.runtime.ray.remote_call import TracedActor
from rollout.runtime.ray.router_actor import was_restarted
from rollout.runtime.worker_process import keep_what_is_loaded
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.store import WeightStore


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The arguments for the actors of a server.

    Attributes:
        router, workers: their actors, which outlive a lost server.
        group_class: a Ray actor class, with the options that place it.
        groups: settings and slots by group.
    """

    router: Any
    workers: Sequence[Any]
    group_class: Any
    groups: Mapping[str, tuple[GroupSettings, Sequence[EngineSlot]]]
    placement: EnginePlacement


class ServerActors:
    """The actors of one server; an ``ActorFactory``.

    Args:
        lost: the groups of a lost server, in whose place this one is, or None for a new one.
    """

    def __init__(
        self, name: str, parts: ServerParts, lost: Mapping[str, LostState] | None = None
    ) -> None:
        self._name = name
        self._parts = parts
        self._groups: dict[str, Any] = {
            group: parts.group_class.remote(
                settings, slots, parts.placement, lost[group] if lost else None
            )
            for group, (settings, slots) in parts.groups.items()
        }

    def groups(self) -> dict[str, ServerGroup]:
        return {
            group: remote_group(actor, f"{self._name}/{group}")
            for group, actor in self._groups.items()
        }

    def router(self) -> RouterHost:
        return remote_router(self._parts.router, f"{self._name}/router")

    def workers(self) -> list[Worker]:
        """The workers of its agents."""
        return [
            remote_worker(actor, f"{self._name}/agents/{number}")
            for number, actor in enumerate(self._parts.workers)
        ]

    async def make_group(self, name: str, lost: LostState) -> ServerGroup:
        """A group with the engines of the lost one."""
        ray.kill(self._groups[name])
        settings, slots = self._parts.groups[name]
        self._groups[name] = self._parts.group_class.remote(
            settings, slots, self._parts.placement, lost
        )
        return self.groups()[name]

    def end_router(self, process: ProcessIdentity) -> None:
        """Kill this process of the router, if it lives; Ray starts another.

        Both are on one node.  ``ray.kill`` does not end a process that has stopped.
        """
        if is_visible(process):
            kill_all({process.pid: process.started})

    def end(self) -> None:
        """Kill all actors, after their server has stopped."""
        for actor in (*self._groups.values(), *self._parts.workers, self._parts.router):
            ray.kill(actor)


def at_page_of(config: ServerConfig, record: JournalRecord) -> ServerConfig:
    """The settings of a server whose page is where that of a lost one was."""
    if not record.page:
        return config
    page = config.page.model_copy(update={"port": Endpoint.of_url(record.page).port})
    return config.model_copy(update={"page": page})


class RolloutServerActor(TracedActor, RolloutServer):
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
        groups = None if self._lost is None else lost_groups(self._lost, config.groups)
        self._parts = ServerActors(name, parts, groups)
        super().__init__(
            name,
            config,
            self._parts.groups(),
            self._parts.router(),
            store=weight_store,
            timeline=create_timeline(run.of_server(name), name, otel=config.timeline.otel),
            page=PageHost(config, run, name),
            agents=AgentsClient(name, self._parts.workers(), run.of_agents(name)),
            actor_factory=self._parts,
            journal=journal,
        )
        if self._lost is not None:
            self._lock.opened.clear()

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
