"""Engines owned by actors: one actor for each node of an engine, on the bundle of its slot.

The actor only owns the process (start, measure, end).  Lifecycle calls go from the group straight
to the engine over HTTP: an actor call in between costs the caller 0.3 ms of CPU each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from engines.launch import EngineLauncher, EngineSpec, RunningEngine
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.actors.calls import RemoteCall
from rollout.actors.engines import EnginePart, RayEngine, Started
from rollout.actors.nodes import LOOPBACK, addresses, where_now
from rollout.fanout import barrier
from rollout.types import EngineSlot, NodeShare

# What an engine actor takes of a bundle that the trainer shares; the rest is the trainer's.
_SHARE_OF_BUNDLE = 0.2
_LOOK_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Where engine actors go.

    Attributes:
        placement_group: the Ray placement group of the run.
        actor_class: ``EngineActor``, already made remote.
        launcher: starts an engine on the node its actor is on.
        owner: namespace and name of the actor that makes them, which keeps them alive when their
            group is lost; None for the one that asks.
    """

    placement_group: Any
    actor_class: Any
    launcher: EngineLauncher
    owner: tuple[str, str] | None = None

    def make(self, share: NodeShare, num_cpus: float) -> Any:
        """An actor that can start the part of an engine on one node; it dies with its maker."""
        return self.actor_class.options(
            num_cpus=_SHARE_OF_BUNDLE if share.gpu_ids else num_cpus,
            num_gpus=_SHARE_OF_BUNDLE if share.gpu_ids else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self.placement_group,
                placement_group_bundle_index=share.bundle_indices[0],
                placement_group_capture_child_tasks=False,
            ),
        ).remote(self.launcher)


class RayLauncher:
    """An ``EngineLauncher`` that puts every engine under actors on its slot."""

    def __init__(self, placement: EnginePlacement, slots: Sequence[EngineSlot]) -> None:
        self._placement = placement
        self._slots = {slot.engine_id: slot for slot in slots}

    async def launch(self, spec: EngineSpec) -> RunningEngine:
        """Make the actors and let them start the engine; raises what the engine's start raises.

        Raises:
            PlacementError: a node of its slot is lost, and nothing has taken its place.
        """
        slot = self._slots[spec.engine_id]
        if not slot.bundle_indices:  # attached: there is no process to own
            return await self._placement.launcher.launch(spec)
        shares = [await self._where_now(spec.engine_id, share) for share in slot.shares]
        hosts = await _hosts(shares)
        actors = await self._make_actors(slot, shares)
        name = f"engine {spec.engine_id}"
        try:
            specs = _per_node(spec, shares, hosts)
            if len(specs) > 1:
                held = RemoteCall[str](actors[0].hold_address.remote(hosts[0]), name)
                address = await held
                specs = [replace(one, dist_init_addr=address) for one in specs]
            started = await barrier(
                {
                    str(rank): RemoteCall[Started](actor.launch.remote(specs[rank]), name)
                    for rank, actor in enumerate(actors)
                }
            )
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise
        parts = [
            EnginePart(share.node_id, actor, one)
            for share, actor, one in zip(shares, actors, started.values(), strict=True)
        ]
        return RayEngine(spec.engine_id, parts)

    async def _where_now(self, engine_id: str, share: NodeShare) -> NodeShare:
        group = self._placement.placement_group
        return await where_now(engine_id, group, share, _SHARE_OF_BUNDLE, _LOOK_TIMEOUT_S)

    async def _make_actors(self, slot: EngineSlot, shares: Sequence[NodeShare]) -> list[Any]:
        owner = self._placement.owner
        if owner is None:
            return [self._placement.make(share, slot.num_cpus) for share in shares]
        namespace, name = owner
        server: Any = await asyncio.to_thread(ray.get_actor, name, namespace)
        made: list[Any] = await RemoteCall(
            server.host_engine.remote(slot.engine_id, tuple(shares), slot.num_cpus), name
        )
        return made


async def _hosts(shares: Sequence[NodeShare]) -> list[str]:
    """What each part binds: loopback where nobody else needs to reach it."""
    of_node = await addresses()
    if len(set(of_node.values())) == 1:
        return [LOOPBACK] * len(shares)
    return [of_node[share.node_id] for share in shares]


def _per_node(
    spec: EngineSpec, shares: Sequence[NodeShare], hosts: Sequence[str]
) -> list[EngineSpec]:
    return [
        replace(
            spec,
            host=host,
            gpu_ids=share.gpu_ids,
            num_nodes=len(shares),
            node_rank=rank,
            log_path=spec.log_path if not rank else f"{spec.log_path}.node-{rank}",
        )
        for rank, (share, host) in enumerate(zip(shares, hosts, strict=True))
    ]


__all__ = ["EnginePlacement", "RayEngine", "RayLauncher"]
