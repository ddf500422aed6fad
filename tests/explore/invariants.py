"""What must always hold in a world: the invariants I1-I7 of the lifecycle, and its barriers.

They are checked where things happen: at the fake engine that is about to die, at the gate that is
about to open, at the command that returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from rollout.router.gate import Gate, GateState
from rollout.routing import Member
from tests.explore.settings import BUDGET_S, LOCK_S, Settings
from tests.explore.steered import CONTROL, UPDATES, Parts, Pending, SteeredEngine, SteeredProcess

# From the deadline of a phase to its error: kill, log tail, look at the groups, router.
_SLACK_S = 80.0
# From the launch of an engine until it is one of the others.
_START_S = 600.0
# A push shares its budget out; a pause is tried twice.
# A canary has what is left of the continue before it.
_LEAST_S = dict.fromkeys(UPDATES, 5.0) | {"pause_generation": BUDGET_S / 2, "canary": 0.0}


class Invariants:
    """The part of a ``World`` that says what is wrong in it.

    Attributes:
        violation: the first that was found; empty for none.
        now: the world's time.
        told: errors and reports that the training loop got.
        struck: engine id -> the first command that failed on it.
        hanging: engine id -> the call of it that hangs.
    """

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self.parts = parts
        self.settings = settings
        self.violation = ""
        self.now = 0.0
        self.told: list[str] = []
        self.struck: dict[str, str] = {}
        self.hanging: dict[str, str] = {}
        self._pending: list[Pending] = []
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._num_commands = 0
        self._is_dark = False
        self._is_stopping = False
        self._is_cancelled = False

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
        if self.is_coming(asked):
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

    def is_coming(self, engine: SteeredEngine) -> bool:
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
        for member in gate.members.choosable.members:
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
        if asked.engine_id in server._gate.leaving or self.is_coming(asked):
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
        is_coming = self.is_coming(engine)
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
        limit = 5 * (BUDGET_S + _SLACK_S)
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
            for member in gate.members.choosable.members:
                engine = self.parts.launcher.connect(member.endpoint, member.engine_id)
                if engine.struck_in:
                    self.violate(f"I6: {engine.engine_id} failed {engine.struck_in}, and serves")

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


def _unfit(engine: SteeredEngine) -> str:
    if engine.released:
        return f"has {', '.join(sorted(engine.released))} released"
    if engine.weights.lost:
        return "has lost its weights"
    if engine.is_updating:
        return "is being updated"
    return "" if engine.is_proved else "has not been verified"
