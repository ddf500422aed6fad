"""Creates the actors of one server, and replaces lost ones.

Always true: the server owns the actors of engines, so that they outlive a lost group.  A lost actor
is killed before another replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rollout.control.engine.group_settings import GroupSettings
from rollout.control.group.engine_recovery import LostState
from rollout.control.group.server_group import ServerGroup
from rollout.core.types import EngineSlot, NodeShare
from rollout.router.host import RouterHost
from rollout.rules.deadlines import kill_timeout_s
from rollout.runtime.ray.engine_launcher import EnginePlacement, end_host
from rollout.runtime.ray.handles import remote_group, remote_router


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The arguments for the actors of a server.

    Attributes:
        routers: their actors; they outlive a lost server.
        group_class: a Ray actor class, with the options that place it.
        groups: settings and slots by group.
    """

    routers: Sequence[Any]
    group_class: Any
    groups: Mapping[str, tuple[GroupSettings, Sequence[EngineSlot]]]
    placement: EnginePlacement


@dataclass(frozen=True, slots=True)
class LostGroup:
    """A lost group, for the group that replaces it.

    Attributes:
        state: see ``ServerGroup.take_over``.
        hosts: by engine, the node and the actor of each part; none for attached engines.
    """

    state: LostState
    hosts: Mapping[str, Sequence[tuple[str, Any]]]


class ServerActors:
    """The actors of one server; an ``ActorFactory``.

    Args:
        lost: the groups of a lost server, in whose place this one is; None for a new one.
    """

    def __init__(
        self, name: str, parts: ServerParts, lost: Mapping[str, LostState] | None = None
    ) -> None:
        self._name = name
        self._parts = parts
        self._groups: dict[str, Any] = {
            group: parts.group_class.remote(
                settings, slots, parts.placement, LostGroup(lost[group], {}) if lost else None
            )
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
        return [remote_router(router, f"{self._name}/router") for router in self._parts.routers]

    def host_engine(
        self, engine_id: str, shares: Sequence[NodeShare], takes: Mapping[str, float]
    ) -> list[Any]:
        """See ``RolloutServerActor.host_engine``."""
        placement = self._parts.placement
        for _, lost in self._hosts.get(engine_id, []):
            ray.kill(lost)
        made = [(share.node_id, placement.make(share, takes)) for share in shares]
        self._hosts[engine_id] = made
        return [actor for _, actor in made]

    async def make_group(self, name: str, lost: LostState) -> ServerGroup:
        """A group with the engines of the lost one."""
        ray.kill(self._groups[name])
        settings, slots = self._parts.groups[name]
        known = lost.known.engines
        processes = {one.process_name or one.engine_id: one.engine_id for one in known}
        for slot in slots:
            for process in {slot.engine_id, slot.standby_name} - processes.keys():
                for _, actor in self._hosts.pop(process, []):  # it may be sleeping
                    await end_host(actor, kill_timeout_s(settings.group.engine))
        hosts = {
            engine_id: self._hosts[process]
            for process, engine_id in processes.items()
            if process in self._hosts
        }
        self._groups[name] = self._parts.group_class.remote(
            settings, slots, self._parts.placement, LostGroup(lost, hosts)
        )
        return self.groups()[name]

    def end(self) -> None:
        """Kill all actors, after their server has stopped."""
        hosts = [actor for parts in self._hosts.values() for _, actor in parts]
        for actor in (*hosts, *self._groups.values(), *reversed(self._parts.routers)):
            ray.kill(actor)
