"""Bugs to be seeded into the real code, and where each is to be looked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engines.protocol import MemoryTag
from engines.protocol.errors import EngineRejected, EngineUnreachable
from rollout.control.deployment import Deployment
from rollout.control.engine import memory
from rollout.control.engine.memory import CallOutcome, EngineMemory
from rollout.control.engine.probe import Probe
from rollout.control.engine.state import EngineState
from rollout.control.group import engine_boots, engine_recovery, push_path_check, server_group
from rollout.control.group.command_runner import CommandRunner
from rollout.control.group.engine_boots import EngineBoots
from rollout.control.group.engine_recovery import EngineRecovery
from rollout.control.group.engine_set import EngineSet
from rollout.control.group.scaling import EngineScaling
from rollout.control.group.server_group import ServerGroup
from rollout.control.recovery.actions import RecoveryActions
from rollout.control.server import gate_control, phase_runner
from rollout.control.server.gate_control import GateControl
from rollout.control.server.group_registry import GroupRegistry
from rollout.control.server.phase_runner import PhaseRunner
from rollout.control.server.router_client import RouterClient
from rollout.control.server.server import RolloutServer
from rollout.core import fanout
from rollout.core.types import StepReport
from rollout.driver.stream.journal import Journal
from rollout.rules import lifecycle
from rollout.rules.lifecycle import OFFLOAD, Command, Phase
from rollout.rules.routing import BackendState
from rollout.weights.push.push_version import LastPush
from rollout.weights.push.weight_push import WeightPush
from tests.explore.plans import BY_CANARY, PHASES, REMEMBERED, SENTINEL, STANDBYS
from tests.explore.search import Explorer, State
from tests.explore.settings import FEW_OUTCOMES, ORDER_ONLY, OUTCOMES, Settings
from tests.explore.snapshots import after, serving

_RAISE = {"on_failure": "raise"}
# An engine that is removed sleeps, because its process is not ours.
_ATTACHED = {
    "shared": {
        "engine": {
            "kind": "attached",
            "urls": ["http://127.0.0.1:4000", "http://127.0.0.1:4001"],
        }
    }
}
_BESIDE_A_BOOT = (("boot", "offload", "onload", "recover"), ("kill shared-0",))
_LATE_BOOT: dict[str, Any] = {
    "recover": True,
    "settings": {"injections": (), "outcomes": ORDER_ONLY, "launch_outcomes": 3},
}


def _route_by_the_first_members(patch: pytest.MonkeyPatch) -> None:
    set_members = RouterClient.set_members

    async def set_first(self: RouterClient, epoch: int, members: list[Any]) -> None:
        first = self._members
        await set_members(self, epoch, members)
        self._members = first or self._members

    patch.setattr(RouterClient, "set_members", set_first)


def _deliver_before_the_journal_has_it(patch: pytest.MonkeyPatch) -> None:
    async def write(self: Journal) -> None:
        """The sweep writes it later."""

    patch.setattr(Journal, "write", write)


@dataclass(frozen=True)
class Mutation:
    """One bug.

    Attributes:
        seed: puts it into the code, until the patch is undone.
        caught_as: what the violation says.
        commands: what to explore, from a server that serves, after ``begin``.
    """

    name: str
    seed: Callable[[pytest.MonkeyPatch], None]
    caught_as: str
    commands: tuple[str, ...] = ("offload",)
    begin: tuple[str, ...] = ()
    lifecycle: dict[str, Any] | None = None
    verify: dict[str, Any] | None = None
    deviations: int = 1
    settings: dict[str, Any] | None = None
    recover: bool = False
    frozen: dict[str, dict[str, Any]] | None = None
    update: str = "full"
    reports_released: bool = False
    expect_version: int = 0
    groups: dict[str, dict[str, Any]] | None = None
    has_source: bool = False

    def explore(self, patch: pytest.MonkeyPatch) -> Explorer:
        """Seed it and look for it."""
        start = serving(
            self.groups,
            lifecycle=self.lifecycle,
            verify=self.verify,
            recover=self.recover,
            frozen=self.frozen,
            update=self.update,
            reports_released=self.reports_released,
            expect_version=self.expect_version,
            has_journal="has_processes" in (self.settings or {}),
            has_source=self.has_source,
        )
        state = State(after(start, *self.begin) if self.begin else start)
        self.seed(patch)
        # The second line keeps out what the bug lets in: each is looked for where it is.
        patch.setattr(gate_control, "why_unfit", lambda *known: "")
        explorer = Explorer()
        settings = Settings(
            self.commands,
            **(
                {"injections": ("cancel", "stop"), "outcomes": FEW_OUTCOMES} | (self.settings or {})
            ),
        )
        explorer.explore(state, settings, max_deviations=self.deviations)
        return explorer


def _skip_the_barrier(patch: pytest.MonkeyPatch) -> None:
    async def advance(self: PhaseRunner, *commands: Command, push: Any = None) -> Any:
        if commands != OFFLOAD:
            return await advanced(self, *commands, push=push)
        await self._gate.shut("holding", "paused", "pause_generation")
        self._order += 3

        async def all_at_once(name: str) -> None:
            group = self._registry.groups[name]
            await group.run(Command.PAUSE_GENERATION, self._order - 2)
            await group.run(Command.FLUSH_CACHE, self._order - 1)
            if self._registry.traits[name].needs_offload:
                released = await group.run(Command.RELEASE_MEMORY_OCCUPATION, self._order)
                self._registry.phases[name] = Phase(released.phase)
            else:
                self._registry.phases[name] = Phase.FLUSHED

        await asyncio.gather(*(all_at_once(name) for name in self._registry.groups))
        return await advanced(self)

    advanced = PhaseRunner.advance
    patch.setattr(PhaseRunner, "advance", advance)


def _continue_in_finally(patch: pytest.MonkeyPatch) -> None:
    async def update(self: RolloutServer, push: Any) -> Any:
        try:
            return await updated(self, push)
        finally:
            await self._router.set_gate("open", weight_version=self.weight_version)

    updated = RolloutServer.push
    patch.setattr(RolloutServer, "push", update)


def _retry_what_was_lost(patch: pytest.MonkeyPatch) -> None:
    def again(ask: Callable[[], Any]) -> Callable[[], Any]:
        async def twice() -> Any:
            try:
                return await ask()
            except EngineUnreachable:
                return await ask()

        return twice

    async def fan_out(asks: Any, **more: Any) -> Any:
        return await fanout.fan_out({one: again(ask) for one, ask in asks.items()}, **more)

    patch.setattr(server_group, "fan_out", fan_out)


def _open_before_verify(patch: pytest.MonkeyPatch) -> None:
    async def run_command(self: PhaseRunner, command: Command, *how: Any, **note: Any) -> Any:
        if command is Command.VERIFY:
            await self.open_gate()
        return await ran(self, command, *how, **note)

    ran = PhaseRunner.run
    patch.setattr(PhaseRunner, "run", run_command)


def _forget_to_fence(patch: pytest.MonkeyPatch) -> None:
    async def fence(self: EngineSet, failures: Any) -> None:
        """It will be well again."""

    patch.setattr(EngineSet, "fence", fence)


def _release_under_requests(patch: pytest.MonkeyPatch) -> None:
    async def carry_out(self: ServerGroup, command: Command, *how: Any) -> Any:
        if command in (Command.PAUSE_GENERATION, Command.FLUSH_CACHE):
            self._commands.phase = self._commands.target(command)
            return self._commands.report(command, {}, 0.0)
        return await carried_out(self, command, *how)

    carried_out = ServerGroup._carry_out
    patch.setattr(ServerGroup, "_carry_out", carry_out)


def _resume_twice(patch: pytest.MonkeyPatch) -> None:
    async def onload_kv(self: EngineMemory, member: Any) -> None:
        if member.released:
            await member.engine.resume_memory_occupation(tuple(MemoryTag))
            member.released.clear()

    patch.setattr(EngineMemory, "onload_kv", onload_kv)


def _cancel_siblings(patch: pytest.MonkeyPatch) -> None:
    async def wait_all(tasks: Any) -> None:
        waiting = set(tasks)
        if not waiting:
            return
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        while waiting and all(_is_well(one) for one in done):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()
        if waiting:
            await asyncio.wait(waiting)

    patch.setattr(fanout, "wait_all", wait_all)


def _is_well(task: asyncio.Task[Any]) -> bool:
    return getattr(task.result(), "failure", None) is None if not task.cancelled() else False


def _open_with_an_older_version(patch: pytest.MonkeyPatch) -> None:
    async def open_gate(self: GateControl, served: LastPush, of_push: Any) -> None:
        await opened(self, replace(served, version=served.version - 1), of_push)

    opened = GateControl.open
    patch.setattr(GateControl, "open", open_gate)


def _route_to_the_fenced(patch: pytest.MonkeyPatch) -> None:
    def member(*known: Any) -> Any:
        return replace(made(*known), state=BackendState.SERVING)

    made = gate_control.member
    patch.setattr(gate_control, "member", member)


def _ignore_the_order(patch: pytest.MonkeyPatch) -> None:
    def check_order(self: CommandRunner, order: int | None) -> None:
        """Whatever comes is done."""

    patch.setattr(CommandRunner, "_check_order", check_order)


def _believe_without_asking(patch: pytest.MonkeyPatch) -> None:
    async def trust(member: Any, version: int) -> None:
        member.mark_verified(None)

    patch.setattr(server_group, "collect_fingerprints", trust)
    patch.setattr(server_group, "verify_group", lambda answers, *known: answers)


def _trust_a_kill(patch: pytest.MonkeyPatch) -> None:
    async def confirm_gone(self: EngineSet) -> None:
        """A kill that was tried has surely worked."""

    patch.setattr(EngineSet, "confirm_gone", confirm_gone)


def _stay_behind_the_engines(patch: pytest.MonkeyPatch) -> None:
    async def conclude(self: CommandRunner, *what: Any) -> Any:
        before = self.phase
        try:
            return await concluded(self, *what)
        except BaseException:
            self.phase = before
            raise

    concluded = CommandRunner.conclude
    patch.setattr(CommandRunner, "conclude", conclude)


def _leave_when_cancelled(patch: pytest.MonkeyPatch) -> None:
    async def wait_all(tasks: Any) -> None:
        waiting = set(tasks)
        if waiting:
            await asyncio.wait(waiting)

    patch.setattr(fanout, "wait_all", wait_all)


def _let_the_late_go(patch: pytest.MonkeyPatch) -> None:
    async def conclude(
        self: CommandRunner, command: Any, target: Any, answers: Any, started: float
    ) -> Any:
        kept = {
            one: answer
            for one, answer in answers.items()
            if answer.failure is None or "took longer" not in str(answer.failure)
        }
        return await concluded(self, command, target, kept, started)

    concluded = CommandRunner.conclude
    patch.setattr(CommandRunner, "conclude", conclude)


def _wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    async def fan_out(asks: Any, *, operation: str, budget_s: float) -> Any:
        return await fanout.fan_out(asks, operation=operation, budget_s=1e9)

    patch.setattr(server_group, "fan_out", fan_out)


def _serve_the_stale(patch: pytest.MonkeyPatch) -> None:
    def member(worker_type: Any, engine: Any, *how: Any) -> Any:
        return made(worker_type, replace(engine, is_stale=False), *how)

    made = gate_control.member
    patch.setattr(gate_control, "member", member)


def _forget_a_boot_that_was_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecoveryActions, "_mark_interrupted", lambda *_: None)


def _let_boots_take_the_memory(patch: pytest.MonkeyPatch) -> None:
    async def end(self: EngineBoots, engine_ids: Any = None, **which: Any) -> None:
        """They go on while the trainer has the memory."""

    patch.setattr(EngineBoots, "end", end)


def _let_standbys_keep_their_memory(patch: pytest.MonkeyPatch) -> None:
    async def put_to_sleep(member: EngineState, memory: Any) -> None:
        member.is_asleep = True

    patch.setattr(engine_boots, "put_to_sleep", put_to_sleep)


def _wait_for_boots(patch: pytest.MonkeyPatch) -> None:
    async def admit(self: RecoveryActions, groups: Any) -> None:
        await self.wait_for_boots(groups)
        await admitted(self, groups)

    admitted = RecoveryActions.admit
    patch.setattr(RecoveryActions, "admit", admit)


def _remove_a_busy_engine(patch: pytest.MonkeyPatch) -> None:
    async def drain(self: EngineScaling, member: Any) -> None:
        """It will be idle soon."""

    async def at_once(self: GateControl, timeout_s: float, engine_id: str = "") -> str:
        return ""

    patch.setattr(EngineScaling, "_drain", drain)
    patch.setattr(GateControl, "drain", at_once)


def _one_server_after_the_other(patch: pytest.MonkeyPatch) -> None:
    async def advance(self: Deployment, *commands: Command) -> Any:
        for server in self._servers.values():
            for command in commands:
                await server.advance(command)
        return {name: StepReport() for name in self._servers}

    patch.setattr(Deployment, "_advance", advance)


def _believe_the_canary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Probe, "verify_replies", lambda self, answers, members: answers)


def _believe_a_failed_comparison(patch: pytest.MonkeyPatch) -> None:
    compare = push_path_check._compare

    async def believe(member: EngineState, push: WeightPush) -> None:
        with suppress(EngineRejected):
            await compare(member, push)
        await member.engine.update_weight_version(str(push.version))
        member.weight_version = push.version

    patch.setattr(push_path_check, "_compare", believe)


def _ask_no_canary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Probe, "any_pending", lambda self, members: False)


def _ask_no_sentinel(patch: pytest.MonkeyPatch) -> None:
    async def check(self: Probe, member: EngineState, *, with_logprobs: bool) -> None:
        """It is surely new."""

    patch.setattr(Probe, "_check_caches", check)


def _guess(outcome: CallOutcome) -> Callable[[pytest.MonkeyPatch], None]:
    def seed(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(memory, "release_outcome", lambda *about: outcome)
        patch.setattr(memory, "resume_outcome", lambda *about: outcome)

    return seed


def _continue_over_engines_without_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gate_control, "why_none_serves", lambda *about: "")


def _refuse_a_version_for_good(patch: pytest.MonkeyPatch) -> None:
    def why_not_newer(version: int, manifest: Any, last: LastPush) -> str:
        return "" if version > last.version else f"{version} is not newer than {last.version}"

    patch.setattr(phase_runner, "why_not_newer", why_not_newer)


def _let_a_version_serve_again(patch: pytest.MonkeyPatch) -> None:
    def why_not_newer(version: int, manifest: Any, last: LastPush) -> str:
        return "" if version >= last.version else f"{version} is not newer than {last.version}"

    patch.setattr(phase_runner, "why_not_newer", why_not_newer)


def _let_no_push_into_an_onload(patch: pytest.MonkeyPatch) -> None:
    late = (Phase.VERIFIED, Phase.KV_ONLOADED)
    rows = [
        row
        for row in lifecycle.TABLE
        if not (row.command is Command.UPDATE_WEIGHTS and row.phase in late)
    ]
    patch.setattr(lifecycle, "TABLE", tuple(rows))


_ALL_DIE: dict[str, Any] = {
    "begin": ("offload", *PHASES[3:7]),
    "commands": ("continue_generation", "recover", "again", "recover"),
    "settings": {"injections": ("kill all",), "outcomes": ORDER_ONLY, "num_requests": 0},
    "recover": True,
}
_LOST = ("offload", "onload_weights", "lose shared-0", "verify", "onload_kv")


def _serve_what_is_not_expected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PhaseRunner, "why_expecting", "")


def _take_over_as_if_at_rest(patch: pytest.MonkeyPatch) -> None:
    async def replace_lost(
        self: GroupRegistry, name: str, factory: Any, unfinished: Any, version: int
    ) -> None:
        await replaced(self, name, factory, None, version)

    replaced = GroupRegistry.replace_lost
    patch.setattr(GroupRegistry, "replace_lost", replace_lost)


def _reuse_after_half_a_push(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_recovery, "spoils_weights", lambda command: False)


def _restore_nothing(patch: pytest.MonkeyPatch) -> None:
    async def restore(self: EngineRecovery, member: EngineState, version: int) -> None:
        member.weight_version = version
        member.mark_verified(None)

    patch.setattr(EngineRecovery, "restore", restore)


def _record_commands_afterwards(patch: pytest.MonkeyPatch) -> None:
    async def write(self: PhaseRunner, *, durable: bool = True) -> None:
        if not self.doing:
            await written(self, durable=durable)

    written = PhaseRunner.write_journal
    patch.setattr(PhaseRunner, "write_journal", write)


def _let_a_lost_group_end_a_takeover(patch: pytest.MonkeyPatch) -> None:
    async def start(self: GroupRegistry, name: str, *_: Any) -> Any:
        return await self.groups[name].start()

    patch.setattr(GroupRegistry, "_start", start)


def _lost(which: str) -> dict[str, Any]:
    injections = (f"crash {which}",)
    settings = {"injections": injections, "outcomes": ORDER_ONLY, "has_processes": True}
    return {"recover": True, "settings": settings, "groups": {"shared": {"num_engines": 2}}}


MUTATIONS = (
    Mutation(
        "take over a lost group as if it was at rest",
        _take_over_as_if_at_rest,
        "I1/I3: a call of ours ended",
        ("offload", "recover", "again", "recover"),
        **_lost("shared"),
    ),
    Mutation(
        "reuse an engine after half a push",
        _reuse_after_half_a_push,
        "I",
        ("update", "recover", "serve"),
        **_lost("shared"),
    ),
    Mutation(
        "believe that the weights have come back by themselves",
        _restore_nothing,
        "I2: .* has lost its weights",
        ("serve",),
        ("update", "offload"),
        deviations=0,
        has_source=True,
        groups={"shared": {}},
    ),
    Mutation(
        "record a command after it has ended",
        _record_commands_afterwards,
        "I",
        ("offload", "recover", "again", "recover"),
        **_lost("server"),
    ),
    Mutation(
        "let the loss of a group end a takeover",
        _let_a_lost_group_end_a_takeover,
        "the server is not continued",
        ("replace server", "recover", "offload"),
        **_lost("shared"),
    ),
    Mutation(
        "continue over engines without weights",
        _continue_over_engines_without_weights,
        "I8: the gate opens, and no engine is verified",
        **_ALL_DIE,
    ),
    Mutation(
        "refuse a version for good",
        _refuse_a_version_for_good,
        "I9: weight version 1 has not served",
        **_ALL_DIE,
    ),
    Mutation(
        "let a version serve again",
        _let_a_version_serve_again,
        "I9: weight version 1 has served",
        begin=("offload", "onload"),
        commands=("kill all", "recover", "offload", "onload same"),
        recover=True,
    ),
    Mutation(
        "let no push into an onload",
        _let_no_push_into_an_onload,
        "goes on",
        **_ALL_DIE,
    ),
    Mutation(
        "guess that a lost release was not done",
        _guess(CallOutcome.NOT_DONE),
        "release of a tag twice",
        ("release_memory_occupation",),
        ("pause_generation", "flush_cache"),
        reports_released=True,
    ),
    Mutation(
        "guess that a lost release was done",
        _guess(CallOutcome.DONE),
        "I7: offload is done, and shared-. holds|goes on",
        ("offload",),
        ("pause_generation", "flush_cache"),
        reports_released=True,
        settings={"outcomes": OUTCOMES},
    ),
    Mutation(
        "guess that a lost resume was not done",
        _guess(CallOutcome.NOT_DONE),
        "resume of a tag that is not released",
        ("onload_weights",),
        ("offload",),
        reports_released=True,
    ),
    Mutation(
        "believe whatever a canary tells",
        _believe_the_canary,
        "I2: the gate opens while shared-0 has lost its weights",
        ("continue_generation",),
        _LOST,
        verify=BY_CANARY,
        update="frozen",
    ),
    Mutation(
        "ask no sentinel",
        _ask_no_sentinel,
        "I2: the gate opens while shared-0 has old prefixes",
        ("continue_generation",),
        REMEMBERED,
        verify=SENTINEL,
    ),
    Mutation(
        "ask for no canary",
        _ask_no_canary,
        "I2: the gate opens while shared-0 has lost its weights",
        ("continue_generation",),
        _LOST,
        verify=BY_CANARY,
        update="frozen",
    ),
    Mutation(
        "serve an engine that was only started again",
        _serve_the_stale,
        "I6: .* stale",
        ("recover", "offload", "onload"),
        ("offload", "onload", "kill shared-0"),
        recover=True,
    ),
    Mutation(
        "forget an engine whose boot was ended for the trainer",
        _forget_a_boot_that_was_ended,
        "not brought back",
        *_BESIDE_A_BOOT,
        **_LATE_BOOT,
    ),
    Mutation(
        "let boots take the memory of the trainer",
        _let_boots_take_the_memory,
        "I7: .* holds",
        ("boot", "offload"),
        ("kill shared-0",),
        **_LATE_BOOT,
    ),
    Mutation(
        "let standbys keep the memory of the trainer",
        _let_standbys_keep_their_memory,
        "I7: .* standby-shared-0 holds",
        ("boot", "recover", "offload"),
        recover=True,
        groups=STANDBYS["groups"],
    ),
    Mutation(
        "hold the command lock while an engine boots",
        _wait_for_boots,
        "I4: recovery holds the command lock",
        *_BESIDE_A_BOOT,
        **_LATE_BOOT,
    ),
    Mutation(
        "remove an engine that is busy",
        _remove_a_busy_engine,
        "requests run",
        ("remove shared-0",),
        groups=_ATTACHED,
    ),
    Mutation(
        "one server after the other",
        _one_server_after_the_other,
        "barrier",
        ("all offload",),
        frozen={"judge": {"num_engines": 2}},
    ),
    Mutation(
        "believe a comparison that failed",
        _believe_a_failed_comparison,
        "I6: .* though it failed compare|goes on",
        ("prove",),
        deviations=0,
    ),
    Mutation("skip the barrier between groups", _skip_the_barrier, "barrier: flush_cache"),
    Mutation("continue in a finally", _continue_in_finally, "I[28]: the gate opens", ("update",)),
    Mutation(
        "retry a lost release",
        _retry_what_was_lost,
        "release of a tag twice",
        ("release_memory_occupation",),
        ("pause_generation", "flush_cache"),
    ),
    Mutation(
        "open the gate before verify",
        _open_before_verify,
        "I2: the gate opens",
        ("onload",),
        ("offload",),
    ),
    Mutation(
        "route in the place of a lost router by what it had first",
        _route_by_the_first_members,
        "I6: .* is in routing",
        ("remove shared-1", "offload"),
        settings={"injections": ("crash router",), "outcomes": ORDER_ONLY},
    ),
    Mutation(
        "deliver what the journal has not",
        _deliver_before_the_journal_has_it,
        "the driver's lives delivered",
        ("offload", "onload"),
        settings={
            "injections": ("crash driver",),
            "outcomes": ORDER_ONLY,
            "num_requests": 0,
            "num_prompts": 3,
        },
    ),
    Mutation("forget to fence", _forget_to_fence, "I|goes on"),
    Mutation("release under requests", _release_under_requests, "requests run|barrier"),
    Mutation(
        "resume twice", _resume_twice, "resume of a tag that is not", ("onload",), ("offload",)
    ),
    Mutation("cancel the siblings of a failure", _cancel_siblings, "I5: .* was cut"),
    Mutation(
        "open the gate with an older version",
        _open_with_an_older_version,
        "I2: the gate opens for version",
        ("update",),
    ),
    Mutation(
        "serve what is not expected",
        _serve_what_is_not_expected,
        "I2: the gate opens for version 0, and 1 is expected",
        ("serve",),
        expect_version=1,
    ),
    Mutation("route to the fenced", _route_to_the_fenced, "I6: .* is in routing", ("update",)),
    Mutation(
        "ignore the order of commands",
        _ignore_the_order,
        "I7: after an offload",
        ("onload", "offload"),
        ("offload",),
        settings={"has_actors": True, "outcomes": ORDER_ONLY, "num_requests": 0},
    ),
    Mutation(
        "believe the weights without asking",
        _believe_without_asking,
        "has not been verified",
        ("update",),
    ),
    Mutation(
        "trust a kill that failed",
        _trust_a_kill,
        "I7",
        deviations=2,
        settings={"kill_outcomes": 2, "injections": ()},
    ),
    Mutation(
        "leave the phase behind its engines",
        _stay_behind_the_engines,
        "I|barrier|goes on",
        lifecycle=_RAISE,
    ),
    Mutation(
        "leave when cancelled",
        _leave_when_cancelled,
        "I5: offload returned while",
        deviations=2,
    ),
    Mutation("let the late go unnamed", _let_the_late_go, "I4|I6"),
    Mutation("wait for ever", _wait_for_ever, "I4"),
)
