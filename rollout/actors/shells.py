"""The actor classes: one object each, methods that forward.

All are async actors.  Errors cross as they are: every error of this library survives pickling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines.launch import EngineLauncher, EngineSpec, NodeLauncher, RunningEngine
from engines.protocol import Endpoint

from rollout.actors.engines import Started
from rollout.actors.launcher import EnginePlacement, RayLauncher
from rollout.actors.parts import Inheritance, MadeParts, ServerParts, running_engines
from rollout.actors.process import keep_what_is_loaded, take_short_turns
from rollout.config import RouterConfig, ServerConfig
from rollout.errors import ConfigError
from rollout.journal import Journal
from rollout.lifecycle import Command
from rollout.observation import Observation
from rollout.page.host import page_of
from rollout.router.host import RouterHost
from rollout.routing import Member
from rollout.run_folder import RunFolder
from rollout.server import RolloutServer
from rollout.server_group import GroupSettings, ServerGroup
from rollout.timeline.lines import recorded_in
from rollout.timeline.span import Excerpt
from rollout.types import (
    EngineReport,
    EngineSlot,
    EngineStatus,
    GroupStatus,
    NodeShare,
    PhaseReport,
    ServerStatus,
    StepReport,
)
from rollout.watching import GroupProbe
from rollout.weights.manifest import Manifest
from rollout.weights.push import WeightPush
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.store import WeightStore


class EngineActor:
    """Owns the process of one engine, or of one node of it, on the node where its slot is."""

    def __init__(self, launcher: EngineLauncher) -> None:
        self._launcher = launcher
        self._engine: RunningEngine | None = None

    async def hold_address(self, host: str) -> str:
        if not isinstance(self._launcher, NodeLauncher):
            raise ConfigError(
                f"{type(self._launcher).__name__} cannot start an engine over several nodes"
            )
        return self._launcher.hold_address(host)

    async def launch(self, spec: EngineSpec) -> Started:
        self._engine = await self._launcher.launch(spec)
        started = await self.started()
        assert started is not None
        return started

    async def started(self) -> Started | None:
        engine = self._engine
        if engine is None:
            return None
        return Started(engine.endpoint, engine.pid, tuple(engine.processes))

    async def resident_bytes(self) -> int | None:
        return await self._engine.resident_bytes() if self._engine else None

    async def is_alive(self) -> bool:
        return self._engine is not None and await self._engine.is_alive()

    async def log_tail(self, lines: int) -> str:
        return await self._engine.log_tail(lines) if self._engine else ""

    async def stop(self, grace_s: float) -> bool:
        return await self._engine.stop(grace_s) if self._engine else False

    async def kill(self) -> None:
        if self._engine:
            await self._engine.kill()


class ServerGroupActor:
    """A ``ServerGroup`` whose engines are owned by actors on their slots."""

    def __init__(
        self,
        settings: GroupSettings,
        slots: Sequence[EngineSlot],
        placement: EnginePlacement,
        inherited: Inheritance | None = None,
    ) -> None:
        self._group = ServerGroup(
            settings,
            slots,
            RayLauncher(placement, slots),
            timeline=recorded_in(settings.log_dir, settings.source, otel=settings.otel),
        )
        self._inherited = inherited

    async def start(self) -> GroupStatus:
        keep_what_is_loaded()
        if self._inherited is None:
            return await self._group.start()
        given = self._inherited
        return await self._group.take_over(given.known, await running_engines(given), given.version)

    async def stop(self) -> None:
        await self._group.stop()

    async def pause(self, order: int) -> PhaseReport:
        return await self._group.pause(order)

    async def flush(self, order: int) -> PhaseReport:
        return await self._group.flush(order)

    async def release(self, order: int) -> PhaseReport:
        return await self._group.release(order)

    async def resume_weights(self, order: int) -> PhaseReport:
        return await self._group.resume_weights(order)

    async def update_weights(self, push: WeightPush, order: int) -> PhaseReport:
        return await self._group.update_weights(push, order)

    async def verify(self, version: int, order: int) -> PhaseReport:
        return await self._group.verify(version, order)

    async def resume_kv(self, order: int) -> PhaseReport:
        return await self._group.resume_kv(order)

    async def continue_generation(self, order: int) -> PhaseReport:
        return await self._group.continue_generation(order)

    async def remove(self, engine_id: str, keep_process: bool) -> EngineReport:
        return await self._group.remove(engine_id, keep_process)

    async def add(self, engine_id: str, version: int) -> EngineStatus:
        return await self._group.add(engine_id, version)

    async def status(self) -> GroupStatus:
        return await self._group.status()

    async def recorded(self, cursor: int) -> Excerpt:
        return await self._group.recorded(cursor)

    async def log_tail(self, engine_id: str) -> str:
        return await self._group.log_tail(engine_id)

    async def probe(self, budget_s: float, distrusted: Sequence[str]) -> GroupProbe:
        return await self._group.probe(budget_s, distrusted)

    async def fence(self, engine_id: str, reason: str) -> None:
        await self._group.fence(engine_id, reason)

    async def restart(self, engine_id: str) -> None:
        await self._group.restart(engine_id)

    async def adopt(self, engine_id: str, version: int) -> bool:
        return await self._group.adopt(engine_id, version)


class RouterActor:
    """A ``RouterHost``: HTTP in a thread of its own, control through actor calls."""

    def __init__(self, config: RouterConfig) -> None:
        self._host = RouterHost(config)

    async def start(self) -> Endpoint:
        keep_what_is_loaded()
        take_short_turns()
        return await self._host.start()

    async def stop(self, budget_s: float) -> None:
        await self._host.stop(budget_s)

    async def set_gate(
        self, state: str, reason: str, phase: str, weight_version: int | None
    ) -> None:
        await self._host.set_gate(state, reason=reason, phase=phase, weight_version=weight_version)

    async def set_members(self, epoch: int, members: list[Member]) -> None:
        await self._host.set_members(epoch, members)

    async def drained(self, timeout_s: float, engine_id: str) -> None:
        await self._host.drained(timeout_s, engine_id)

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        return await self._host.failures(timeout_s)

    async def stats(self) -> dict[str, Any]:
        return await self._host.stats()


class RolloutServerActor:
    """A ``RolloutServer`` over group and router actors, which it makes and which end with it."""

    def __init__(
        self,
        name: str,
        run: RunFolder,
        config: ServerConfig,
        parts: ServerParts,
        journal: Journal,
        store: StoreTerms | None = None,
        agents: Agents | None = None,
    ) -> None:
        weight_store: WeightStore | None = None
        if store is not None and agents is not None:
            weight_store = WeightStore(store, agents, config.weights.update)
        self._parts = MadeParts(name, config.router, parts)
        self._server = RolloutServer(
            name,
            config,
            self._parts.groups(),
            self._parts.first_router(),
            store=weight_store,
            timeline=recorded_in(run.of_server(name), name, otel=config.timeline.otel),
            page=page_of(config, run, name),
            remaker=self._parts,
            journal=journal,
        )

    async def host_engine(
        self, engine_id: str, shares: Sequence[NodeShare], num_cpus: float
    ) -> list[Any]:
        return self._parts.host_engine(engine_id, shares, num_cpus)

    async def start(self) -> ServerStatus:
        keep_what_is_loaded()
        return await self._server.start()

    async def stop(self) -> None:
        try:
            await self._server.stop()
        finally:
            self._parts.end()

    async def offload(self) -> StepReport:
        return await self._server.offload()

    async def onload(self, push: WeightPush | None = None) -> StepReport:
        return await self._server.onload(push)

    async def update_and_continue(self, push: WeightPush) -> StepReport:
        return await self._server.update_and_continue(push)

    async def pause_generation(self) -> StepReport:
        return await self._server.pause_generation()

    async def flush_cache(self) -> StepReport:
        return await self._server.flush_cache()

    async def release_memory_occupation(self) -> StepReport:
        return await self._server.release_memory_occupation()

    async def onload_weights(self) -> StepReport:
        return await self._server.onload_weights()

    async def update_weights(self, push: WeightPush) -> StepReport:
        return await self._server.update_weights(push)

    async def verify(self) -> StepReport:
        return await self._server.verify()

    async def onload_kv(self) -> StepReport:
        return await self._server.onload_kv()

    async def continue_generation(self) -> StepReport:
        return await self._server.continue_generation()

    async def catch_up(self) -> StepReport:
        return await self._server.catch_up()

    async def remove_engine(self, engine_id: str, keep_process: bool) -> EngineReport:
        return await self._server.remove_engine(engine_id, keep_process)

    async def add_engine(self, engine_id: str) -> EngineStatus:
        return await self._server.add_engine(engine_id)

    async def advance(self, command: Command) -> StepReport:
        return await self._server.advance(command)

    async def status(self) -> ServerStatus:
        return await self._server.status()

    async def expected_manifest(self) -> Manifest | None:
        return await self._server.expected_manifest()

    async def observe(self, cursors: dict[str, int]) -> Observation:
        return await self._server.observe(cursors)

    async def log_tail(self, engine_id: str) -> str:
        return await self._server.log_tail(engine_id)

    async def fence(self, engine_id: str, reason: str) -> None:
        await self._server.fence(engine_id, reason)
