"""What must always hold in a world: the invariants I1-I7 of the lifecycle, and its barriers.

They are checked where things happen: at the fake engine that is about to die, at the gate that is
about to open, at the command that returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cache
from typing import Any

from engines.fake import FakeTensor
from engines.fake.engine.fake_weights import DEFAULT_TENSORS, fingerprint_of
from rollout.control.engine.state import EngineState
from rollout.control.server.server import RolloutServer
from rollout.core.errors import RolloutError, WeightMismatch
from rollout.router.gate.gate import Gate, GateState
from rollout.rules.routing import Backend
from tests.explore.settings import BUDGET_S, LOCK_S, Settings
from tests.explore.steered import (
    CONTROL,
    UPDATES,
    Parts,
    Pending,
    SteeredEngine,
    SteeredProcess,
    slot_of,
)

PUSHED = DEFAULT_TENSORS[-1]
# From the deadline of a phase to its error: kill, log tail, look at the groups, router.
_SLACK_S = 80.0
# From the launch of an engine until it is one of the others.
_START_S = 600.0
# A push shares its budget out; a pause is tried twice.
# A canary has the rest of the budget of the continue before it.
_LEAST_S = dict.fromkeys(UPDATES, 5.0) | {"pause_generation": BUDGET_S / 2, "canary": 0.0}


class Invariants:
    """The part of a ``World`` that says what is wrong in it.

    Attributes:
        violation: the first that was found; empty for none.
        now: the world's time.
        reported: errors and reports that the training loop got.
        struck: engine id -> the first command that failed on it.
        hanging: engine id -> the call of it that hangs.
        taking_over: the groups that take the place of lost ones now.
    """

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self.parts = parts
        self.settings = settings
        self.violation = ""
        self.now = 0.0
        self.reported: list[str] = []
        self.struck: dict[str, str] = {}
        self.hanging: dict[str, str] = {}
        self.taking_over: set[str] = set()
        self._pending: list[Pending] = []
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._num_commands = 0
        self._is_dark = False
        self._is_stopping = False
        self._is_cancelled = False

    def violate(self, what: str) -> None:
        self.violation = self.violation or what

    def _left_to_serve(self) -> Iterable[SteeredProcess]:
        """Engines that were not fenced, ended, removed or lost, and not restarted just now."""
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
            if engine.weights.lost and member is not None and member.needs_logprob_check:
                continue  # its check needs an engine that generates, with the gate shut
            if why := _unfit(engine):
                self.violate(f"I2: {asked.engine_id} continues while {engine.engine_id} {why}")
        if len(versions) > 1:
            self.violate(f"I2: {asked.engine_id} continues among versions {sorted(versions)}")

    def is_coming(self, engine: SteeredEngine) -> bool:
        """It is led to where the others are, or given its weights, and gets no requests."""
        member = self.parts.member(engine.engine_id)
        return member is None or member.engine is not engine or member.is_stale

    def _server_of(self, engine_id: str) -> str:
        group = slot_of(engine_id).rpartition("-")[0]
        return next(
            name for name, one in self.parts.servers.items() if group in one._registry.groups
        )

    def check_may_route(self, members: list[Backend]) -> None:
        """I6: only engines that are in a group and verified get requests."""
        if self._is_stopping:
            return  # no engine is in a group any more
        for one in members:
            if not one.is_choosable:
                continue  # a list that was made while it left may still name it
            member = self.parts.member(one.engine_id)
            if member is None:
                self.violate(f"I6: {one.engine_id} is in routing, and lent")
            elif member.is_stale:
                self.violate(f"I6: {one.engine_id} is in routing, and stale")

    def check_may_open(self, gate: Gate, version: int | None) -> None:
        """I2, I6 and I8: there are engines that get requests from now on, and all may serve."""
        name = next(name for name, one in self.parts.routers.items() if one.gate is gate)
        server = self.parts.servers[name]
        self._check_one_serves(server, "the gate opens")
        if server is self.parts.server and version is not None:
            self.parts.opened |= {version}
        if (version or 0) < (expected := server._phase_runner.expected_version):
            self.violate(f"I2: the gate opens for version {version}, and {expected} is expected")
        for member in gate.members.choosable.members:
            engine = self.parts.launcher.engine_at(member.endpoint)
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
            if engine.caches.has_old_prefixes(engine.weights):
                self.violate(f"I2: the gate opens while {engine.engine_id} has old prefixes")
            if version and engine.weights.digests[PUSHED.name] != _digest(version):
                self.violate(f"I2: {engine.engine_id} does not hold what was pushed as {version}")
            if version is not None and engine._version != str(version):
                self.violate(
                    f"I2: the gate opens for version {version}; {engine.engine_id} holds "
                    f"{engine._version}"
                )

    def _check_one_serves(self, server: RolloutServer, when: str) -> None:
        """I8: no command opens the gate over engines of which none was verified."""
        if not self._is_stopping and not list(self._verified(server)):
            self.violate(f"I8: {when}, and no engine is verified")

    def _verified(self, server: RolloutServer) -> Iterable[EngineState]:
        """Its engines that are not known to be dead, and hold the published weights."""
        for name in server._registry.groups:
            for member in self.parts.groups[name]._engines.members():
                if not (member.fence_reason or member.is_stale):
                    yield member

    def check_refused(self, error: RolloutError) -> None:
        """I9: a version may be pushed again as long as it has not served."""
        last = self.parts.server._phase_runner._last_push
        is_refused = isinstance(error, WeightMismatch) and "not newer" in str(error)
        if is_refused and last.version and not last.has_served:
            self.violate(f"I9: weight version {last.version} has not served: {error}")

    def check_pushed(self, version: int, opened: frozenset[int]) -> None:
        """I9: and no longer; these pushes do not show that their contents are the same.

        Args:
            opened: the versions at which the gate was open before.
        """
        if version in opened:
            self.violate(f"I9: weight version {version} has served, and was pushed again")

    def check_barrier(self, asked: SteeredEngine, operation: str) -> None:
        """No engine is further than one phase ahead of another."""
        server = self.parts.servers[self._server_of(asked.engine_id)]
        if asked.engine_id in server._gate.leaving or self.is_coming(asked):
            return  # it comes or leaves by itself, while the others serve
        is_release = operation == "release_memory_occupation"
        for process in self._left_to_serve():
            engine = process.engine
            # New weights for one server leave the others serving.
            is_other = self._server_of(engine.engine_id) != self._server_of(asked.engine_id)
            if is_other and not is_release:
                continue
            if engine.struck_in or (engine.is_flushed if is_release else engine.paused):
                continue
            what = "flushed" if is_release else "paused"
            self.violate(
                f"barrier: {operation} of {asked.engine_id}; {engine.engine_id} not {what}"
            )

    def check_given_up(self, engine: SteeredEngine, operation: str, since: float) -> None:
        """I5: no call is cancelled because of another engine.  I4: no wait exceeds its budget."""
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
        if (
            command in ("onload", "update", "serve", "continue_generation")
            and not self._is_stopping
        ):
            router, server = self.parts.router, self.parts.server
            self._check_one_serves(server, f"{command} is done")
            # One that was lost since begins with what its server has; see ``SteeredRouter.begin``.
            wanted = server._router._gate[0] if router.is_away else router.gate.wanted
            if wanted != GateState.OPEN:
                self.violate(f"{command} is done and the gate is {wanted}")
        if command == "all onload" and not self._is_stopping:
            for name, router in self.parts.routers.items():
                if router.gate.wanted is not GateState.OPEN:
                    self.violate(
                        f"{command} is done and the gate of {name} is {router.gate.wanted}"
                    )

    def _check_released(self, when: str) -> None:
        """I7: from here until the next command the memory is the trainer's."""
        for engine_id, process in self.parts.launcher.processes.items():
            is_ours = slot_of(engine_id) in self.parts.offloading
            if not is_ours or self.parts.member(engine_id) is None:
                continue  # removed: it was measured when it left
            if held := process.engine.resident_bytes:
                self.violate(f"I7: {when} {engine_id} holds {held} bytes")

    def _check_boots(self) -> None:
        """I4: no command waits until recovery has booted an engine."""
        others = any(one.operation != "launch" for one in self._pending)
        if not self._pending or others or self.hanging:
            return  # recovery may wait for another call
        for server in self.parts.servers.values():
            if server._lock.owner == "recover":
                self.violate("I4: recovery holds the command lock while an engine boots")

    def _check_returned(self, command: str, started: float) -> None:
        """What holds after a command, however it ended."""
        # A group that was too late for its server goes on by itself: the server has reported it.
        has_given_up = self.settings.has_actors and (
            self._is_cancelled or any("took longer than" in text for text in self.reported)
        )
        under_way = {one.owner: one.operation for one in self._pending} | self.hanging
        for owner, operation in under_way.items():
            is_boot = self.parts.is_booting(owner)
            if operation in CONTROL and not (self._running or has_given_up or is_boot):
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
                slot, member = slot_of(engine_id), self.parts.member(engine_id)
                if member is not None and member.process is not self.parts.launcher.processes.get(
                    engine_id
                ):
                    continue  # it was ended while it booted
                if not any(slot in text for text in self.reported + self._shown_fenced()):
                    self.violate(f"I4: {engine_id} failed {operation}; nobody was told")
        if gate.state is GateState.OPEN:
            for member in gate.members.choosable.members:
                engine = self.parts.launcher.engine_at(member.endpoint)
                if engine.struck_in:
                    self.violate(f"I6: {engine.engine_id} failed {engine.struck_in}, and serves")

    def _shown_fenced(self) -> list[str]:
        """Why engines that failed before are fenced, by the status of groups and recovery."""
        shown = [
            member.fence_reason
            for group in self.parts.groups.values()
            for member in group._engines.members()
        ]
        for group in self.parts.groups.values():
            shown += [
                f"{name}: {why}" for name, why in group._boots._standby_failures.why_none.items()
            ]
        for server in self.parts.servers.values():
            for engines in server._recovery.tracker.snapshot().values():
                shown += [one.reason for one in engines.values()]
        return shown


@cache
def _digest(version: int) -> str:
    return fingerprint_of(FakeTensor(PUSHED.shape, version))


def _unfit(engine: SteeredEngine) -> str:
    if engine.released:
        return f"has {', '.join(sorted(engine.released))} released"
    if engine.weights.lost:
        return "has lost its weights"
    if engine.is_updating:
        return "is being updated"
    return "" if engine.is_verified else "has not been verified"
