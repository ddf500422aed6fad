"""Launches engines under actors: one actor for each node of an engine, on its slot's bundle.

The actor only owns the process (start, measure, end).  The group calls the engine directly over
HTTP: an actor call in between would cost 0.3 ms of CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from engines.launch import EngineLauncher, EngineSpec, RunningEngine
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.core.fanout import whole_or_none
from rollout.core.types import EngineSlot, NodeShare
from rollout.runtime.ray.engine_handle import EnginePart, RayEngine, StartedProcess
from rollout.runtime.ray.nodes import LOOPBACK, current_share, node_addresses
from rollout.runtime.ray.remote_call import RemoteCall

_GPU_IDS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Where engine actors are placed, and which actor owns them.

    Attributes:
        placement_group: the Ray placement group of the run.
        actor_class: ``EngineActor`` as a Ray actor class.
        launcher: starts an engine on the node of its actor.
        owner: namespace and name of the actor that creates them, so that they outlive a lost
            group; None: the caller creates them.
    """

    placement_group: Any
    actor_class: Any
    launcher: EngineLauncher
    owner: tuple[str, str] | None = None

    def make(self, share: NodeShare, takes: Mapping[str, float]) -> Any:
        """An actor for the part of an engine on one node; it ends with its creator."""
        return self.actor_class.options(
            **takes,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self.placement_group,
                placement_group_bundle_index=share.bundle_indices[0],
                placement_group_capture_child_tasks=False,
            ),
        ).remote(self.launcher)


class RayLauncher:
    """An ``EngineLauncher`` that starts every engine under actors on its slot."""

    def __init__(self, placement: EnginePlacement, slots: Sequence[EngineSlot]) -> None:
        self._placement = placement
        self._slots = {name: slot for slot in slots for name in (slot.engine_id, slot.standby_name)}

    async def launch(self, spec: EngineSpec) -> RunningEngine:
        """Create the actors, and start the engine in them.

        Raises:
            PlacementError: a node of its slot is lost, and no other node has room.
            Exception: the errors of the engine's start.
        """
        slot = self._slots[spec.engine_id]
        if not slot.bundle_indices:  # attached: there is no process to own
            return await self._placement.launcher.launch(spec)
        group = self._placement.placement_group
        shares = [
            await current_share(spec.engine_id, group, share, _GPU_IDS_TIMEOUT_S)
            for share in slot.shares
        ]
        hosts = await _hosts(shares)
        actors = await self._make_actors(slot, shares, spec.engine_id)
        name = f"engine {spec.engine_id}"
        try:
            specs = _per_node(spec, shares, hosts)
            if len(specs) > 1:
                address = await RemoteCall[str](actors[0].hold_address.remote(hosts[0]), name)
                specs = [replace(part, dist_init_addr=address) for part in specs]
            # A rank waits for the others, so when one has ended, the others would wait for nothing.
            started = await whole_or_none(
                RemoteCall[StartedProcess](actor.launch.remote(part), name)
                for part, actor in zip(specs, actors, strict=True)
            )
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise
        parts = [
            EnginePart(share.node_id, actor, process)
            for share, actor, process in zip(shares, actors, started, strict=True)
        ]
        return RayEngine(spec.engine_id, parts, spec.kill_timeout_s)

    async def _make_actors(
        self, slot: EngineSlot, shares: Sequence[NodeShare], process_name: str
    ) -> list[Any]:
        owner, takes = self._placement.owner, _takes_of_bundle(slot)
        if process_name != slot.engine_id:  # the engine itself has taken it
            takes = dict.fromkeys(takes, 0.0)
        if owner is None:
            return [self._placement.make(share, takes) for share in shares]
        namespace, name = owner
        server: Any = await asyncio.to_thread(ray.get_actor, name, namespace)
        made: list[Any] = await RemoteCall(
            server.host_engine.remote(process_name, tuple(shares), takes), name
        )
        return made


def _takes_of_bundle(slot: EngineSlot) -> dict[str, float]:
    """What an engine's actor takes of its first bundle on each node.

    Nothing of a shared one, so that an actor of the trainer fits with the whole GPU and CPU.  The
    GPU ids are known from ``gpu_ids_of_bundle``.  Of an engine's own bundle the whole GPU, so that
    no actor of the trainer is placed there.
    """
    if not slot.gpu_ids:
        return {"num_cpus": slot.num_cpus, "num_gpus": 0}
    return {"num_cpus": 0, "num_gpus": 0 if slot.shares_gpus else 1}


async def _hosts(shares: Sequence[NodeShare]) -> list[str]:
    """The address each part binds: loopback if the cluster has only one host."""
    of_node = await node_addresses()
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
