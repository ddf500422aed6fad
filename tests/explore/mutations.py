"""Bugs to be seeded into the real code, and where each is to be looked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engines.errors import EngineUnreachable
from engines.protocol import MemoryTag
from rollout import fanout, gatekeeper, group_commands, lifecycle, memory
from rollout.deployment import Deployment
from rollout.gatekeeper import Gatekeeper
from rollout.group_commands import GroupCommands
from rollout.hearing import Hearing
from rollout.lending import Lending
from rollout.lifecycle import Command, Phase
from rollout.repair import Repair
from rollout.roster import Roster
from rollout.routing import MemberState
from rollout.server import RolloutServer
from rollout.server_group import ServerGroup
from rollout.settling import Fate
from rollout.steps import Steps
from rollout.types import StepReport
from tests.explore.plans import BY_CANARY
from tests.explore.search import Explorer, State
from tests.explore.settings import FEW_OUTCOMES, ORDER_ONLY, OUTCOMES, Settings
from tests.explore.snapshots import after, serving

_RAISE = {"on_failure": "raise"}


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
    deviations: int = 1
    settings: dict[str, Any] | None = None
    recover: bool = False
    frozen: dict[str, dict[str, Any]] | None = None
    update: str = "full"
    tells_released: bool = False

    def explore(self, patch: pytest.MonkeyPatch) -> Explorer:
        """Seed it and look for it."""
        start = serving(
            lifecycle=self.lifecycle,
            recover=self.recover,
            frozen=self.frozen,
            update=self.update,
            tells_released=self.tells_released,
        )
        state = State(after(start, *self.begin) if self.begin else start)
        self.seed(patch)
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
    async def advance(self: Steps, *commands: Command) -> Any:
        if commands[0] is not Command.PAUSE:
            return await advanced(self, *commands)
        await self._gate.shut("holding", "paused", "pause")
        self._order += 3

        async def all_at_once(name: str) -> None:
            group = self._view.groups[name]
            await group.pause(self._order - 2)
            await group.flush(self._order - 1)
            if self._view.traits[name].needs_offload:
                self._view.phases[name] = Phase((await group.release(self._order)).phase)
            else:
                self._view.phases[name] = Phase.FLUSHED

        await asyncio.gather(*(all_at_once(name) for name in self._view.groups))
        return await advanced(self)

    advanced = Steps.advance
    patch.setattr(Steps, "advance", advance)


def _continue_in_finally(patch: pytest.MonkeyPatch) -> None:
    async def update(self: RolloutServer, push: Any) -> Any:
        try:
            return await updated(self, push)
        finally:
            await self._router.set_gate("open", weight_version=self.weight_version)

    updated = RolloutServer.update_and_continue
    patch.setattr(RolloutServer, "update_and_continue", update)


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

    patch.setattr(group_commands, "fan_out", fan_out)


def _open_before_verify(patch: pytest.MonkeyPatch) -> None:
    async def verify(self: Steps, names: Any) -> Any:
        await self.open_gate()
        return await verified(self, names)

    verified = Steps.verify
    patch.setattr(Steps, "verify", verify)


def _forget_to_fence(patch: pytest.MonkeyPatch) -> None:
    async def fence(self: Roster, failures: Any) -> None:
        """It will be well again."""

    patch.setattr(Roster, "fence", fence)


def _release_under_requests(patch: pytest.MonkeyPatch) -> None:
    async def carry_out(self: GroupCommands, command: Command, *how: Any, **more: Any) -> Any:
        if command in (Command.PAUSE, Command.FLUSH):
            self.phase = lifecycle.next_phase(self.phase, command, self._traits)
            return self._report(command, {}, 0.0)
        return await carried_out(self, command, *how, **more)

    carried_out = GroupCommands._carry_out
    patch.setattr(GroupCommands, "_carry_out", carry_out)


def _resume_twice(patch: pytest.MonkeyPatch) -> None:
    async def resume_kv(self: ServerGroup, order: int | None = None) -> Any:
        async def resume(member: Any) -> None:
            if member.released:
                await member.engine.resume_memory_occupation(tuple(MemoryTag))
                member.released.clear()

        return await self._commands.command(Command.RESUME_KV, resume, 60.0, order)

    patch.setattr(ServerGroup, "resume_kv", resume_kv)


def _cancel_siblings(patch: pytest.MonkeyPatch) -> None:
    async def settle(tasks: Any) -> None:
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

    patch.setattr(fanout, "settle", settle)


def _is_well(task: asyncio.Task[Any]) -> bool:
    return getattr(task.result(), "failure", None) is None if not task.cancelled() else False


def _open_with_an_older_version(patch: pytest.MonkeyPatch) -> None:
    async def open_gate(self: Gatekeeper, weight_version: int) -> None:
        await opened(self, weight_version - 1)

    opened = Gatekeeper.open
    patch.setattr(Gatekeeper, "open", open_gate)


def _route_to_the_fenced(patch: pytest.MonkeyPatch) -> None:
    def member(*known: Any) -> Any:
        return replace(made(*known), state=MemberState.SERVING)

    made = gatekeeper.member
    patch.setattr(gatekeeper, "member", member)


def _ignore_the_order(patch: pytest.MonkeyPatch) -> None:
    def check_order(self: GroupCommands, order: int | None) -> None:
        """Whatever comes is done."""

    patch.setattr(GroupCommands, "_check_order", check_order)


def _believe_without_asking(patch: pytest.MonkeyPatch) -> None:
    async def verify(self: ServerGroup, version: int, order: int | None = None) -> Any:
        async def trust(member: Any) -> None:
            member.prove(None)

        return await self._commands.command(Command.VERIFY, trust, 60.0, order)

    patch.setattr(ServerGroup, "verify", verify)


def _trust_a_kill(patch: pytest.MonkeyPatch) -> None:
    async def confirm_gone(self: Roster) -> None:
        """A kill that was tried has surely worked."""

    patch.setattr(Roster, "confirm_gone", confirm_gone)


def _stay_behind_the_engines(patch: pytest.MonkeyPatch) -> None:
    async def conclude(self: GroupCommands, *what: Any) -> Any:
        before = self.phase
        try:
            return await concluded(self, *what)
        except BaseException:
            self.phase = before
            raise

    concluded = GroupCommands.conclude
    patch.setattr(GroupCommands, "conclude", conclude)


def _leave_when_cancelled(patch: pytest.MonkeyPatch) -> None:
    async def settle(tasks: Any) -> None:
        waiting = set(tasks)
        if waiting:
            await asyncio.wait(waiting)

    patch.setattr(fanout, "settle", settle)


def _let_the_late_go(patch: pytest.MonkeyPatch) -> None:
    async def conclude(
        self: GroupCommands, command: Any, target: Any, answers: Any, started: float
    ) -> Any:
        kept = {
            one: answer
            for one, answer in answers.items()
            if answer.failure is None or "took longer" not in str(answer.failure)
        }
        return await concluded(self, command, target, kept, started)

    concluded = GroupCommands.conclude
    patch.setattr(GroupCommands, "conclude", conclude)


def _wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    async def fan_out(asks: Any, *, operation: str, budget_s: float) -> Any:
        return await fanout.fan_out(asks, operation=operation, budget_s=1e9)

    patch.setattr(group_commands, "fan_out", fan_out)


def _serve_the_stale(patch: pytest.MonkeyPatch) -> None:
    def member(worker_type: Any, engine: Any, out: Any) -> Any:
        return made(worker_type, replace(engine, is_stale=False), out)

    made = gatekeeper.member
    patch.setattr(gatekeeper, "member", member)


def _forget_who_was_on_the_way(patch: pytest.MonkeyPatch) -> None:
    def has_died(self: Repair, group: str, engine_id: str, what: str, error: Any) -> None:
        if isinstance(error, Exception):
            told(self, group, engine_id, what, error)

    told = Repair._has_died
    patch.setattr(Repair, "_has_died", has_died)


def _lend_a_busy_engine(patch: pytest.MonkeyPatch) -> None:
    async def drain(self: Lending, member: Any) -> None:
        """It will be idle soon."""

    async def at_once(self: Gatekeeper, timeout_s: float, engine_id: str = "") -> str:
        return ""

    patch.setattr(Lending, "_drain", drain)
    patch.setattr(Gatekeeper, "drain", at_once)


def _one_server_after_the_other(patch: pytest.MonkeyPatch) -> None:
    async def advance(self: Deployment, *commands: Command) -> Any:
        for server in self._servers.values():
            for command in commands:
                await server.advance(command)
        return {name: StepReport() for name in self._servers}

    patch.setattr(Deployment, "_advance", advance)


def _believe_the_canary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hearing, "review", lambda self, answers, members: answers)


def _ask_no_canary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Hearing, "is_due", lambda self, members: False)


def _guess(fate: Fate) -> Callable[[pytest.MonkeyPatch], None]:
    def seed(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(memory, "fate_of_release", lambda *about: fate)
        patch.setattr(memory, "fate_of_resume", lambda *about: fate)

    return seed


_LOST = ("offload", "resume_weights", "lose shared-0", "verify", "resume_kv")

MUTATIONS = (
    Mutation(
        "guess that a lost release was not done",
        _guess(Fate.NOT_DONE),
        "release of a tag twice",
        ("release",),
        ("pause", "flush"),
        tells_released=True,
    ),
    Mutation(
        "guess that a lost release was done",
        _guess(Fate.DONE),
        "I7: offload is done, and shared-. holds|goes on",
        ("offload",),
        ("pause", "flush"),
        tells_released=True,
        settings={"outcomes": OUTCOMES},
    ),
    Mutation(
        "guess that a lost resume was not done",
        _guess(Fate.NOT_DONE),
        "resume of a tag that is not released",
        ("resume_weights",),
        ("offload",),
        tells_released=True,
    ),
    Mutation(
        "believe whatever a canary tells",
        _believe_the_canary,
        "I2: the gate opens while shared-0 has lost its weights",
        ("continue",),
        _LOST,
        lifecycle=BY_CANARY,
        update="frozen",
    ),
    Mutation(
        "ask for no canary",
        _ask_no_canary,
        "I2: the gate opens while shared-0 has lost its weights",
        ("continue",),
        _LOST,
        lifecycle=BY_CANARY,
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
        "forget who was on the way back when a command is cancelled",
        _forget_who_was_on_the_way,
        "not brought back",
        ("recover",),
        ("kill shared-0",),
        recover=True,
        settings={"injections": ("cancel",)},
    ),
    Mutation(
        "lend an engine that is busy",
        _lend_a_busy_engine,
        "requests run",
        ("lend shared-0",),
    ),
    Mutation(
        "one server after the other",
        _one_server_after_the_other,
        "barrier",
        ("all offload",),
        frozen={"judge": {"num_engines": 2}},
    ),
    Mutation("skip the barrier between groups", _skip_the_barrier, "barrier: flush_cache"),
    Mutation("continue in a finally", _continue_in_finally, "I2: the gate opens", ("update",)),
    Mutation(
        "retry a lost release",
        _retry_what_was_lost,
        "release of a tag twice",
        ("release",),
        ("pause", "flush"),
    ),
    Mutation(
        "open the gate before verify",
        _open_before_verify,
        "I2: the gate opens",
        ("onload",),
        ("offload",),
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
