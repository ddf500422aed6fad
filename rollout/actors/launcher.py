"""Engines owned by actors: one actor per engine, on the bundle of its slot.

The actor only owns the process (start, measure, end).  Lifecycle calls go from the group straight
to the engine over HTTP: an actor call in between costs the caller 0.3 ms of CPU each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from engines.launch import EngineLauncher, EngineSpec, RunningEngine
from engines.protocol import Endpoint
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.actors.calls import RemoteCall
from rollout.types import EngineSlot

# What an engine actor takes of a bundle that the trainer shares; the rest is the trainer's.
_SHARE_OF_BUNDLE = 0.2
_MEASURE_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Where engine actors go.

    Attributes:
        placement_group: the Ray placement group of the run.
        actor_class: ``EngineActor``, already made remote.
        launcher: starts an engine on the node its actor is on.
        is_single_node: engines may bind loopback, since nobody else needs to reach them.
    """

    placement_group: Any
    actor_class: Any
    launcher: EngineLauncher
    is_single_node: bool


class RayLauncher:
    """An ``EngineLauncher`` that puts every engine under an actor on its slot."""

    def __init__(self, placement: EnginePlacement, slots: Sequence[EngineSlot]) -> None:
        self._placement = placement
        self._slots = {slot.engine_id: slot for slot in slots}

    async def launch(self, spec: EngineSpec) -> RunningEngine:
        """Make the actor and let it start the engine; raises what the engine's start raises."""
        slot = self._slots[spec.engine_id]
        if not slot.bundle_indices:  # attached: there is no process to own
            return await self._placement.launcher.launch(spec)
        gpus = _SHARE_OF_BUNDLE if slot.gpu_ids else 0
        actor = self._placement.actor_class.options(
            num_cpus=_SHARE_OF_BUNDLE if slot.gpu_ids else slot.num_cpus,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._placement.placement_group,
                placement_group_bundle_index=slot.bundle_indices[0],
                placement_group_capture_child_tasks=False,
            ),
        ).remote(self._placement.launcher)
        name = f"engine {spec.engine_id}"
        try:
            host = "127.0.0.1" if self._placement.is_single_node else await _node_address(slot)
            endpoint, pid = await RemoteCall[tuple[Endpoint, int | None]](
                actor.launch.remote(spec, host), name
            )
        except BaseException:
            ray.kill(actor)
            raise
        return RayEngine(actor, name, endpoint, pid)


async def _node_address(slot: EngineSlot) -> str:
    nodes = await asyncio.to_thread(ray.nodes)
    return next(str(one["NodeManagerAddress"]) for one in nodes if one["NodeID"] == slot.node_id)


class RayEngine:
    """A ``RunningEngine`` owned by an actor."""

    def __init__(self, actor: Any, name: str, endpoint: Endpoint, pid: int | None) -> None:
        self.endpoint = endpoint
        self.pid = pid
        self._actor = actor
        self._name = name

    async def resident_bytes(self) -> int | None:
        try:
            async with asyncio.timeout(_MEASURE_TIMEOUT_S):
                measured: int | None = await RemoteCall(
                    self._actor.resident_bytes.remote(), self._name
                )
                return measured
        except Exception:  # a figure for people: its absence must not fail a phase
            return None

    async def is_alive(self) -> bool:
        alive: bool = await RemoteCall(self._actor.is_alive.remote(), self._name)
        return alive

    async def log_tail(self, lines: int = 20) -> str:
        async with asyncio.timeout(_MEASURE_TIMEOUT_S):
            tail: str = await RemoteCall(self._actor.log_tail.remote(lines), self._name)
            return tail

    async def stop(self, grace_s: float) -> bool:
        try:
            async with asyncio.timeout(grace_s + _KILL_TIMEOUT_S):
                killed: bool = await RemoteCall(self._actor.stop.remote(grace_s), self._name)
                return killed
        finally:
            # The guard of the engine sees its owner die and kills whatever is left.
            ray.kill(self._actor)

    async def kill(self) -> None:
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await RemoteCall[None](self._actor.kill.remote(), self._name)
        finally:
            ray.kill(self._actor)
