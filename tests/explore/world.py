"""What is explored: one server, its groups, its gate and requests, over steered fake engines.

Every call of an engine, of a process and of the router waits until the explorer says what becomes
of it; ``invariants.py`` says what must never become of them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any

from engines.fake import FakeTensor, faults, pack_tensors
from engines.fake.engine.fake_caches import FakeCaches
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.protocol import Engine, GenerateReply, SamplingParams
from engines.protocol.errors import EngineUnreachable
from engines.protocol.plain_text import describe
from rollout.control.server.journal import JournalRecord
from rollout.control.server.server import RolloutServer
from rollout.core.errors import RolloutError
from rollout.core.types import StepReport
from rollout.driver.client.generation_client import GenerationRequest
from rollout.router.gate.gate import Refusal, Waiter
from rollout.rules.lifecycle import Command
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from tests.explore.driven import Driving, no_reply
from tests.explore.explorer import ExploredLoop, ExploredProcess, Violation
from tests.explore.invariants import Invariants
from tests.explore.settings import Settings
from tests.explore.steered import (
    CONTROL,
    Parts,
    Pending,
    SteeredProcess,
    call_in,
    operation_name,
    slot_of,
)

_CLIENT_S = 3000.0
_HOLD_S = 600.0
_MANIFEST = Manifest.of(TensorSpec(one.name, one.dtype, one.shape) for one in DEFAULT_TENSORS[-1:])
_ONE_TOKEN = SamplingParams(max_new_tokens=1)


class World(Invariants):
    """One run.  A ``Scenario`` of the explorer."""

    def __init__(self, parts: Parts, settings: Settings) -> None:
        super().__init__(parts, settings)
        self.outcomes: list[tuple[str, str]] = []
        self.trace: list[Any] = []
        self._left = list(settings.injections)
        self._late: list[Pending] = []
        self._clients: dict[str, int] = {}
        self._requests: list[asyncio.Task[None]] = []
        self._main: asyncio.Task[None] | None = None
        self._server_process: ExploredProcess | None = None
        self._driving: Driving | None = None

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
            if self.settings.has_processes and not port.is_lost:
                port.process = self.new_process()
        if self.settings.has_processes:
            self._server_process = self.new_process()
        for record in parts.records.values():
            record.world = self
        for number in range(self.settings.num_requests):
            self._request(f"early-{number}")
        if self.settings.num_prompts:
            self._driving = Driving(self, self.settings.num_prompts)
        self._main = loop.create_task(self._train())

    def new_process(self) -> ExploredProcess:
        """A process that can be lost."""
        return ExploredProcess(self._loop)

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
            port.world = port.process = None
        for record in parts.records.values():
            record.world = None
        return parts

    def num_options(self) -> int:
        count = len(self._late)
        for pending in self._pending:
            count += pending.num_outcomes
        if self._left and self._is_busy():
            count += len(self._left)
        return count + self._may_time_pass()

    def _is_busy(self) -> bool:
        has_driver = self._driving is not None and not self._driving.is_done
        return has_driver or (self._main is not None and not self._main.done())

    def _may_time_pass(self) -> bool:
        # These answer at once or not at all: they are no engines that think for a minute.
        if self._loop.num_ready:
            return False  # no loop leaves for minutes what it could run
        for pending in self._pending:
            if pending.owner in ("router", "journal") or pending.operation == "reply":
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
        self._check_boots()
        if self.violation:
            if self._driving is not None:
                self._driving.end()
            raise Violation(self.violation)

    def finish(self) -> None:
        if self._driving is not None:
            self._driving.end()
        if self._running or (self._main is not None and not self._main.done()):
            raise Violation(f"I4: {', '.join(self._running)} waits for ever")
        for rid, num_ends in self._clients.items():
            if num_ends != 1:
                raise Violation(f"request {rid} ended {num_ends} times")
        if self._driving is not None and (why := self._driving.wrong()):
            raise Violation(why)
        for router in self.parts.routers.values():
            if len(router.gate.in_flight) or router.gate.num_held:
                raise Violation("the gate counts requests that have ended")
        self.check()

    # -- what happens

    async def happens(
        self, owner: str, operation: str, num_outcomes: int, *, is_slow: bool = False
    ) -> int:
        """Wait until the explorer lets this happen; how it goes.

        Args:
            is_slow: in the ordinary course, all other calls happen first.
        """
        future: asyncio.Future[int] = asyncio.Future(loop=self._loop)  # type: ignore[arg-type]
        pending = Pending(owner, operation, num_outcomes, future, is_slow=is_slow)
        num_slow = 0 if is_slow else sum(one.is_slow for one in self._pending)
        self._pending.insert(len(self._pending) - num_slow, pending)
        try:
            return await future
        finally:
            if pending in self._pending:
                self._pending.remove(pending)

    async def happens_late(self, owner: str, operation: str) -> None:
        """Wait until nothing else is left that could happen."""
        future: asyncio.Future[int] = asyncio.Future(loop=self._loop)  # type: ignore[arg-type]
        self._late.append(Pending(owner, operation, 1, future))
        await future

    def _director(
        self, engine_id: str
    ) -> Callable[[faults.RecordedCall], Awaitable[faults.Fault | None]]:
        outcomes = self.settings.outcomes
        num_outcomes = len(outcomes)

        async def direct(call: faults.RecordedCall) -> faults.Fault | None:
            operation = operation_name(call.operation, call.arguments)
            if operation in CONTROL:
                return outcomes[await self.happens(engine_id, operation, num_outcomes)][1]
            if call.operation == "generate":
                await self.happens(engine_id, "generate", 1)
            return None

        return direct

    def _resolve(self, pending: Pending, outcome: int) -> str:
        self._pending.remove(pending)
        if not pending.future.done():  # its caller was cancelled, and has not run since
            pending.future.set_result(outcome)
        if pending.owner in self.parts.launcher.processes and pending.operation in CONTROL:
            words = self.settings.outcomes[outcome][0]
        else:
            words = ("happens", "fails or is held up", "is slow, or lost after it is done")[outcome]
        self.trace.append((pending.owner, pending.operation, words))
        return f"{pending.owner}: {pending.operation} {words}"

    def _inject(self, what: str) -> str:
        self.trace.append(what)
        if what == "request":
            self._request("late")
        elif what == "cancel":
            self._is_cancelled = True
            for name, task in list(self._running.items()):
                if name.startswith("main") and "replace" not in name:  # no user asks for that
                    task.cancel()
        elif what.startswith("kill "):
            self._end_engines(what.removeprefix("kill "))
        elif what.startswith("crash "):
            self._crash(what.removeprefix("crash "))
        else:
            self._begin(what, f"other {what}")
        return f"meanwhile: {what}"

    def _begin(self, command: str, name: str) -> asyncio.Task[Any]:
        self._num_commands += 1
        # Recovery and removals run beside an offload, and use no memory that it has released.
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
        parts, server, started = self.parts, self.parts.server, self.now
        version = server.weight_version + 1
        if command == "again":
            if parts.failed is None:
                return
            command, version = parts.failed
        elif command == "onload same":
            command, version = "onload", server.weight_version
        opened = self.parts.opened
        if command in _PUSHES:
            work: Awaitable[Any] = _PUSHES[command](server, push(version))
        elif command in _OF_ALL:
            work = _OF_ALL[command](parts)
        elif command.startswith("kill "):
            work = self._kill(command.removeprefix("kill "))
        elif command == "alike":
            work = self._alike(version)
        elif command.startswith("lose "):
            work = self._lose(command.removeprefix("lose "))
        elif command.startswith("replace "):
            work = self._replace(command.removeprefix("replace "))
        elif command == "takeover":
            work = self._take_over()
        elif command.startswith("remember "):
            work = self._remember(command.removeprefix("remember "))
        else:
            verb, _, engine_id = command.partition(" ")
            work = _COMMANDS[verb](server, *([engine_id] if engine_id else []))
        try:
            try:
                is_own = command in ("takeover", "replace server")
                done = await (work if is_own else self._in_server(server, work))
            finally:
                self._is_dark &= command.partition(" ")[0] in _BESIDE
        except asyncio.CancelledError:
            self.outcomes.append((command, "cancelled"))
            self._has_failed(command, version)
        except RolloutError as error:
            notes = " ".join(getattr(error, "__notes__", ()))
            self.reported.append(f"{error} {notes}")
            self.outcomes.append((command, type(error).__name__))
            self._has_failed(command, version)
            self.check_refused(error)
        except BaseException as error:
            self.violate(f"{command} ended with {type(error).__name__}: {error}")
        else:
            self.outcomes.append((command, "done"))
            if command in _PUSHES:
                self.check_pushed(version, opened)
            if parts.failed is not None and parts.failed[0] == command:
                parts.failed = None
            for report in done.values() if isinstance(done, dict) else [done]:
                if isinstance(report, StepReport):
                    self.reported.extend(one.failure for one in _failures(report))
            self._check_done(command)
        finally:
            self._running.pop(name, None)
        self._check_returned(command, started)

    async def _in_server(self, server: RolloutServer, work: Awaitable[Any]) -> Any:
        if self._server_process is None:
            return await work

        async def run() -> Any:
            await server._lock.opened.wait()  # it may have to continue a lost one first
            return await work

        try:
            return await call_in(self._server_process, "the server", run())
        finally:
            if asyncio.iscoroutine(work) and getcoroutinestate(work) == CORO_CREATED:
                work.close()

    def _crash(self, which: str) -> None:
        """A group, the server with its groups, the router, or a driver, is lost in the middle of
        all that it does."""
        if which == "router":
            self._lose_router()
            return
        if which == "driver":
            assert self._driving is not None
            self._driving.lose()
            return
        parts, is_server = self.parts, which == "server"
        names = list(parts.ports) if is_server else [which]
        lost = [parts.ports[name].process for name in names]
        for process in [*lost, self._server_process] if is_server else lost:
            if process is not None and not process.is_lost:
                process.kill()
        self.forget_lost()
        for engine_id in parts.launcher.processes:  # what they did decides, and not who knew of it
            if slot_of(engine_id).rpartition("-")[0] in names:
                self.hanging.pop(engine_id, None)
                self.struck.pop(engine_id, None)
                parts.launcher.processes[engine_id].engine.struck_in = ""
        self.taking_over.difference_update(names)
        for name in names:
            parts.lose_group(name)
        if is_server:
            parts.router.on_idle = None
            self._server_process = self.new_process()
            (record,) = parts.records.values()
            if why := record.newest.why_lost:
                self.violate(f"nobody continues the server: {why}")
                return
            parts.continue_server(record.newest)._lock.opened.clear()
            self._begin("takeover", "other takeover")

    def forget_lost(self) -> None:
        """What lost processes have called comes to nothing."""
        for calls in (self._pending, self._late):
            calls[:] = [one for one in calls if one.process is None or not one.process.is_lost]

    def _lose_router(self) -> None:
        """Its clients lose their connections, and its server the calls that are under way."""
        parts, router = self.parts, self.parts.router
        router.lose()
        for call in [one for one in self._pending if one.owner == "router"]:
            self._pending.remove(call)
            if not call.future.done():
                call.future.set_result(0)
        for request in self._requests:
            request.cancel()
        self._loop.create_task(router.begin(lambda: parts.server))

    async def _take_over(self) -> None:
        """What ``RolloutServerActor`` does when Ray has started it again."""
        (record,) = self.parts.records.values()
        assert self._server_process is not None
        work = self._take_place(self.parts.server, record.newest)
        await call_in(self._server_process, "the server", work)

    async def _take_place(self, server: RolloutServer, record: JournalRecord) -> None:
        try:
            await server.continue_lost(record)
            await server._recovery.stop()  # it runs only as a command of the plan
        except Exception as error:
            self.violate(f"the server is not continued: {describe(error)}")
        finally:
            server._lock.opened.set()

    def _has_failed(self, command: str, version: int) -> None:
        """Remember a command of a step, so that ``again`` can repeat it."""
        if command.partition(" ")[0] not in _BESIDE:
            self.parts.failed = command, version

    def _end_engines(self, which: str) -> None:
        """``kill -9`` of one engine, of those of a group, or of ``all``."""
        for engine_id, process in self.parts.launcher.processes.items():
            if which in ("all", engine_id, slot_of(engine_id).rpartition("-")[0]):
                process.engine.die("killed -9")

    async def _kill(self, which: str) -> None:
        self._end_engines(which)

    async def _lose(self, engine_id: str) -> None:
        """Its weights have come back as garbage, without any report of it."""
        self.parts.launcher.processes[engine_id].engine.weights.lose()

    async def _replace(self, name: str) -> None:
        """The memory of a group, or of the server, is lost between two commands; another one
        takes its place."""
        if name == "server":
            self._crash(name)
            await asyncio.wait([self._running["other takeover"]])
            return
        server = next(one for one in self.parts.servers.values() if name in one._registry.groups)
        async with server._lock.held("replace"):
            await server.replace_lost_group(name)
            await server._recovery.probe_once()  # as ``replace_lost_groups`` does

    async def _remember(self, engine_id: str) -> None:
        """It has a prefix cache that no flush empties, and whose keys have no names."""
        caches = FakeCaches(prefix_cache=True)
        caches.forgets |= {"prefix cache", "names"}
        self.parts.launcher.processes[engine_id].engine.caches = caches

    async def _alike(self, version: int) -> None:
        """The engines have loaded what will be pushed as ``version``."""
        tensor = DEFAULT_TENSORS[-1]
        for process in self.parts.launcher.processes.values():
            process.engine.weights.write([(tensor.name, FakeTensor(tensor.shape, version))])

    # -- requests

    def _request(self, rid: str) -> None:
        self._clients[rid] = 0
        self._requests.append(self._loop.create_task(self._client(rid)))

    async def _client(self, rid: str) -> None:
        try:
            await self._send(rid)
        except asyncio.CancelledError:
            self.trace.append((rid, "its connection is lost"))
        finally:
            self._clients[rid] += 1

    async def _send(self, rid: str) -> None:
        await self._route(
            rid,
            lambda engine: engine.generate(input_ids=[1], sampling_params=_ONE_TOKEN, rid=rid),
        )

    async def answer(self, request: GenerationRequest) -> GenerateReply:
        """The reply to a request of a driver.

        Raises:
            GenerationError: there is none.
        """
        reply = await self._route(
            request.rid,
            lambda engine: engine.generate(
                input_ids=request.input_ids,
                sampling_params=request.sampling,
                rid=request.rid,
                return_logprob=True,
            ),
        )
        if reply is None:
            raise no_reply("HTTP 503")
        return reply

    async def _route(
        self, rid: str, generate: Callable[[Engine], Awaitable[GenerateReply]]
    ) -> GenerateReply | None:
        """The reply of an engine, or of another one if that is lost; None for a refusal."""
        gate = self.parts.router.gate
        excluded_engine = ""
        for _ in range(2):
            decision = gate.enter(rid=rid, excluded_engine=excluded_engine)
            if isinstance(decision, Waiter):
                decided: asyncio.Future[Any] = self._loop.create_future()
                decision.on_decision = decided.set_result
                timer = self._loop.call_later(_HOLD_S, gate.expire, decision)
                decision = await decided
                timer.cancel()
            if isinstance(decision, Refusal):
                break
            member = decision.member
            engine = self.parts.launcher.connect(member.endpoint, member.engine_id)
            try:
                async with asyncio.timeout(_CLIENT_S):
                    return await generate(engine)
            except TimeoutError:
                break
            except EngineUnreachable as error:
                gate.report_failure(decision, "generate", str(error))
                excluded_engine = member.engine_id
            finally:
                gate.leave(decision)
        return None

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
                    not server._router.url,
                    parts.routers[name].gate.state,
                    tuple((one.engine_id, one.state) for one in parts.routers[name].gate.members),
                    tuple(
                        (engine_id, one.state, one.num_restarts, one.is_fenced)
                        for engines in server._recovery.tracker._engines.values()
                        for engine_id, one in engines.items()
                    ),
                )
                for name, server in parts.servers.items()
            ),
            tuple(
                (name, server._phase_runner.unfinished(name))
                for server in parts.servers.values()
                for name in server._registry.groups
                if parts.ports[name].is_lost
            ),
            parts.failed if parts.server._config.health.recover else None,
            newest in parts.opened,
            tuple(
                (
                    group._commands.phase,
                    tuple(
                        (
                            one.engine_id,
                            tuple(sorted(one.released)),
                            _age(one.weight_version, newest),
                            one.is_verified,
                            bool(one.fence_reason),
                            bool(one.changed),
                            one.is_stale,
                            one.needs_logprob_check,
                            one.process_name,
                        )
                        for one in group._engines.members()
                    ),
                    tuple(group._engines.vacant),
                    tuple(sorted(group._boots._ready)),
                )
                for group in parts.groups.values()
            ),
            tuple(
                (
                    one.is_dead,
                    one.paused,
                    tuple(sorted(one.released)),
                    _age(int(one._version) if one._version.isdigit() else None, newest),
                    bool(one.weights.lost),
                    one.is_updating,
                    bool(one.struck_in),
                )
                for one in (process.engine for process in parts.launcher.processes.values())
            ),
        )

    def dispose(self) -> None:
        """Break the cycles: a hundred thousand worlds keep the garbage collector busy."""
        parts = self.parts
        self._loop.bury()
        used: list[Any] = [parts.deployment, parts.launcher]
        for server in parts.servers.values():
            recovery = server._recovery
            used += [server._phase_runner, server._gate, server._registry]
            used += [server._elastic, recovery, recovery.actions, recovery.tracker, server]
        for group in parts.groups.values():
            used += [group._commands, group._recovery, group._scaling, group._memory]
            used += [group._engines, group._boots, group]
        used += [*parts.ports.values(), *parts.routers.values()]
        for process in parts.launcher.all:
            used += [process, process.engine]
        for one in used:
            vars(one).clear()
        vars(self).clear()


async def _boot(server: RolloutServer) -> None:
    """One round of the background work of a server: probe, then recover.  Boots go on."""
    await server._recovery.probe_once()
    await server._recovery.recover()


async def _recover(server: RolloutServer) -> None:
    """The same, and one more round after the boots."""
    await _boot(server)
    await server._recovery.actions.wait_for_boots(server.phases())
    await server._recovery.recover()


_COMMANDS: dict[str, Callable[..., Awaitable[Any]]] = {
    "offload": RolloutServer.offload,
    "serve": RolloutServer.serve,
    "stop": RolloutServer.stop,
    "boot": _boot,
    "recover": _recover,
    "remove": RolloutServer.remove_engine,
    "add": RolloutServer.add_engine,
} | {
    one.value: lambda server, command=one: server.advance(command)
    for one in Command
    if one is not Command.UPDATE_WEIGHTS
}
_PUSHES: dict[str, Callable[..., Awaitable[Any]]] = {
    # Looked up at the call: a mutation may have replaced the method.
    "onload": lambda server, push: server.push(push),
    "update": lambda server, push: server.push(push),
    "update_weights": lambda server, push: server.update_weights(push),
    "prove": lambda server, push: server.check_push_path(push),
}
_BESIDE = frozenset(
    {
        "boot",
        "recover",
        "remove",
        "add",
        "kill",
        "lose",
        "remember",
        "alike",
        "replace",
        "takeover",
    }
)


def _onload_all(parts: Parts) -> Awaitable[Any]:
    name, server = next(iter(parts.servers.items()))
    return parts.deployment.serve({name: push(server.weight_version + 1)})


_OF_ALL: dict[str, Callable[[Parts], Awaitable[Any]]] = {
    "all offload": lambda parts: parts.deployment.offload(),
    "all onload": _onload_all,
    "all serve": lambda parts: parts.deployment.serve({}),
}


def _age(version: int | None, newest: int) -> int | None:
    return None if version is None else newest - version


def _failures(report: StepReport) -> list[Any]:
    return [failure for one in report.reports for failure in one.failures]


def push(version: int) -> WeightPush:
    """New weights for the one tensor of these engines."""
    tensor = DEFAULT_TENSORS[-1]
    bucket = pack_tensors({tensor.name: FakeTensor(tensor.shape, version)})
    return WeightPush(version, _MANIFEST, [bucket])
