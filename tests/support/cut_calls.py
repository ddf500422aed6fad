"""Calls of a server that end before their time, and what must agree when they have.

A call is cut at every turn of the event loop, and so at every ``await`` of it and of the tasks that
it started; or from that turn on an engine hangs, so that the deadline of what waits for it expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.control.server.journal import JournalRecord, ServerJournal
from rollout.core.types import EngineStatus, GroupStatus
from rollout.rules.health import EngineHealth, RecoveryState
from rollout.rules.routing import Backend, BackendState
from tests.support.builders import ServerBench
from tests.support.virtual_time import VirtualTimeLoop


class TurnLoop(VirtualTimeLoop):
    """Counts its turns; what other loops leave to threads runs in a turn, so all is repeatable.

    Attributes:
        on_turn: called before each turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_turn: Callable[[], None] | None = None

    def _run_once(self) -> None:
        if self.on_turn is not None:
            self.on_turn()
        super()._run_once()  # type: ignore[misc]

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> Any:
        """As a thread, it runs to its end also if its caller has given up."""
        future = self.create_future()

        def run() -> None:
            try:
                result = work(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_soon(run)
        return future


class Cutter:
    """Acts once, at the given turn after ``begin``.

    Attributes:
        num_turns: since ``begin``.
    """

    def __init__(self, loop: TurnLoop, at: int | None, act: Callable[[], None]) -> None:
        self.num_turns = 0
        self._loop = loop
        self._at = at
        self._act = act

    def begin(self) -> None:
        self._loop.on_turn = self._count

    def end(self) -> None:
        self._loop.on_turn = None

    def _count(self) -> None:
        if self.num_turns == self._at:
            self._act()
        self.num_turns += 1


@dataclass(frozen=True)
class EngineFacts:
    """What a fake engine really is.

    Attributes:
        is_whole: its weights are not half of a push, and not lost by a release.
    """

    is_alive: bool
    is_paused: bool
    released: frozenset[str]
    version: str
    is_whole: bool


@dataclass(frozen=True)
class World:
    """A server and all that it records and publishes, at one moment.

    Attributes:
        gate, phases, version, unfinished: as the server has them.
        router_gate, members: as the router has them.
        health: by group and engine, as recovery has it; empty if nothing recovers.
        record: the newest of the journal.
    """

    gate: str
    phases: Mapping[str, str]
    version: int
    unfinished: Mapping[str, str]
    groups: Sequence[GroupStatus]
    router_gate: str
    members: Mapping[str, Backend]
    health: Mapping[str, Mapping[str, EngineHealth]]
    record: JournalRecord
    engines: Mapping[str, EngineFacts]

    def in_groups(self) -> Iterable[tuple[GroupStatus, EngineStatus]]:
        return ((group, engine) for group in self.groups for engine in group.engines)


class MemoryJournal(ServerJournal):
    """A journal whose file is in memory."""

    newest: JournalRecord

    def _write(self, record: JournalRecord, number: int, durable: bool) -> None:
        self.newest = record


async def world_of(bench: ServerBench, journal: MemoryJournal) -> World:
    """The server and all that is known of it now."""
    server, router = bench.server, bench.router
    statuses = await server._registry.statuses()
    return World(
        gate=server._gate.state,
        phases={name: phase.value for name, phase in server.phases().items()},
        version=server.base_version,
        unfinished={
            name: command.value for name, command in server._phase_runner._unfinished.items()
        },
        groups=tuple(statuses.values()),
        router_gate=router.gate,
        members={member.engine_id: member for member in router.members},
        health=server._recovery.tracker.snapshot(),
        record=journal.newest,
        engines={
            name: EngineFacts(
                not process.engine.is_dead,
                process.engine.paused is not None,
                frozenset(process.engine.released),
                process.engine._version,
                not (process.engine.weights_are_garbage or process.engine.is_updating),
            )
            for name, process in bench.launcher.processes.items()
        },
    )


def disagreements(world: World) -> list[str]:
    """What router, group, tracker, journal and engine do not agree on; empty if they agree."""
    return [
        *unfit_in_routing(world),
        *_of_gate(world),
        *_of_router(world),
        *_of_groups(world),
        *_of_tracker(world),
        *_of_journal(world),
    ]


def unfit_in_routing(world: World) -> list[str]:
    """Living engines that get requests, and must not; holds at every moment."""
    if world.router_gate != "open":
        return []
    wrong = []
    for name, member in world.members.items():
        engine = world.engines[name]
        if member.state is not BackendState.SERVING or not engine.is_alive:
            continue
        if engine.released:
            wrong.append(f"{name} is in routing, and has released {sorted(engine.released)}")
        if engine.is_paused:
            wrong.append(f"{name} is in routing, and is paused")
        if engine.version != str(world.version):
            wrong.append(f"{name} is in routing at {engine.version}, not {world.version}")
        if not engine.is_whole:
            wrong.append(f"{name} is in routing, and its weights are not whole")
    return wrong


def _of_gate(world: World) -> list[str]:
    if world.gate != world.router_gate:
        return [f"the gate is {world.router_gate}, and {world.gate} by the server"]
    return []


def _of_router(world: World) -> list[str]:
    """Who is fit gets requests, who is not gets none, and it has no other engine."""
    wrong = []
    known = {engine.engine_id for _, engine in world.in_groups()}
    if world.members.keys() != known:
        wrong.append(f"the router has {sorted(world.members)}, the groups {sorted(known)}")
    for group, engine in world.in_groups():
        member = world.members.get(engine.engine_id)
        is_fit = not (engine.fence_reason or engine.is_stale)
        if world.router_gate != "open" or group.phase != "serving" or member is None:
            continue
        if is_fit != (member.state is BackendState.SERVING):
            wrong.append(f"{engine.engine_id} is {engine.state}, and {member.state} in the router")
    return wrong


def _of_groups(world: World) -> list[str]:
    wrong = []
    known, vacant = set(), {slot for group in world.groups for slot in group.vacant_slots}
    for group in world.groups:
        if group.phase != world.phases[group.name]:
            known_as = world.phases[group.name]
            wrong.append(f"group {group.name} is {group.phase}, and {known_as} by the server")
        known.update(one.engine_id for one in (*group.engines, *group.asleep))
    for group, status in world.in_groups():
        engine = world.engines[status.engine_id]
        if status.fence_reason:
            if engine.is_alive:
                wrong.append(f"{status.engine_id} is fenced, and runs")
            continue
        if engine.is_alive and engine.released != set(status.released):
            wrong.append(
                f"{status.engine_id} has released {sorted(engine.released)}, and "
                f"{list(status.released)} by its group"
            )
        if engine.is_alive and engine.is_paused != (group.phase != "serving"):
            paused = "is paused" if engine.is_paused else "generates"
            wrong.append(f"{status.engine_id} {paused}, and its group is {group.phase}")
        knows_weights = status.is_verified and status.weight_version is not None
        if engine.is_alive and knows_weights and not status.is_stale:
            if engine.version != str(status.weight_version):
                wrong.append(
                    f"{status.engine_id} holds {engine.version}, and {status.weight_version} by "
                    "its group"
                )
            if not engine.is_whole and "weights" not in status.released:
                wrong.append(f"{status.engine_id} is verified, and its weights are not whole")
    for name, engine in world.engines.items():
        is_asleep = name in vacant and engine.is_paused and engine.released
        if engine.is_alive and name not in known and not is_asleep:
            wrong.append(f"{name} runs, and no group has it")
    return wrong


def _of_tracker(world: World) -> list[str]:
    wrong = []
    for group in world.groups if world.health else ():
        health = world.health[group.name]
        ids = {engine.engine_id for engine in group.engines}
        if health.keys() != ids:
            wrong.append(f"group {group.name} has {sorted(ids)}, the tracker {sorted(health)}")
        for engine in group.engines:
            if engine.engine_id not in health:
                continue
            state = health[engine.engine_id].state
            if engine.fence_reason:
                is_right = health[engine.engine_id].is_out
            else:
                is_right = (state is RecoveryState.STALE) == engine.is_stale
            if not is_right:
                wrong.append(f"{engine.engine_id} is {engine.state}, and {state} by the tracker")
    return wrong


def _of_journal(world: World) -> list[str]:
    record = world.record
    pairs: dict[str, tuple[object, object]] = {
        "phases": (record.phases, dict(world.phases)),
        "gate": (record.gate, world.gate),
        "unfinished": (record.unfinished, dict(world.unfinished)),
        "version": (record.base_version, world.version),
        "doing": (record.doing, ""),
        "engines": (
            {one.engine_id: (bool(one.fence_reason), one.is_stale) for one in record.engines},
            {one.engine_id: (bool(one.fence_reason), one.is_stale) for _, one in world.in_groups()},
        ),
    }
    return [
        f"the journal has {what} {written}, and it is {true}"
        for what, (written, true) in pairs.items()
        if written != true
    ]


async def ended(task: asyncio.Task[Any]) -> str:
    """How a call has ended, in words."""
    await asyncio.wait([task])
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return "done" if error is None else f"{type(error).__name__}: {error}"
