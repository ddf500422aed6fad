"""The ports of ``rollout`` in front of Ray actors.

Every method submits its call and returns at once; awaiting the ``RemoteCall`` gives the answer or
the error as it was raised, without Ray's wrappers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engines.protocol import Endpoint

from rollout.actors.calls import RemoteCall
from rollout.lifecycle import Command
from rollout.observation import Observation
from rollout.routing import Member
from rollout.timeline.span import Excerpt
from rollout.types import (
    EngineReport,
    EngineStatus,
    GroupStatus,
    PhaseReport,
    ServerStatus,
    StepReport,
)
from rollout.watching import GroupProbe
from rollout.weights.manifest import Manifest
from rollout.weights.push import WeightPush


class _Port:
    if_dead = ""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self._name = name

    def _call(self, object_ref: Any) -> RemoteCall[Any]:
        return RemoteCall(object_ref, self._name, self.if_dead)


class RayGroup(_Port):
    """A ``GroupPort``."""

    if_dead = "with health.recover another takes its place; repeat the command then"

    def start(self) -> RemoteCall[GroupStatus]:
        return self._call(self._actor.start.remote())

    def stop(self) -> RemoteCall[None]:
        return self._call(self._actor.stop.remote())

    def pause(self, order: int) -> RemoteCall[PhaseReport]:
        return self._call(self._actor.pause.remote(order))

    def flush(self, order: int) -> RemoteCall[PhaseReport]:
        return self._call(self._actor.flush.remote(order))

    def release(self, order: int) -> RemoteCall[PhaseReport]:
        return self._call(self._actor.release.remote(order))

    def resume_weights(self, order: int) -> RemoteCall[PhaseReport]:
        return self._call(self._actor.resume_weights.remote(order))

    def update_weights(self, push: WeightPush, order: int) -> RemoteCall[PhaseReport]:
        return self._call(self._actor.update_weights.remote(push, order))

    def verify(self, version: int, order: int) -> RemoteCall[PhaseReport]:
        return self._call(self._actor.verify.remote(version, order))

    def resume_kv(self, order: int) -> RemoteCall[PhaseReport]:
        return self._call(self._actor.resume_kv.remote(order))

    def continue_generation(self, order: int) -> RemoteCall[PhaseReport]:
        return self._call(self._actor.continue_generation.remote(order))

    def remove(self, engine_id: str, keep_process: bool) -> RemoteCall[EngineReport]:
        return self._call(self._actor.remove.remote(engine_id, keep_process))

    def add(self, engine_id: str, version: int) -> RemoteCall[EngineStatus]:
        return self._call(self._actor.add.remote(engine_id, version))

    def status(self) -> RemoteCall[GroupStatus]:
        return self._call(self._actor.status.remote())

    def recorded(self, cursor: int) -> RemoteCall[Excerpt]:
        return self._call(self._actor.recorded.remote(cursor))

    def log_tail(self, engine_id: str) -> RemoteCall[str]:
        return self._call(self._actor.log_tail.remote(engine_id))

    def probe(self, budget_s: float, distrusted: Sequence[str] = ()) -> RemoteCall[GroupProbe]:
        return self._call(self._actor.probe.remote(budget_s, distrusted))

    def fence(self, engine_id: str, reason: str) -> RemoteCall[None]:
        return self._call(self._actor.fence.remote(engine_id, reason))

    def restart(self, engine_id: str) -> RemoteCall[None]:
        return self._call(self._actor.restart.remote(engine_id))

    def adopt(self, engine_id: str, version: int) -> RemoteCall[bool]:
        return self._call(self._actor.adopt.remote(engine_id, version))


class RayRouter(_Port):
    """A ``RouterPort``."""

    def start(self) -> RemoteCall[Endpoint]:
        return self._call(self._actor.start.remote())

    def stop(self, budget_s: float) -> RemoteCall[None]:
        return self._call(self._actor.stop.remote(budget_s))

    def set_gate(
        self,
        state: str,
        *,
        reason: str = "",
        phase: str = "",
        weight_version: int | None = None,
    ) -> RemoteCall[None]:
        return self._call(self._actor.set_gate.remote(state, reason, phase, weight_version))

    def set_members(self, epoch: int, members: list[Member]) -> RemoteCall[None]:
        return self._call(self._actor.set_members.remote(epoch, members))

    def drained(self, timeout_s: float, engine_id: str = "") -> RemoteCall[None]:
        return self._call(self._actor.drained.remote(timeout_s, engine_id))

    def failures(self, timeout_s: float) -> RemoteCall[list[tuple[str, str]]]:
        return self._call(self._actor.failures.remote(timeout_s))

    def stats(self) -> RemoteCall[dict[str, Any]]:
        return self._call(self._actor.stats.remote())


class RayServer(_Port):
    """A ``ServerPort``."""

    if_dead = (
        "its router, groups and engines have ended with it; stop this deployment, launch it again"
    )

    def start(self) -> RemoteCall[ServerStatus]:
        return self._call(self._actor.start.remote())

    def stop(self) -> RemoteCall[None]:
        return self._call(self._actor.stop.remote())

    def offload(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.offload.remote())

    def onload(self, push: WeightPush | None = None) -> RemoteCall[StepReport]:
        return self._call(self._actor.onload.remote(push))

    def update_and_continue(self, push: WeightPush) -> RemoteCall[StepReport]:
        return self._call(self._actor.update_and_continue.remote(push))

    def pause_generation(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.pause_generation.remote())

    def flush_cache(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.flush_cache.remote())

    def release_memory_occupation(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.release_memory_occupation.remote())

    def onload_weights(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.onload_weights.remote())

    def update_weights(self, push: WeightPush) -> RemoteCall[StepReport]:
        return self._call(self._actor.update_weights.remote(push))

    def verify(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.verify.remote())

    def onload_kv(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.onload_kv.remote())

    def continue_generation(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.continue_generation.remote())

    def catch_up(self) -> RemoteCall[StepReport]:
        return self._call(self._actor.catch_up.remote())

    def remove_engine(self, engine_id: str, keep_process: bool) -> RemoteCall[EngineReport]:
        return self._call(self._actor.remove_engine.remote(engine_id, keep_process))

    def add_engine(self, engine_id: str) -> RemoteCall[EngineStatus]:
        return self._call(self._actor.add_engine.remote(engine_id))

    def advance(self, command: Command) -> RemoteCall[StepReport]:
        return self._call(self._actor.advance.remote(command))

    def status(self) -> RemoteCall[ServerStatus]:
        return self._call(self._actor.status.remote())

    def expected_manifest(self) -> RemoteCall[Manifest | None]:
        return self._call(self._actor.expected_manifest.remote())

    def observe(self, cursors: Mapping[str, int]) -> RemoteCall[Observation]:
        return self._call(self._actor.observe.remote(dict(cursors)))

    def log_tail(self, engine_id: str) -> RemoteCall[str]:
        return self._call(self._actor.log_tail.remote(engine_id))

    def fence(self, engine_id: str, reason: str) -> RemoteCall[None]:
        return self._call(self._actor.fence.remote(engine_id, reason))
