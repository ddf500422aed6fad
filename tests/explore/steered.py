"""Engines, processes, groups and a router that ask a world what becomes of each call.

Always true: without a world every call takes its ordinary course.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engines.fake import FakeEngine, FakeTensor, faults
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.engine.request import FakeRequest
from engines.fake.launcher import FakeRunningEngine
from engines.launch import EngineSpec
from engines.protocol import Endpoint, Engine, MemoryTag, ProcessIdentity
from engines.protocol.errors import EngineRejected, EngineUnreachable
from rollout.control.deployment import Deployment
from rollout.control.engine import probe
from rollout.control.engine.state import EngineState
from rollout.control.group.engine_recovery import LostState
from rollout.control.group.server_group import ServerGroup
from rollout.control.server.group_registry import lost_groups
from rollout.control.server.journal import JournalRecord
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ActorLost, PhaseTimeout, RolloutError
from rollout.core.types import EngineSlot, GroupStatus
from rollout.router.gate.gate import Gate, GateState
from rollout.rules.routing import Backend
from rollout.weights.store.weight_source import Restored
from tests.explore.explorer import PROCESS, ExploredProcess
from tests.support.vllm_stub.stub import StubVllm
from tests.support.vllm_stub.wire import connect_to_stub

if TYPE_CHECKING:
    from tests.explore.world import World

_OURS = probe.RID_PREFIX
_KEPT = "kept as "
# Seconds of each token.
_REQUEST_S = 10.0

CONTROL = frozenset(
    {
        "pause_generation",
        "flush_cache",
        "release_memory_occupation",
        "resume_memory_occupation",
        "begin_weight_update",
        "update_weights_from_tensor",
        "end_weight_update",
        "update_weights_from_disk",
        "weight_version",
        "weights_checker",
        "continue_generation",
        "canary",
    }
)
UPDATES = frozenset(
    {
        "begin_weight_update",
        "update_weights_from_tensor",
        "end_weight_update",
        "update_weights_from_disk",
    }
)
_SETTLED = frozenset({"release_memory_occupation", "resume_memory_occupation"})


class SteeredEngine(FakeEngine):
    """A fake engine that knows which of its calls and deaths must not happen.

    Attributes:
        is_verified: its version was queried after the last change of its weights.
        is_flushed: it was flushed after it was last paused.
        struck_in: the first command that failed on it; such an engine must be fenced.
        lost_tags: the tags of its last release or resume, if it reports what it holds: then the
            outcome of a lost reply can be checked.
    """

    world: World | None = None
    is_verified = True
    is_flushed = False
    struck_in = ""
    lost_tags: frozenset[MemoryTag] | None = None

    def die(self, reason: str) -> None:
        # A group that takes over others' engines may end one that does not report its memory.
        is_ours = self.world is not None and not self.world.taking_over
        if is_ours and not reason.startswith(("killed", "stopped", "a planned")):
            self.world.violate(f"I1/I3: a call of ours ended {self.engine_id}: {reason}")
        super().die(reason)

    def _admit(self, request: FakeRequest) -> None:
        is_ours = request.rid.startswith(_OURS)
        if self.world is not None and not is_ours and (self.weights.lost or not self.is_verified):
            self.world.violate(
                f"I1: {self.engine_id} generates with weights that were not verified"
            )
        super()._admit(request)

    def _compare(self) -> None:
        try:
            super()._compare()
        except EngineRejected:
            self._struck("compare")
            raise

    def _struck(self, operation: str) -> None:
        self.struck_in = self.struck_in or operation
        if self.world is not None:
            self.world.struck.setdefault(self.engine_id, operation)

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        await super().update_weights_from_disk(
            model_path, flush_cache=flush_cache, weight_version=weight_version
        )
        if model_path.startswith(_KEPT):
            tensor = DEFAULT_TENSORS[-1]
            kept = FakeTensor(tensor.shape, int(model_path.removeprefix(_KEPT)))
            self.weights.write([(tensor.name, kept)])

    async def _arrive(self, operation: str, arguments: Any) -> faults.Fault | None:
        if operation == "server_info":
            self._is_looked_at()
        world = self.world
        asked, operation = operation, operation_name(operation, arguments)
        if world is None or operation not in CONTROL:
            return await super()._arrive(asked, arguments)
        since = world.now
        if operation == "continue_generation":
            world.check_may_continue(self)
        elif operation in ("flush_cache", "release_memory_occupation"):
            world.check_barrier(self, operation)
        elif operation in UPDATES or MemoryTag.WEIGHTS in arguments.get("tags", ()):
            self.is_verified = False
        try:
            if operation in _SETTLED:
                self.lost_tags = (
                    frozenset(arguments["tags"]) if self.settings.reports_released else None
                )
            fault = await super()._arrive(asked, arguments)
        except asyncio.CancelledError:
            if not world.is_coming(self):
                self._struck(operation)
            world.check_given_up(self, operation, since)
            raise
        except BaseException:
            self._struck(operation)
            raise
        if fault is not None:
            self._struck(operation)
        elif operation == self.struck_in and operation in _SETTLED:
            self._is_well()  # the call was repeated: the first was not executed
        elif operation == "weight_version":
            self.is_verified = True
        elif operation in ("flush_cache", "pause_generation"):
            self.is_flushed = operation == "flush_cache"
            if self.struck_in == "pause_generation":  # the call was repeated, and succeeded
                self._is_well()
        return fault

    def _is_looked_at(self) -> None:
        """A report of what is held resolves a call that was done and whose reply was lost."""
        if self.struck_in in _SETTLED and self.lost_tags is not None:
            is_release = self.struck_in == "release_memory_occupation"
            if (
                self.lost_tags <= self.released
                if is_release
                else not self.lost_tags & self.released
            ):
                self._is_well()

    def _is_well(self) -> None:
        self.struck_in = ""
        if self.world is not None:
            self.world.struck.pop(self.engine_id, None)

    async def _strike(self, operation: str, fault: faults.Fault) -> None:
        world = self.world
        if world is None or fault.kind is not faults.FaultKind.HANG:
            return await super()._strike(operation, fault)
        world.hanging[self.engine_id] = operation
        try:
            await super()._strike(operation, fault)
        finally:
            del world.hanging[self.engine_id]


class KeptPushes:
    """A source that has every version that was pushed; loading it takes its course as any call."""

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored:
        await engine.update_weights_from_disk(f"{_KEPT}{version}", weight_version=str(version))
        return Restored()

    async def why_lacks(self, version: int) -> str:
        return ""


class SteeredVllm(SteeredEngine, StubVllm):
    """The same behind vLLM's paths."""


class SteeredProcess(FakeRunningEngine):
    """A process whose kill may fail."""

    world: World | None = None
    is_kill_failed = False

    async def kill(self) -> None:
        self.num_kills += 1
        if self.world is not None and self.world.settings.kill_outcomes > 1:
            outcome = await self.world.happens(
                self.engine.engine_id, "kill", self.world.settings.kill_outcomes
            )
            if outcome:
                self.is_kill_failed = True
                raise OSError("the guard is gone")
        self.is_stopped = True
        self.engine.die("killed")


class SteeredRouter:
    """The real gate behind calls that may get lost, and in a process that may be.

    Attributes:
        num_lost: processes of it that were lost.
        is_away: the last one was, and another does not serve so far.
        is_stopped: none serves any more.
    """

    def __init__(self) -> None:
        self.gate = self._make_gate()
        self.world: World | None = None
        self.on_idle: asyncio.Future[None] | None = None
        self.num_lost = 0
        self.is_away = self.is_stopped = False

    def _make_gate(self) -> Gate:
        return Gate(clock=_no_clock, on_failure=_pass_over, on_idle=self._idle)

    def lose(self) -> None:
        """Members, gate and requests were in its memory."""
        self.gate = self._make_gate()
        self.num_lost += 1
        self.is_away = True
        if self.on_idle is not None and not self.on_idle.done():
            self.on_idle.set_exception(self._lost())

    async def begin(self, server: Callable[[], RolloutServer]) -> None:
        """What another process of it does, until it serves or is lost, too."""
        assert self.world is not None
        num_lost, port = self.num_lost, 0
        while not port:
            await self.world.happens("router", "asks its server", 1)
            if self.num_lost != num_lost or self.is_stopped:
                return
            source = server()
            port, members, state, why = await source.router_serves()
            if not port:  # its server is not where this one is known
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.get_running_loop().create_future(), 0.1)
        await self.world.happens("router", "begins", 1)
        if self.num_lost != num_lost or self.is_stopped:
            return
        if members is not None:
            # What a server that is lost now had given serves on, as in a router that outlives it.
            if server() is source:
                self.world.check_may_route(members[1])
            self.gate.set_members(*members)
        self._set_gate(state, dict(why))
        self.is_away = False

    def _lost(self) -> ActorLost:
        return ActorLost("the router is lost", actor="router")

    def _check_serves(self) -> None:
        if self.is_away:
            raise self._lost()

    async def start(self) -> Endpoint:
        return Endpoint("127.0.0.1", 1)

    async def stop(self, budget_s: float) -> None:
        self.is_stopped = True
        self.gate.set_state(GateState.CLOSED, reason="stopped")

    async def set_gate(self, state: str, **why: Any) -> None:
        await self._ask(f"gate {state}", lambda: self._set_gate(state, why))

    def _set_gate(self, state: str, why: dict[str, Any]) -> None:
        if self.world is not None and state == "open":
            self.world.check_may_open(self.gate, why["weight_version"])
        why.pop("metrics", None)
        self.gate.set_state(GateState(state), **why)

    async def set_members(self, epoch: int, members: list[Backend]) -> bool:
        if self.world is not None:
            self.world.check_may_route(members)
        await self._ask("members", lambda: self.gate.set_members(epoch, members))
        return True

    async def drained(self, timeout_s: float, engine_id: str = "") -> None:
        """Wait for the requests that are in flight, as the real one does."""
        self._check_serves()
        gate, loop = self.gate, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while gate.num_on(engine_id) if engine_id else gate.in_flight:
                    idle: asyncio.Future[None] = loop.create_future()
                    self.on_idle = idle
                    await idle
        except TimeoutError:
            raise PhaseTimeout(f"router not drained within {timeout_s:g} s") from None
        finally:
            self.on_idle = None

    def _idle(self) -> None:
        if self.on_idle is not None and not self.on_idle.done():
            self.on_idle.set_result(None)

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        """There is nothing to hear: recovery is driven by hand."""
        await asyncio.get_running_loop().create_future()
        return []

    async def stats(self) -> dict[str, Any]:
        self._check_serves()
        return self.gate.stats() | {"server_metrics": {}}

    async def _ask(self, what: str, act: Callable[[], Any]) -> None:
        self._check_serves()
        outcome, num_lost = 0, self.num_lost
        if self.world is not None:
            outcome = await self.world.happens("router", what, self.world.settings.router_outcomes)
        if self.num_lost != num_lost:
            raise self._lost()
        if outcome != 1:
            act()
        if outcome:
            raise RolloutError("the router cannot be reached")


async def call_in(process: ExploredProcess, name: str, work: Coroutine[Any, Any, Any]) -> Any:
    """The reply to a call that runs in another process.

    Raises:
        ActorLost: that process is lost, before the call or while it ran.
    """
    task = process.create_task(work)
    while not (task.done() or process.is_lost):
        try:
            await asyncio.wait([task, process.ended], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
    if process.is_lost:
        raise ActorLost(f"{name} is lost", actor=name, is_dead=True)
    return task.result()


class Delayed:
    """A group behind an actor: calls arrive when they will, and giving up does not cancel them.

    Attributes:
        process: of the group, if it can be lost.
        is_lost: it was.
    """

    is_lost = False
    process: ExploredProcess | None = None

    def __init__(self, name: str, group: ServerGroup) -> None:
        self._name = name
        self._group = group
        self.world: World | None = None

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        call = getattr(self._group, method)
        if self.is_lost:
            return self._refuse
        if self.process is not None:
            return lambda *args, **kwargs: call_in(
                self.process, self._name, self._answer(method, call(*args, **kwargs))
            )
        if method == "status" or self.world is None or not self.world.settings.has_actors:
            return call

        def later(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            what = str(args[0]) if method == "run" else method
            return self._later(what, lambda: call(*args, **kwargs))

        return later

    async def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ActorLost(f"{self._name} is lost", actor=self._name, is_dead=True)

    async def _answer(self, method: str, work: Awaitable[Any]) -> Any:
        reply = await work
        if method == "run" and self.world is not None:  # the engines have done it
            await self.world.happens(self._name, "reply", 1)
        return reply

    def _later(self, what: str, call: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
        assert self.world is not None
        world = self.world

        async def deliver() -> Any:
            if await world.happens(self._name, what, 2):
                await world.happens_late(self._name, what)
            return await call()

        task = asyncio.get_running_loop().create_task(deliver())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.shield(task)


class Successor(Delayed):
    """A group in the place of a lost one: it starts with the engines of that."""

    def __init__(self, name: str, group: ServerGroup, lost: LostState, launcher: Launcher) -> None:
        super().__init__(name, group)
        self._lost = lost
        self._launcher = launcher

    async def start(self) -> GroupStatus:
        if self.process is None:
            return await self._take_over()
        return await call_in(self.process, self._name, self._take_over())

    async def _take_over(self) -> GroupStatus:
        known = (*self._lost.known.engines, *self._lost.known.asleep)
        processes = {one.process: self._launcher.all[one.endpoint.port - 1] for one in known}
        for process in self._launcher.all:  # those that booted have no owner
            is_of_group = slot_of(process.engine.engine_id).rpartition("-")[0] == self._name
            if is_of_group and process not in processes.values():
                process.engine.die("killed: no group adopts it")
        assert self.world is not None
        self.world.taking_over.add(self._name)
        try:
            return await self._group.take_over(self._lost, processes)
        finally:
            self.world.taking_over.discard(self._name)


class Launcher:
    """Launches steered engines."""

    def __init__(self, reports_released: bool = False, protocol: str = "sglang") -> None:
        self.reports_released = reports_released
        self.protocol = protocol
        self.processes: dict[str, SteeredProcess] = {}
        self.all: list[SteeredProcess] = []
        self.world: World | None = None

    async def launch(self, spec: EngineSpec) -> SteeredProcess:
        if self.world is not None:
            num_outcomes = self.world.settings.launch_outcomes
            outcome = await self.world.happens(spec.engine_id, "launch", num_outcomes)
            if outcome == 2:
                await self.world.happens(spec.engine_id, "launch", 1, is_slow=True)
            elif outcome:
                raise EngineUnreachable("it ended while it started", engine=spec.engine_id)
            self.world.struck.pop(spec.engine_id, None)
        endpoint = Endpoint("127.0.0.1", len(self.all) + 1)
        make = SteeredVllm if self.protocol == "vllm" else SteeredEngine
        engine = make(
            spec.engine_id,
            endpoint=endpoint,
            tensors=DEFAULT_TENSORS[-1:],
            weight_version=str(spec.weight_version),
            memory_saver=spec.memory_saver,
            weights_cpu_backup=spec.weights_cpu_backup,
            token_s=_REQUEST_S,
            reports_released=self.reports_released,
        )
        process = SteeredProcess(engine, len(self.all) + 1)
        self.processes[spec.engine_id] = process
        self.all.append(process)
        if self.world is not None:
            self.world.attach(process)
        return process

    def engine_at(self, endpoint: Endpoint) -> SteeredEngine:
        return self.all[endpoint.port - 1].engine  # type: ignore[return-value]

    def connect(self, endpoint: Endpoint, engine_id: str) -> Engine:
        engine = self.engine_at(endpoint)
        if isinstance(engine, SteeredVllm):
            return connect_to_stub(engine)
        return engine


@dataclass
class Parts:
    """What lasts from run to run; pickled between commands, when nothing is under way.

    Attributes:
        failed: the command of a step that failed last, and the version that it would push.
        opened: the versions at which the gate of the first server was open.
        records: the journals, by server; none where no server is lost.
    """

    servers: dict[str, RolloutServer]
    groups: dict[str, ServerGroup]
    ports: dict[str, Delayed]
    launcher: Launcher
    routers: dict[str, SteeredRouter]
    offloading: frozenset[str]
    deployment: Deployment
    now_s: float = 1000.0
    failed: tuple[str, int] | None = None
    opened: frozenset[int] = frozenset()
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def server(self) -> RolloutServer:
        """The one that is commanded, and that gets the requests."""
        return next(iter(self.servers.values()))

    @property
    def router(self) -> SteeredRouter:
        return next(iter(self.routers.values()))

    def is_booting(self, engine_id: str) -> bool:
        """It starts beside the commands of its group, and is none of its engines."""
        slot = slot_of(engine_id)
        boots = (group._boots._boots.get(slot) for group in self.groups.values())
        return any(boot is not None and boot.task is not None for boot in boots)

    def lose_group(self, name: str) -> None:
        """What its server knows of it stays: its engines.  The rest was in its memory."""
        port, lost = self.ports[name], self.groups[name]
        rest = ServerGroup(
            lost._settings,
            lost._engines.slots,
            self.launcher,
            self.launcher.connect,
            timeline=lost.timeline,
        )
        rest._engines = lost._engines
        rest._engines._launching = set()
        rest._commands.phase = lost._commands.phase
        self.groups[name] = port._group = rest
        port.is_lost, port.process = True, None

    def continue_server(self, record: JournalRecord) -> RolloutServer:
        """Another server in the place of a lost one, by its record; nothing is started."""
        name, old = record.server, self.servers[record.server]
        lost = lost_groups(record, old._config.groups)
        factory = Successors(self)
        self.servers[name] = RolloutServer(
            name,
            old._config,
            {one: factory.make(one, state) for one, state in lost.items()},
            self.routers[name],
            timeline=old.timeline,
            actor_factory=factory,
            journal=old._journal,
        )
        self.deployment = Deployment(self.servers, lock_timeout_s=old._lock._timeout_s)
        return self.servers[name]

    def member(self, engine_id: str) -> EngineState | None:
        """The state of the engine on its slot in its group; None if it was removed."""
        slot = slot_of(engine_id)
        return self.groups[slot.rpartition("-")[0]]._engines._members.get(slot)


class Successors:
    """Makes a group, or a router, in the place of a lost one."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def make_group(self, name: str, lost: LostState) -> Successor:
        return self.make(name, lost)

    def end_router(self, process: ProcessIdentity) -> None:
        """No call of the router hangs here for good."""

    def make(self, name: str, lost: LostState) -> Successor:
        parts, old = self._parts, self._parts.groups[name]
        for boot in old._boots._boots.values():
            if boot.task is not None:
                boot.task.cancel()
        launcher = parts.launcher
        group = ServerGroup(
            old._settings, old._engines.slots, launcher, launcher.connect, timeline=old.timeline
        )
        port = Successor(name, group, lost, launcher)
        port.world, parts.ports[name].world = parts.ports[name].world, None
        if port.world is not None and port.world.settings.has_processes:
            port.process = port.world.new_process()
        parts.groups[name], parts.ports[name] = group, port
        return port


class Record:
    """A ``ServerJournal`` in memory.

    Attributes:
        newest: what another server would read.
    """

    def __init__(self, server: str) -> None:
        here = ProcessIdentity(1, 1, "here", "boot", "")
        self.newest = self._first = JournalRecord("explored", server, "ray", here, here)
        self.world: World | None = None

    async def write(self, *, durable: bool = True, **now: Any) -> None:
        record = replace(self._first, **now)
        if self.world is not None and self.world.settings.has_processes:
            await self.world.happens("journal", "write", 1)
        self.newest = record

    async def end(self) -> None:
        """No other server continues this one."""
        await self.write(is_ended=True)

    def keep(self, **values: Any) -> None:
        self._first = replace(self._first, **values)


class Pending:
    """A call that waits until the explorer says what becomes of it."""

    __slots__ = ("future", "is_slow", "num_outcomes", "operation", "owner", "process")

    def __init__(
        self,
        owner: str,
        operation: str,
        num_outcomes: int,
        future: Any,
        *,
        is_slow: bool = False,
    ) -> None:
        self.owner = owner
        self.operation = operation
        self.num_outcomes = num_outcomes
        self.future = future
        self.is_slow = is_slow
        self.process = PROCESS.get()


def slot_of(name: str) -> str:
    """The slot of an engine, by the name of its process."""
    return name.removeprefix("standby-")


def operation_name(operation: str, arguments: Any) -> str:
    """A canary is no request: it is a call of ours, and anything may become of it."""
    rid = arguments.get("rid") if operation == "generate" else None
    return "canary" if rid is not None and rid.startswith(_OURS) else operation


def _no_clock() -> float:
    return 0.0


def _pass_over(*event: Any) -> None:
    """Ignore the event."""
