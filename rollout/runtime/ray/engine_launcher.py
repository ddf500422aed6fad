"""Launches engines under actors: one actor for each node of an engine, on its slot's bundle.

The actor only owns the process (start, measure, end).  The group calls the engine directly over
HTTP: an actor call in between would cost 0.3 ms of CPU.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from engines.launch import AttachedEngine, EngineLauncher, EngineSpec, RunningEngine
from engines.protocol.plain_text import describe
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.core.fanout import whole_or_none
from rollout.core.types import EngineSlot, EngineStatus, NodeShare
from rollout.runtime.ray.engine_handle import EnginePart, RayEngine, StartedProcess
from rollout.runtime.ray.nodes import LOOPBACK, current_share, node_addresses
from rollout.runtime.ray.remote_call import RemoteCall

logger = logging.getLogger(__name__)

_GPU_IDS_TIMEOUT_S = 60.0
_QUERY_TIMEOUT_S = 5.0
# An engine without an owner ends a little later.
_ADOPT_TIMEOUT_S = 50.0


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
        shares = await self._current_shares(slot)
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
            await asyncio.gather(*(end_host(actor, spec.kill_timeout_s) for actor in actors))
            raise
        parts = [
            EnginePart(share.node_id, actor, process)
            for share, actor, process in zip(shares, actors, started, strict=True)
        ]
        return self._engine(spec, parts)

    async def find(
        self, spec: EngineSpec, known: EngineStatus, hosts: Sequence[tuple[str, Any]]
    ) -> RunningEngine:
        """An engine of a lost group; other actors adopt it if its own are lost too.

        Args:
            known: its last known status.
            hosts: node and actor of each of its parts; none if they are not known.
        """
        slot = self._slots[spec.engine_id]
        if not slot.bundle_indices:
            return AttachedEngine(known.endpoint, spec.engine_id)
        nodes = hosts or [(share.node_id, None) for share in slot.shares]
        parts: Sequence[EnginePart] = await asyncio.gather(
            *(_part(known, rank, *host) for rank, host in enumerate(nodes))
        )
        if any(part.actor is None for part in parts):
            try:
                parts = await self._adopt(spec, parts)
            except Exception as error:
                logger.warning("engine %s is not adopted: %s", spec.engine_id, describe(error))
        return self._engine(spec, parts)

    def _engine(self, spec: EngineSpec, parts: Sequence[EnginePart]) -> RayEngine:
        adopt = partial(self._adopt, spec)
        return RayEngine(spec.engine_id, parts, spec.kill_timeout_s, adopt)

    async def _adopt(self, spec: EngineSpec, lost: Sequence[EnginePart]) -> list[EnginePart]:
        """The parts of an engine whose actors are lost, with other actors.

        Raises:
            Exception: it has ended, or its nodes are lost.
        """
        slot, name = self._slots[spec.engine_id], f"engine {spec.engine_id}"
        async with asyncio.timeout(_ADOPT_TIMEOUT_S):
            shares = await self._current_shares(slot)
            actors = await self._make_actors(slot, shares, spec.engine_id)
            try:
                specs = _per_node(spec, shares, [part.started.endpoint.host for part in lost])
                started = await whole_or_none(
                    RemoteCall[StartedProcess](actor.adopt.remote(of_part, part.started), name)
                    for of_part, actor, part in zip(specs, actors, lost, strict=True)
                )
            except BaseException:
                for actor in actors:
                    ray.kill(actor)
                raise
        return [
            EnginePart(share.node_id, actor, process)
            for share, actor, process in zip(shares, actors, started, strict=True)
        ]

    async def _current_shares(self, slot: EngineSlot) -> list[NodeShare]:
        group = self._placement.placement_group
        return [
            await current_share(slot.engine_id, group, share, _GPU_IDS_TIMEOUT_S)
            for share in slot.shares
        ]

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


async def _part(known: EngineStatus, rank: int, node_id: str, actor: Any) -> EnginePart:
    """What its actor has started; what is known of it, if the actor is lost or owns nothing yet."""
    name = f"engine {known.engine_id}"
    if actor is not None:
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                call = RemoteCall[StartedProcess | None](actor.started.remote(), name)
                if (started := await call) is not None:
                    return EnginePart(node_id, actor, started)
        except Exception as error:
            logger.warning("%s: its actor does not report what it has started: %s", name, error)
    pid = known.pid if rank == 0 else None
    started = StartedProcess(known.endpoint, pid, known.processes[rank : rank + 1])
    return EnginePart(node_id, None, started)


async def end_host(actor: Any, timeout_s: float) -> None:
    """End the engine of an actor, if it has one, and the actor; a lost actor is ended."""
    try:
        async with asyncio.timeout(timeout_s):
            await RemoteCall(actor.kill.remote(), "of an engine")
    except Exception as error:
        logger.warning("an engine may not have ended: %s", describe(error))
    finally:
        ray.kill(actor)


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
