"""Creates the actors of one server, and replaces lost ones.

Always true: the server owns the actors of engines, so that they outlive a lost group.  A lost actor
is killed before another replaces it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from engines.launch import AttachedEngine, RunningEngine

from rollout.config import RouterConfig
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.group.server_group import ServerGroup
from rollout.core.types import EngineSlot, EngineStatus, GroupStatus, NodeShare
from rollout.router.host import RouterHost, new_run
from rollout.router.state.state_file import StateFile
from rollout.runtime.ray.engine_handle import EnginePart, RayEngine, StartedProcess
from rollout.runtime.ray.engine_launcher import EnginePlacement
from rollout.runtime.ray.handles import remote_group, remote_router
from rollout.runtime.ray.remote_call import RemoteCall

logger = logging.getLogger(__name__)

_QUERY_TIMEOUT_S = 5.0
# One serves, and one is ready to: a process that Ray restarts needs two seconds.
_NUM_ROUTERS = 2


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The arguments for the actors of a server.

    Attributes:
        router_class, group_class: Ray actor classes, with the options that place them.
        routers: their state.
        groups: settings and slots by group.
    """

    router_class: Any
    group_class: Any
    routers: StateFile
    groups: Mapping[str, tuple[GroupSettings, Sequence[EngineSlot]]]
    placement: EnginePlacement


@dataclass(frozen=True, slots=True)
class LostGroup:
    """A lost group, for the group that replaces it.

    Attributes:
        known: its last known status.
        hosts: by engine, the node and the actor of each part; none for attached engines.
        version: see ``ServerGroup.take_over``.
    """

    known: GroupStatus
    hosts: Mapping[str, Sequence[tuple[str, Any]]]
    version: int | None


class ServerActors:
    """The actors of one server; an ``ActorFactory``."""

    def __init__(self, name: str, router: RouterConfig, parts: ServerParts) -> None:
        self._name = name
        self._parts = parts
        make, shared = parts.router_class.remote, {"run": new_run(), "state": parts.routers}
        owner = parts.placement.owner
        self._routers: list[Any] = [
            make(router, number=number, server=owner, **shared) for number in range(_NUM_ROUTERS)
        ]
        self._groups: dict[str, Any] = {
            group: parts.group_class.remote(settings, slots, parts.placement)
            for group, (settings, slots) in parts.groups.items()
        }
        self._hosts: dict[str, list[tuple[str, Any]]] = {}

    def groups(self) -> dict[str, ServerGroup]:
        return {
            group: remote_group(actor, f"{self._name}/{group}")
            for group, actor in self._groups.items()
        }

    def routers(self) -> list[RouterHost]:
        """The first one is to serve, and another one in its place when it is lost."""
        return [remote_router(router, f"{self._name}/router") for router in self._routers]

    def host_engine(
        self, engine_id: str, shares: Sequence[NodeShare], takes: Mapping[str, float]
    ) -> list[Any]:
        """See ``RolloutServerActor.host_engine``."""
        placement = self._parts.placement
        made = [(share.node_id, placement.make(share, takes)) for share in shares]
        self._hosts[engine_id] = made
        return [actor for _, actor in made]

    async def make_group(self, name: str, known: GroupStatus, version: int | None) -> ServerGroup:
        """A group with the engines of the lost one."""
        ray.kill(self._groups[name])
        settings, slots = self._parts.groups[name]
        processes = {one.process_name or one.engine_id: one.engine_id for one in known.engines}
        for slot in slots:
            for process in {slot.engine_id, slot.standby_name} - processes.keys():
                for _, actor in self._hosts.pop(process, []):  # it may be sleeping
                    ray.kill(actor)
        hosts = {
            engine_id: self._hosts[process]
            for process, engine_id in processes.items()
            if process in self._hosts
        }
        self._groups[name] = self._parts.group_class.remote(
            settings, slots, self._parts.placement, LostGroup(known, hosts, version)
        )
        return self.groups()[name]

    def end(self) -> None:
        """Kill all actors, after their server has stopped."""
        hosts = [actor for parts in self._hosts.values() for _, actor in parts]
        for actor in (*hosts, *self._groups.values(), *reversed(self._routers)):
            ray.kill(actor)


async def running_engines(lost_group: LostGroup, kill_timeout_s: float) -> dict[str, RunningEngine]:
    """The engines of a lost group, for the group that replaces it."""
    found: dict[str, RunningEngine] = {}
    for engine in lost_group.known.engines:
        hosts = lost_group.hosts.get(engine.engine_id)
        if hosts is None:
            found[engine.engine_id] = AttachedEngine(engine.endpoint, engine.engine_id)
        else:
            parts = (_part(engine, rank, *host) for rank, host in enumerate(hosts))
            found[engine.engine_id] = RayEngine(
                engine.engine_id, await asyncio.gather(*parts), kill_timeout_s
            )
    return found


async def _part(known: EngineStatus, rank: int, node_id: str, actor: Any) -> EnginePart:
    """What its actor has started; without a reply, what is known of it."""
    name = f"engine {known.engine_id}"
    started: StartedProcess | None = None
    try:
        async with asyncio.timeout(_QUERY_TIMEOUT_S):
            started = await RemoteCall[StartedProcess | None](actor.started.remote(), name)
    except Exception as error:
        logger.warning("%s: its actor does not report what it has started: %s", name, error)
    if started is None:
        pid = known.pid if rank == 0 else None
        started = StartedProcess(known.endpoint, pid, known.processes[rank : rank + 1])
    return EnginePart(node_id, actor, started)
