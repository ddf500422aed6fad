"""Launches engines under actors: one actor for each node of an engine, on its slot's bundle.

The actor only owns the process (start, measure, end).  The group calls the engine directly over
HTTP: an actor call in between would cost 0.3 ms of CPU.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from engines.launch import AttachedEngine, EngineLauncher, EngineSpec, RunningEngine
from engines.protocol import NO_ACCESS
from engines.protocol.plain_text import describe
from ray.util import list_named_actors
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.core.fanout import whole_or_none
from rollout.core.types import EngineSlot, EngineStatus, NodeShare
from rollout.runtime.ray.engine_handle import ActorName, EnginePart, RayEngine, StartedProcess
from rollout.runtime.ray.nodes import current_share, engine_host, node_addresses
from rollout.runtime.ray.remote_call import RemoteCall

logger = logging.getLogger(__name__)

_GPU_IDS_TIMEOUT_S = 60.0
_QUERY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Where the engine actors of a server are placed.

    Attributes:
        placement_group: the Ray placement group of the run.
        actor_class: ``EngineActor`` as a Ray actor class.
        launcher: starts an engine on the node of its actor.
        server: the server's actor.
    """

    placement_group: Any
    actor_class: Any
    launcher: EngineLauncher
    server: ActorName

    def name(self, process: str, rank: int) -> ActorName:
        """The name of the actor of one part of an engine, by which another group finds it."""
        return ActorName(self.server.namespace, f"{self._prefix}{process}/{rank}")

    @property
    def _prefix(self) -> str:
        return f"engines-of-{self.server.name}/"

    def make(self, name: ActorName, share: NodeShare, takes: Mapping[str, float]) -> Any:
        """An actor for the part of an engine on one node; one that was left is killed.  Blocks."""
        options = self.actor_class.options(
            **takes,
            name=name.name,
            namespace=name.namespace,
            lifetime="detached",
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self.placement_group,
                placement_group_bundle_index=share.bundle_indices[0],
                placement_group_capture_child_tasks=False,
            ),
        )

        def create() -> Any:
            if left := name.find():
                ray.kill(left)
            return options.remote(self.launcher, name, self.server)

        return name.once_free(create)

    def kill_actors(self) -> None:
        """Kill all engine actors of the server, and with them the engines.  Blocks."""
        for found in list_named_actors(all_namespaces=True):
            name = ActorName(found["namespace"], found["name"])
            is_ours = name.namespace == self.server.namespace
            if is_ours and name.name.startswith(self._prefix) and (actor := name.find()):
                ray.kill(actor)


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
        addresses = await node_addresses()
        hosts = [engine_host(share.node_id, addresses) for share in shares]
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
            await asyncio.gather(*(_end(actor, spec.kill_timeout_s) for actor in actors))
            raise
        parts = [EnginePart(actor, process) for actor, process in zip(actors, started, strict=True)]
        return RayEngine(spec.engine_id, parts, spec.kill_timeout_s)

    async def find(self, spec: EngineSpec, known: EngineStatus) -> RunningEngine:
        """An engine of a lost group, by its actors; it has ended if one of them is lost.

        Args:
            known: its last known status.
        """
        slot = self._slots[spec.engine_id]
        if not slot.bundle_indices:
            access = (spec.access or NO_ACCESS).of(run=spec.run)
            return AttachedEngine(known.endpoint, spec.engine_id, access)
        parts = await asyncio.gather(
            *(self._part(spec.engine_id, known, rank) for rank in range(len(slot.shares)))
        )
        return RayEngine(spec.engine_id, parts, spec.kill_timeout_s)

    async def _part(self, process: str, known: EngineStatus, rank: int) -> EnginePart:
        """What its actor has started; what is known of it, if that is lost or still starts it."""
        actor = await asyncio.to_thread(self._placement.name(process, rank).find)
        if actor is not None:
            try:
                async with asyncio.timeout(_QUERY_TIMEOUT_S):
                    call = RemoteCall[StartedProcess | None](actor.started.remote(), process)
                    if (started := await call) is not None:
                        return EnginePart(actor, started)
                    ray.kill(actor)
            except Exception as error:
                logger.warning(
                    "engine %s: its actor does not report what it has started: %s", process, error
                )
        pid = known.pid if rank == 0 else None
        node_id = self._slots[process].shares[rank].node_id
        if rank == 0 and known.node_id:
            node_id = known.node_id
        processes = known.processes[rank : rank + 1]
        started = StartedProcess(known.endpoint, pid, processes, node_id, known.access)
        return EnginePart(actor, started)

    async def end_others(self, known: Collection[str], timeout_s: float) -> None:
        """End the engines that a lost group was booting: all but the known ones."""
        names = [
            self._placement.name(process, rank)
            for process, slot in self._slots.items()
            if process not in known and slot.bundle_indices
            for rank in range(len(slot.shares))
        ]
        found = await asyncio.gather(*(asyncio.to_thread(name.find) for name in names))
        await asyncio.gather(*(_end(actor, timeout_s) for actor in found if actor is not None))

    async def _current_shares(self, slot: EngineSlot) -> list[NodeShare]:
        group = self._placement.placement_group
        return [
            await current_share(slot.engine_id, group, share, _GPU_IDS_TIMEOUT_S)
            for share in slot.shares
        ]

    async def _make_actors(
        self, slot: EngineSlot, shares: Sequence[NodeShare], process_name: str
    ) -> list[Any]:
        takes = _takes_of_bundle(slot)
        if process_name != slot.engine_id:  # the engine itself has taken it
            takes = dict.fromkeys(takes, 0.0)
        make = self._placement.make
        return [
            await asyncio.to_thread(make, self._placement.name(process_name, rank), share, takes)
            for rank, share in enumerate(shares)
        ]


async def _end(actor: Any, timeout_s: float) -> None:
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
