"""The actors of one server: made by it, and made again when one is lost.

Always true: the actors that own engines belong to the server, so that they outlive the group that
asked for them; before another takes the place of a lost actor, that one is ended for certain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from engines.attached import AttachedEngine
from engines.launch import RunningEngine
from engines.protocol import Endpoint

from rollout.actors.calls import RemoteCall
from rollout.actors.engines import EnginePart, RayEngine, Started
from rollout.actors.handles import RayGroup, RayRouter
from rollout.actors.launcher import EnginePlacement
from rollout.config import RouterConfig
from rollout.group_settings import GroupSettings
from rollout.types import EngineSlot, EngineStatus, GroupStatus, NodeShare

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerParts:
    """What a server makes its actors from.

    Attributes:
        router_class, group_class: already made remote, with the options that place them.
        groups: settings and slots by group.
    """

    router_class: Any
    group_class: Any
    groups: Mapping[str, tuple[GroupSettings, Sequence[EngineSlot]]]
    placement: EnginePlacement


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a group that was lost leaves to the next.

    Attributes:
        known: the lost one as it was known last.
        hosts: by engine, the node and the actor of each of its parts; none for attached ones.
        version: see ``ServerGroup.take_over``.
    """

    known: GroupStatus
    hosts: Mapping[str, Sequence[tuple[str, Any]]]
    version: int | None


class MadeParts:
    """The actors that one server has made; a ``Remaker`` of them."""

    def __init__(self, name: str, router: RouterConfig, parts: ServerParts) -> None:
        self._name = name
        self._parts = parts
        self._router_config = router
        self._router: Any = parts.router_class.remote(router)
        self._groups: dict[str, Any] = {
            group: parts.group_class.remote(settings, slots, parts.placement)
            for group, (settings, slots) in parts.groups.items()
        }
        self._hosts: dict[str, list[tuple[str, Any]]] = {}

    def groups(self) -> dict[str, RayGroup]:
        return {
            group: RayGroup(one, f"{self._name}/{group}") for group, one in self._groups.items()
        }

    def first_router(self) -> RayRouter:
        return RayRouter(self._router, f"{self._name}/router")

    def host_engine(
        self, engine_id: str, shares: Sequence[NodeShare], num_cpus: float
    ) -> list[Any]:
        """Actors for the parts of an engine, in order of rank."""
        made = [(one.node_id, self._parts.placement.make(one, num_cpus)) for one in shares]
        self._hosts[engine_id] = made
        return [actor for _, actor in made]

    async def router(self, endpoint: Endpoint) -> RayRouter:
        """A router on the port of the one that is lost."""
        ray.kill(self._router)
        config = self._router_config.model_copy(update={"port": endpoint.port})
        self._router = self._parts.router_class.remote(config)
        return self.first_router()

    async def group(self, name: str, known: GroupStatus, version: int | None) -> RayGroup:
        """A group with the engines of the one that is lost."""
        ray.kill(self._groups[name])
        settings, slots = self._parts.groups[name]
        ids = [one.engine_id for one in known.engines]
        for slot in slots:
            if slot.engine_id not in ids:  # it was removed, and may sleep
                for _, actor in self._hosts.pop(slot.engine_id, []):
                    ray.kill(actor)
        hosts = {one: self._hosts[one] for one in ids if one in self._hosts}
        self._groups[name] = self._parts.group_class.remote(
            settings, slots, self._parts.placement, Inheritance(known, hosts, version)
        )
        return self.groups()[name]

    def end(self) -> None:
        """End them all; their server has stopped what they held."""
        hosts = [actor for parts in self._hosts.values() for _, actor in parts]
        for actor in (*hosts, *self._groups.values(), self._router):
            ray.kill(actor)


async def running_engines(inherited: Inheritance) -> dict[str, RunningEngine]:
    """The engines of a lost group, as the next one drives them."""
    found: dict[str, RunningEngine] = {}
    for one in inherited.known.engines:
        hosts = inherited.hosts.get(one.engine_id)
        if hosts is None:
            found[one.engine_id] = AttachedEngine(one.endpoint, one.engine_id)
        else:
            asked = (_part(one, rank, *host) for rank, host in enumerate(hosts))
            found[one.engine_id] = RayEngine(one.engine_id, await asyncio.gather(*asked))
    return found


async def _part(known: EngineStatus, rank: int, node_id: str, actor: Any) -> EnginePart:
    """What its actor has started; if that cannot say, what is known of it."""
    name = f"engine {known.engine_id}"
    started: Started | None = None
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            started = await RemoteCall[Started | None](actor.started.remote(), name)
    except Exception as error:
        logger.warning("%s: its actor does not say what it has started: %s", name, error)
    if started is None:
        pid = known.pid if rank == 0 else None
        started = Started(known.endpoint, pid, known.processes[rank : rank + 1])
    return EnginePart(node_id, actor, started)
