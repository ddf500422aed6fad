"""What is explored: one server, its groups, its gate and requests, over steered fake engines.

Every call of an engine, of a process and of the router waits until the explorer says what becomes
of it.  The invariants I1-I7 of the lifecycle are checked here, where things happen: at the fake
engine that is about to die, at the gate that is about to open, at the command that returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from engines.errors import EngineUnreachable
from engines.fake import FakeEngine, FakeTensor, faults, pack_tensors
from engines.fake.launcher import FakeRunningEngine
from engines.fake.weights import DEFAULT_TENSORS
from engines.launch import EngineSpec
from engines.protocol import Endpoint, MemoryTag, SamplingParams
from rollout.deployment import Deployment
from rollout.errors import PhaseTimeout, RolloutError
from rollout.hearing import RID_PREFIX
from rollout.lifecycle import Command
from rollout.member import Member as RosterMember
from rollout.router.gate import Gate, GateState, Refusal, Waiter
from rollout.routing import Member
from rollout.server import RolloutServer
from rollout.server_group import ServerGroup
from rollout.testing.explore import ExploredLoop, Violation
from rollout.types import StepReport
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.push import WeightPush

# Shorter than the real ones, all alike: a call that is cut before this was cut too early.
BUDGET_S = 60.0
STOP_S = 15.0
# From the deadline of a phase to its error: kill, log tail, look at the groups, router.
SLACK_S = 80.0
# From the launch of an engine until it is one of the others.
_START_S = 600.0
REQUEST_S = 10.0
CLIENT_S = 3000.0
LOCK_S = 4000.0
HOLD_S = 600.0

CONTROL = frozenset(
    {
        "pause_generation",
        "flush_cache",
        "release_memory_occupation",
        "resume_memory_occupation",
        "begin_weight_update",
        "update_weights_from_tensor",
        "end_weight_update",
        "weight_version",
        "weights_checker",
        "continue_generation",
        "canary",
    }
)
_UPDATES = frozenset({"begin_weight_update", "update_weights_from_tensor", "end_weight_update"})
_MANIFEST = Manifest.of(TensorSpec(one.name, one.dtype, one.shape) for one in DEFAULT_TENSORS[-1:])
_SETTLED = frozenset({"release_memory_occupation", "resume_memory_occupation"})
_ONE_TOKEN = SamplingParams(max_new_tokens=1)

# A push shares its budget out; a pause is tried twice.
# A canary has what is left of the continue before it.
_LEAST_S = dict.fromkeys(_UPDATES, 5.0) | {"pause_generation": BUDGET_S / 2, "canary": 0.0}

# What may become of a call of an engine; the first is the ordinary course.
OUTCOMES: tuple[tuple[str, faults.Fault | None], ...] = (
    ("answers", None),
    ("answers 502", faults.reject()),
    ("breaks before it is done", faults.lose()),
    ("breaks after it is done", faults.lose(executed=True)),
    ("ends the engine", faults.die()),
    ("hangs", faults.hang()),
    ("hangs after it is done", faults.hang(executed=True)),
)
FEW_OUTCOMES = tuple(OUTCOMES[index] for index in (0, 3, 4, 5))
ORDER_ONLY = OUTCOMES[:1]

# -- engines, processes and router that ask what becomes of each call -----------------------------


class SteeredEngine(FakeEngine):
    """A fake engine that knows which of its calls and deaths must not happen.

    Attributes:
        is_proved: it was asked for its version after its weights were last touched.
        is_flushed: it was flushed after it was last paused.
        struck_in: the first command that failed on it; such an engine must be fenced.
        lost_tags: what it was last asked to release or resume, if it tells what it holds: then a
            lost answer can be settled.
    """

    world: World | None = None
    is_proved = True
    is_flushed = False
    struck_in = ""
    lost_tags: frozenset[MemoryTag] | None = None

    def die(self, because: str) -> None:
        if self.world is not None and not because.startswith(("killed", "stopped", "a planned")):
            self.world.violate(f"I1/I3: a call of ours ended {self.engine_id}: {because}")
        super().die(because)

    def _admit(self, *request: Any) -> Any:
        is_canary = request[2] is not None and request[2].startswith(RID_PREFIX)
        if self.world is not None and not is_canary and (self.weights.lost or not self.is_proved):
            self.world.violate(f"I1: {self.engine_id} generates with weights nobody has verified")
        return super()._admit(*request)

    def _struck(self, operation: str) -> None:
        self.struck_in = self.struck_in or operation
        if self.world is not None:
            self.world.struck.setdefault(self.engine_id, operation)

    async def _arrive(self, operation: str, arguments: Any) -> faults.Fault | None:
        if operation == "server_info":
            self._is_looked_at()
        world = self.world
        asked, operation = operation, _told_apart(operation, arguments)
        if world is None or operation not in CONTROL:
            return await super()._arrive(asked, arguments)
        since = world.now
        if operation == "continue_generation":
            world.check_may_continue(self)
        elif operation in ("flush_cache", "release_memory_occupation"):
            world.check_barrier(self, operation)
        elif operation in _UPDATES or MemoryTag.WEIGHTS in arguments.get("tags", ()):
            self.is_proved = False
        try:
            if operation in _SETTLED:
                self.lost_tags = frozenset(arguments["tags"]) if self._tells_released else None
            fault = await super()._arrive(asked, arguments)
        except asyncio.CancelledError:
            if not world._is_coming(self):
                self._struck(operation)
            world.check_given_up(self, operation, since)
            raise
        except BaseException:
            self._struck(operation)
            raise
        if fault is not None:
            self._struck(operation)
        elif operation == self.struck_in and operation in _SETTLED:
            self._is_well()  # it was asked again, and knew of nothing
        elif operation == "weight_version":
            self.is_proved = True
        elif operation in ("flush_cache", "pause_generation"):
            self.is_flushed = operation == "flush_cache"
            if self.struck_in == "pause_generation":  # it was asked again, and is well
                self._is_well()
        return fault

    def _is_looked_at(self) -> None:
        """A call that was lost and done is settled by a look at what is held."""
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
    """The real gate behind calls that may get lost."""

    def __init__(self) -> None:
        self.gate = Gate(clock=_no_clock, on_failure=_pass_over, on_idle=self._idle)
        self.world: World | None = None
        self.on_idle: asyncio.Future[None] | None = None

    async def start(self) -> Endpoint:
        return Endpoint("127.0.0.1", 1)

    async def stop(self, budget_s: float) -> None:
        self.gate.set_state(GateState.CLOSED, reason="stopped")

    async def set_gate(
        self, state: str, *, reason: str = "", phase: str = "", weight_version: int | None = None
    ) -> None:
        await self._ask(
            f"gate {state}",
            lambda: self._set_gate(state, reason, phase, weight_version),
        )

    def _set_gate(self, state: str, reason: str, phase: str, version: int | None) -> None:
        if self.world is not None and state == "open":
            self.world.check_may_open(self.gate, version)
        self.gate.set_state(GateState(state), reason=reason, phase=phase, weight_version=version)

    async def set_members(self, epoch: int, members: list[Member]) -> bool:
        if self.world is not None:
            self.world.check_may_route(members)
        await self._ask("members", lambda: self.gate.set_members(epoch, members))
        return True

    async def drained(self, timeout_s: float, engine_id: str = "") -> None:
        """Wait for the requests that are in flight, as the real one does."""
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
        return self.gate.stats()

    async def _ask(self, what: str, act: Callable[[], Any]) -> None:
        outcome = 0
        if self.world is not None:
            outcome = await self.world.happens("router", what, self.world.settings.router_outcomes)
        if outcome != 1:
            act()
        if outcome:
            raise RolloutError("the router cannot be reached")


class Delayed:
    """A group behind an actor: calls arrive when they will, and giving up does not cancel them."""

    def __init__(self, name: str, group: ServerGroup) -> None:
        self._name = name
        self._group = group
        self.world: World | None = None

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        call = getattr(self._group, method)
        if method == "status" or self.world is None or not self.world.settings.has_actors:
            return call
        return lambda *args: self._later(method, lambda: call(*args))

    def _later(self, method: str, call: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
        assert self.world is not None
        world = self.world

        async def deliver() -> Any:
            if await world.happens(self._name, method, 2):
                await world.happens_late(self._name, method)
            return await call()

        task = asyncio.get_running_loop().create_task(deliver())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.shield(task)


def _no_clock() -> float:
    return 0.0


def _pass_over(*event: Any) -> None:
    """Nobody listens."""


# -- the world ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What may happen in a scenario.

    Attributes:
        commands: what the training loop does, one after the other.
        injections: what may happen once each while it does: ``cancel``, ``request``, a command,
            or ``kill <engine>``.
        num_requests: requests that are on their way when it begins.
        router_outcomes: of a router call: 1 answers, 2 or lost before, 3 or lost after.
        kill_outcomes: of a kill: 1 works, 2 or fails.
        launch_outcomes: of a start: 1 works, 2 or fails.
        has_actors: calls of groups may be held up, and go on when their caller has given up.
        is_over: says after each command whether the loop has done what it wanted.
    """

    commands: tuple[str, ...]
    injections: tuple[str, ...] = ()
    outcomes: tuple[tuple[str, faults.Fault | None], ...] = OUTCOMES
    num_requests: int = 1
    router_outcomes: int = 1
    kill_outcomes: int = 1
    launch_outcomes: int = 1
    has_actors: bool = False
    is_over: Callable[[list[tuple[str, str]]], bool] | None = None


class _Pending:
    __slots__ = ("future", "num_outcomes", "operation", "owner")

    def __init__(self, owner: str, operation: str, num_outcomes: int, future: Any) -> None:
        self.owner = owner
        self.operation = operation
        self.num_outcomes = num_outcomes
        self.future = future


@dataclass
class Parts:
    """What lasts from run to run; pickled between commands, when nothing is under way."""

    servers: dict[str, RolloutServer]
    groups: dict[str, ServerGroup]
    ports: dict[str, Delayed]
    launcher: Launcher
    routers: dict[str, SteeredRouter]
    offloading: frozenset[str]
    deployment: Deployment
    now_s: float = 1000.0

    @property
    def server(self) -> RolloutServer:
        """The one that is commanded, and that gets the requests."""
        return next(iter(self.servers.values()))

    @property
    def router(self) -> SteeredRouter:
        return next(iter(self.routers.values()))

    def member(self, engine_id: str) -> RosterMember | None:
        """What its group knows of an engine; None of one that is lent."""
        roster = self.groups[engine_id.rpartition("-")[0]]._roster
        return roster.get(engine_id)


class Launcher:
    """Launches steered engines."""

    def __init__(self, tells_released: bool = False) -> None:
        self.tells_released = tells_released
        self.processes: dict[str, SteeredProcess] = {}
        self.all: list[SteeredProcess] = []
        self.world: World | None = None

    async def launch(self, spec: EngineSpec) -> SteeredProcess:
        if self.world is not None:
            num_outcomes = self.world.settings.launch_outcomes
            if await self.world.happens(spec.engine_id, "launch", num_outcomes):
                raise EngineUnreachable("it ended while it started", engine=spec.engine_id)
            self.world.struck.pop(spec.engine_id, None)
        endpoint = Endpoint("127.0.0.1", len(self.all) + 1)
        engine = SteeredEngine(
            spec.engine_id,
            endpoint=endpoint,
            tensors=DEFAULT_TENSORS[-1:],
            weight_version=str(spec.weight_version),
            memory_saver=spec.memory_saver,
            weights_cpu_backup=spec.weights_cpu_backup,
            token_s=REQUEST_S,
            tells_released=self.tells_released,
        )
        process = SteeredProcess(engine, len(self.all) + 1)
        self.processes[spec.engine_id] = process
        self.all.append(process)
        if self.world is not None:
            self.world.attach(process)
        return process

    def connect(self, endpoint: Endpoint, engine_id: str) -> SteeredEngine:
        return self.all[endpoint.port - 1].engine  # type: ignore[return-value]


class World:
    """One run.  A ``Scenario`` of the explorer."""

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self.parts = parts
        self.settings = settings
        self.violation = ""
        self.now = 0.0
        self.told: list[str] = []
        self.outcomes: list[tuple[str, str]] = []
        self.trace: list[Any] = []
        self.struck: dict[str, str] = {}
        self.hanging: dict[str, str] = {}
        self._pending: list[_Pending] = []
        self._left = list(settings.injections)
        self._clients: dict[str, int] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._is_dark = False
        self._is_stopping = False
        self._is_cancelled = False
        self._late: list[_Pending] = []
        self._num_commands = 0
        self._main: asyncio.Task[None] | None = None

    # -- driven by the explorer

    def start(self, loop: ExploredLoop) -> None:
        self._loop = loop
        parts = self.parts
        loop.start_at(parts.now_s)
        self.now = parts.now_s
        parts.launcher.world = self
        for router in parts.routers.values():
            router.world = self
        for process in parts.launcher.all:
            self.attach(process)
        for port in parts.ports.values():
            port.world = self
        for number in range(self.settings.num_requests):
            self._request(f"early-{number}")
        self._main = loop.create_task(self._train())

    def attach(self, process: SteeredProcess) -> None:
        process.world = process.engine.world = self
        process.engine.director = self._director(process.engine.engine_id)

    def detach(self) -> Parts:
        parts = self.parts
        parts.now_s = self._loop.time()
        parts.launcher.world = None
        for router in parts.routers.values():
            router.world = None
        for process in parts.launcher.all:
            process.world = process.engine.world = None
            process.engine.director = None
            process.engine.calls.clear()
        for port in parts.ports.values():
            port.world = None
        return parts

    def num_options(self) -> int:
        count = len(self._late)
        for pending in self._pending:
            count += pending.num_outcomes
        if self._left and self._main is not None and not self._main.done():
            count += len(self._left)
        return count + self._may_time_pass()

    def _may_time_pass(self) -> bool:
        # The router answers at once or not at all: it is no engine that thinks for a minute.
        if self._loop.num_ready:
            return False  # no loop leaves for minutes what it could run
        for pending in self._pending:
            if pending.owner == "router":
                return False
        return self._loop.next_timer_s() is not None

    def take(self, option: int) -> str:
        pending = self._pending
        if option < len(pending):
            return self._resolve(pending[option], 0)
        option -= len(pending)
        if not pending or option >= sum(one.num_outcomes - 1 for one in pending):
            if pending:
                option -= sum(one.num_outcomes - 1 for one in pending)
            if self._may_time_pass():
                if option == 0:
                    self.now = self._loop.pass_time()
                    self.trace.append(("time", self.now))
                    return f"{self.now:g} s have passed before anything else happened"
                option -= 1
            if option < len(self._late):
                late = self._late.pop(option)
                late.future.set_result(0)
                self.trace.append((late.owner, late.operation, "late"))
                return f"{late.owner}: {late.operation} arrives at last"
            option -= len(self._late)
            return self._inject(self._left.pop(option))
        for one in pending:
            if option < one.num_outcomes - 1:
                return self._resolve(one, option + 1)
            option -= one.num_outcomes - 1
        raise AssertionError("no such option")

    def check(self) -> None:
        if self._is_dark and not self._running:
            self._check_released("after an offload")
        if self.violation:
            raise Violation(self.violation)

    def finish(self) -> None:
        if self._running or (self._main is not None and not self._main.done()):
            raise Violation(f"I4: {', '.join(self._running)} waits for ever")
        for rid, num_ends in self._clients.items():
            if num_ends != 1:
                raise Violation(f"request {rid} ended {num_ends} times")
        for router in self.parts.routers.values():
            if len(router.gate.in_flight) or router.gate.num_held:
                raise Violation("the gate counts requests that have ended")
        self.check()

    # -- what happens

    async def happens(self, owner: str, operation: str, num_outcomes: int) -> int:
        """Wait until the explorer lets this happen; how it goes."""
        future: asyncio.Future[int] = asyncio.Future(loop=self._loop)  # type: ignore[arg-type]
        pending = _Pending(owner, operation, num_outcomes, future)
        self._pending.append(pending)
        try:
            return await future
        finally:
            if pending in self._pending:
                self._pending.remove(pending)

    async def happens_late(self, owner: str, operation: str) -> None:
        """Wait until nothing else is left that could happen."""
        future: asyncio.Future[int] = asyncio.Future(loop=self._loop)  # type: ignore[arg-type]
        self._late.append(_Pending(owner, operation, 1, future))
        await future

    def _director(self, engine_id: str) -> Callable[[faults.Call], Awaitable[faults.Fault | None]]:
        outcomes = self.settings.outcomes
        num_outcomes = len(outcomes)

        async def direct(call: faults.Call) -> faults.Fault | None:
            operation = _told_apart(call.operation, call.arguments)
            if operation in CONTROL:
                return outcomes[await self.happens(engine_id, operation, num_outcomes)][1]
            if call.operation == "generate":
                await self.happens(engine_id, "generate", 1)
            return None

        return direct

    def _resolve(self, pending: _Pending, outcome: int) -> str:
        self._pending.remove(pending)
        if not pending.future.done():  # its caller was cancelled, and has not run since
            pending.future.set_result(outcome)
        if pending.owner in self.parts.launcher.processes and pending.operation in CONTROL:
            words = self.settings.outcomes[outcome][0]
        else:
            words = ("happens", "fails or is held up", "is lost after it is done")[outcome]
        self.trace.append((pending.owner, pending.operation, words))
        return f"{pending.owner}: {pending.operation} {words}"

    def _inject(self, what: str) -> str:
        self.trace.append(what)
        if what == "request":
            self._request("late")
        elif what == "cancel":
            self._is_cancelled = True
            for name, task in list(self._running.items()):
                if name.startswith("main"):
                    task.cancel()
        elif what.startswith("kill "):
            self.parts.launcher.processes[what.removeprefix("kill ")].engine.die("killed -9")
        else:
            self._begin(what, f"other {what}")
        return f"meanwhile: {what}"

    def _begin(self, command: str, name: str) -> asyncio.Task[Any]:
        self._num_commands += 1
        # Recovery and lending go on beside an offload, and take nothing of what it gave away.
        self._is_dark &= command.partition(" ")[0] in _BESIDE
        self._is_stopping |= command == "stop"
        task = self._loop.create_task(self._command(command, name))
        self._running[name] = task
        # Cancelled before its first step, it does not come to its own end.
        task.add_done_callback(lambda _: self._running.pop(name, None))
        return task

    async def _train(self) -> None:
        for number, command in enumerate(self.settings.commands):
            await asyncio.wait([self._begin(command, f"main {number} {command}")])
            if self.settings.is_over is not None and self.settings.is_over(self.outcomes):
                return

    async def _command(self, command: str, name: str) -> None:
        server = self.parts.server
        started = self.now
        if command in ("onload", "update", "update_weights"):
            call = {
                "onload": server.onload,
                "update": server.update_and_continue,
                "update_weights": server.update_weights,
            }[command]
            work: Awaitable[Any] = call(push(server.weight_version + 1))
        elif command in _OF_ALL:
            work = _OF_ALL[command](self.parts)
        elif command.startswith("kill "):
            work = self._kill(command.removeprefix("kill "))
        elif command.startswith("lose "):
            work = self._lose(command.removeprefix("lose "))
        else:
            verb, _, engine_id = command.partition(" ")
            work = _COMMANDS[verb](server, *([engine_id] if engine_id else []))
        try:
            try:
                done = await work
            finally:
                self._is_dark &= command.partition(" ")[0] in _BESIDE
        except asyncio.CancelledError:
            self.outcomes.append((command, "cancelled"))
        except RolloutError as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            self.told.append(f"{error} {notes}")
            self.outcomes.append((command, type(error).__name__))
        except BaseException as error:
            self.violate(f"{command} ended with {type(error).__name__}: {error}")
        else:
            self.outcomes.append((command, "done"))
            for report in done.values() if isinstance(done, dict) else [done]:
                if isinstance(report, StepReport):
                    self.told.extend(one.failure for one in _failures(report))
            self._check_done(command)
        finally:
            self._running.pop(name, None)
        self._check_returned(command, started)

    async def _kill(self, engine_id: str) -> None:
        self.parts.launcher.processes[engine_id].engine.die("killed -9")

    async def _lose(self, engine_id: str) -> None:
        """Its weights have come back as garbage, and nobody was told."""
        self.parts.launcher.processes[engine_id].engine.weights.lose()

    # -- requests

    def _request(self, rid: str) -> None:
        self._clients[rid] = 0
        self._loop.create_task(self._client(rid))

    async def _client(self, rid: str) -> None:
        gate = self.parts.router.gate
        not_on = ""
        for _ in range(2):
            decision = gate.enter(rid=rid, not_on=not_on)
            if isinstance(decision, Waiter):
                decided: asyncio.Future[Any] = self._loop.create_future()
                decision.on_decision = decided.set_result
                timer = self._loop.call_later(HOLD_S, gate.expire, decision)
                decision = await decided
                timer.cancel()
            if isinstance(decision, Refusal):
                break
            member = decision.member
            engine = self.parts.launcher.connect(member.endpoint, member.engine_id)
            try:
                async with asyncio.timeout(CLIENT_S):
                    await engine.generate(input_ids=[1], sampling_params=_ONE_TOKEN, rid=rid)
                break
            except TimeoutError:
                break
            except EngineUnreachable as error:
                gate.report_failure(decision, "generate", str(error))
                not_on = member.engine_id
            finally:
                gate.leave(decision)
        self._clients[rid] += 1

    # -- the invariants

    def violate(self, what: str) -> None:
        self.violation = self.violation or what

    def _left_to_serve(self) -> Iterable[SteeredProcess]:
        """Engines that nobody has fenced, ended, lent or lost, nor started again just now."""
        for engine_id, one in self.parts.launcher.processes.items():
            if one.num_kills or one.is_stopped or one.engine.is_dead:
                continue
            member = self.parts.member(engine_id)
            if member is not None and member.process is one and not member.is_stale:
                yield one

    def check_may_continue(self, asked: SteeredEngine) -> None:
        """I2: every engine that will serve is whole, up to date and verified."""
        if self._is_coming(asked):
            return
        versions = set()
        for process in self._left_to_serve():
            engine = process.engine
            if self._server_of(engine.engine_id) == self._server_of(asked.engine_id):
                versions.add(engine._version)
            member = self.parts.member(engine.engine_id)
            if engine.weights.lost and member is not None and member.owes_canary:
                continue  # which it can tell only when it has gone on, with the gate shut
            if why := _unfit(engine):
                self.violate(f"I2: {asked.engine_id} continues while {engine.engine_id} {why}")
        if len(versions) > 1:
            self.violate(f"I2: {asked.engine_id} continues among versions {sorted(versions)}")

    def _is_coming(self, engine: SteeredEngine) -> bool:
        """It is led to where the others are, or given its weights, and gets no requests."""
        member = self.parts.member(engine.engine_id)
        return member is None or member.engine is not engine or member.is_stale

    def _server_of(self, engine_id: str) -> str:
        group = engine_id.rpartition("-")[0]
        return next(name for name, one in self.parts.servers.items() if group in one._view.groups)

    def check_may_route(self, members: list[Member]) -> None:
        """I6: nobody gets requests who is not in a group, or is not proved."""
        if self._is_stopping:
            return  # nobody is in a group any more
        for one in members:
            member = self.parts.member(one.engine_id)
            if member is None:
                self.violate(f"I6: {one.engine_id} is in routing, and lent")
            elif one.is_choosable and member.is_stale:
                self.violate(f"I6: {one.engine_id} is in routing, and stale")

    def check_may_open(self, gate: Gate, version: int | None) -> None:
        """I2 and I6: whoever gets requests from now on is fit for them."""
        for member in gate.members.choosable:
            engine = self.parts.launcher.connect(member.endpoint, member.engine_id)
            if engine.struck_in:
                self.violate(
                    f"I6: {engine.engine_id} is in routing though it failed {engine.struck_in}"
                )
            if engine.is_dead:
                continue
            if engine.paused is not None:
                self.violate(f"I2: the gate opens while {engine.engine_id} is paused")
            if why := _unfit(engine):
                self.violate(f"I2: the gate opens while {engine.engine_id} {why}")
            if version is not None and engine._version != str(version):
                self.violate(
                    f"I2: the gate opens for version {version}; {engine.engine_id} holds "
                    f"{engine._version}"
                )

    def check_barrier(self, asked: SteeredEngine, operation: str) -> None:
        """No engine is further than one phase ahead of another."""
        server = self.parts.servers[self._server_of(asked.engine_id)]
        if asked.engine_id in server._gate.leaving or self._is_coming(asked):
            return  # it comes or leaves by itself, while the others serve
        is_release = operation == "release_memory_occupation"
        for process in self._left_to_serve():
            engine = process.engine
            if engine.struck_in or (engine.is_flushed if is_release else engine.paused):
                continue
            what = "flushed" if is_release else "paused"
            self.violate(
                f"barrier: {operation} of {asked.engine_id}; {engine.engine_id} not {what}"
            )

    def check_given_up(self, engine: SteeredEngine, operation: str, since: float) -> None:
        """I5: nobody's call is cut for a sibling's sake.  I4: nor is it waited for too long."""
        elapsed = self.now - since
        # One that starts, or is given its weights, has a deadline for all of that together.
        is_coming = self._is_coming(engine)
        least = 0.0 if is_coming else _LEAST_S.get(operation, BUDGET_S)
        if elapsed < least - 1e-3 and not (self._is_stopping or engine.is_dead):
            self.violate(f"I5: {operation} of {engine.engine_id} was cut after {elapsed:g} s")
        if elapsed > (_START_S if is_coming else BUDGET_S) + 1e-3:
            self.violate(f"I4: {operation} of {engine.engine_id} had {elapsed:g} s")

    def _check_done(self, command: str) -> None:
        """What holds after a command that says it has succeeded."""
        if command in ("offload", "all offload"):
            self._is_dark = True
            self._check_released("offload is done, and")
        if command in ("onload", "update", "serve") and not self._is_stopping:
            gate = self.parts.router.gate
            if gate.state is not GateState.OPEN:
                self.violate(f"{command} is done and the gate is {gate.state}")
        if command == "all onload" and not self._is_stopping:
            for name, router in self.parts.routers.items():
                if router.gate.state is not GateState.OPEN:
                    self.violate(f"{command} is done and the gate of {name} is {router.gate.state}")

    def _check_released(self, when: str) -> None:
        """I7: from here until the next command the memory is the trainer's."""
        for engine_id in self.parts.offloading:
            if self.parts.member(engine_id) is None:
                continue  # lent: it was measured when it left
            held = self.parts.launcher.processes[engine_id].engine.resident_bytes
            if held:
                self.violate(f"I7: {when} {engine_id} holds {held} bytes")

    def _check_returned(self, command: str, started: float) -> None:
        """What holds after a command, however it ended."""
        # A group that was too late for its server goes on by itself: the server has said so.
        has_given_up = self.settings.has_actors and (
            self._is_cancelled or any("took longer than" in told for told in self.told)
        )
        under_way = {one.owner: one.operation for one in self._pending} | self.hanging
        for owner, operation in under_way.items():
            if operation in CONTROL and not self._running and not has_given_up:
                self.violate(f"I5: {command} returned while {operation} of {owner} ran")
        limit = 5 * (BUDGET_S + SLACK_S)
        if self._num_commands > 1:  # one waits for the other
            limit += LOCK_S
        if self.now - started > limit:
            self.violate(f"I4: {command} took {self.now - started:g} s")
        gate = self.parts.router.gate
        if self._running:
            return  # a command that still runs may yet do it
        if not (self._is_cancelled or self._is_stopping):
            for engine_id, operation in self.struck.items():
                if not any(engine_id in told for told in self.told + self._shown_fenced()):
                    self.violate(f"I4: {engine_id} failed {operation}; nobody was told")
        if gate.state is GateState.OPEN:
            for member in gate.members.choosable:
                engine = self.parts.launcher.connect(member.endpoint, member.engine_id)
                if engine.struck_in:
                    self.violate(f"I6: {engine.engine_id} failed {engine.struck_in}, and serves")

    def dispose(self) -> None:
        """Break the cycles: a hundred thousand worlds keep the garbage collector busy."""
        parts = self.parts
        used: list[Any] = [parts.deployment, parts.launcher]
        for server in parts.servers.values():
            recovery = server._recovery
            used += [server._steps, server._gate, server._view, server._places, server._window]
            used += [recovery, recovery._repair, recovery._record, server]
        for group in parts.groups.values():
            used += [group._commands, group._mending, group._lending, group._roster, group]
        used += [*parts.ports.values(), *parts.routers.values()]
        for process in parts.launcher.all:
            used += [process, process.engine]
        for one in used:
            vars(one).clear()
        vars(self).clear()

    def _shown_fenced(self) -> list[str]:
        """What a look at the groups, and recovery, tell of engines that failed before."""
        shown = [
            member.fenced_because
            for group in self.parts.groups.values()
            for member in group._roster.members()
        ]
        for server in self.parts.servers.values():
            for engines in server._recovery._record.snapshot().values():
                shown += [one.because for one in engines.values()]
        return shown

    # -- between runs

    def state(self) -> tuple[Any, ...]:
        """All that decides what can happen next; two runs that end alike go on alike."""
        parts = self.parts
        newest = parts.server.weight_version
        return (
            tuple(
                (
                    tuple(server.phases().values()),
                    server._gate.state,
                    server._endpoint is None,
                    parts.routers[name].gate.state,
                    tuple((one.engine_id, one.state) for one in parts.routers[name].gate.members),
                    tuple(
                        (engine_id, one.state, one.num_restarts, one.is_fenced)
                        for engines in server._recovery._record._engines.values()
                        for engine_id, one in engines.items()
                    ),
                )
                for name, server in parts.servers.items()
            ),
            tuple(
                (
                    group._commands.phase,
                    tuple(
                        (
                            one.engine_id,
                            tuple(sorted(one.released)),
                            _age(one.weight_version, newest),
                            one.is_proved,
                            bool(one.fenced_because),
                            bool(one.changed),
                            one.is_stale,
                            one.owes_canary,
                        )
                        for one in group._roster.members()
                    ),
                    group._roster.lent(),
                )
                for group in parts.groups.values()
            ),
            tuple(
                (
                    one.is_dead,
                    one.paused,
                    tuple(sorted(one.released)),
                    _age(int(one._version), newest),
                    bool(one.weights.lost),
                    one.is_updating,
                    bool(one.struck_in),
                )
                for one in (process.engine for process in parts.launcher.processes.values())
            ),
        )


async def _recover(server: RolloutServer) -> None:
    """What the background of a server does in one round: look, then mend."""
    await server._recovery.look()
    await server._recovery.mend()


_COMMANDS: dict[str, Callable[..., Awaitable[Any]]] = {
    "offload": RolloutServer.offload,
    "serve": RolloutServer.onload,
    "stop": RolloutServer.stop,
    "recover": _recover,
    "remove": RolloutServer.remove_engine,
    "lend": lambda server, engine_id: server.remove_engine(engine_id, True),
    "add": RolloutServer.add_engine,
} | {
    one.value: lambda server, command=one: server.advance(command)
    for one in Command
    if one is not Command.UPDATE_WEIGHTS
}
_BESIDE = frozenset({"recover", "remove", "lend", "add"})


def _onload_all(parts: Parts) -> Awaitable[Any]:
    name, server = next(iter(parts.servers.items()))
    return parts.deployment.onload({name: push(server.weight_version + 1)})


_OF_ALL: dict[str, Callable[[Parts], Awaitable[Any]]] = {
    "all offload": lambda parts: parts.deployment.offload(),
    "all onload": _onload_all,
    "all serve": lambda parts: parts.deployment.onload({}),
}


def _told_apart(operation: str, arguments: Any) -> str:
    """A canary is no request: it is a call of ours, and anything may become of it."""
    rid = arguments.get("rid") if operation == "generate" else None
    return "canary" if rid is not None and rid.startswith(RID_PREFIX) else operation


def _age(version: int | None, newest: int) -> int | None:
    return None if version is None else newest - version


def _unfit(engine: SteeredEngine) -> str:
    if engine.released:
        return f"has {', '.join(sorted(engine.released))} released"
    if engine.weights.lost:
        return "has lost its weights"
    if engine.is_updating:
        return "is being updated"
    return "" if engine.is_proved else "has not been verified"


def _failures(report: StepReport) -> list[Any]:
    return [failure for one in report.reports for failure in one.failures]


def push(version: int) -> WeightPush:
    """New weights for the one tensor of these engines."""
    tensor = DEFAULT_TENSORS[-1]
    bucket = pack_tensors({tensor.name: FakeTensor(tensor.shape, version)})
    return WeightPush(version, _MANIFEST, [bucket])
