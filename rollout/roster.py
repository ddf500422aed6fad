"""The engines of one group: started, admitted, fenced, ended.

Always true: an engine is in the roster only after it has shown that it is what the configuration
needs; a fenced engine has been killed, or its kill has been tried and its failure told; after
``stop`` nothing that was launched here runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollout.config import EngineKind
from rollout.ending import KILL_TIMEOUT_S, confirm_ended_by_others, confirm_gone, log_tail
from rollout.errors import EngineFailure, LifecycleError, PhaseFailed
from rollout.fanout import Answer, describe, fan_out, settle
from rollout.group_settings import GroupSettings
from rollout.member import Member
from rollout.starting import Lead, Starter
from rollout.timeline.recorder import happened
from rollout.types import EngineSlot

logger = logging.getLogger(__name__)


class Roster:
    """All engines of a group, by engine id, in the order of their slots."""

    def __init__(
        self, settings: GroupSettings, slots: Sequence[EngineSlot], starter: Starter
    ) -> None:
        self._settings = settings
        self._slots = tuple(slots)
        self._starter = starter
        self._members: dict[str, Member] = {}
        self._lent: dict[str, EngineSlot] = {}
        self._sleeping: dict[str, Member] = {}
        self._launching: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._members

    def __getitem__(self, engine_id: str) -> Member:
        return self._members[engine_id]

    def get(self, engine_id: str) -> Member | None:
        """The engine; None if it is not among them."""
        return self._members.get(engine_id)

    def members(self) -> list[Member]:
        return list(self._members.values())

    def unfenced(self) -> list[Member]:
        return [member for member in self._members.values() if not member.fenced_because]

    async def start(self) -> None:
        """Launch all engines and check that they are what the configuration needs.

        Raises:
            PhaseFailed: an engine did not start; the ones that did are stopped again.
        """
        self._is_stopped = False
        budget_s = self._settings.group.engine.start_timeout_s + 30.0
        try:
            answers = await fan_out(
                {slot.engine_id: self._start(slot) for slot in self._slots},
                operation="start",
                budget_s=budget_s,
            )
            if self._is_stopped:
                raise PhaseFailed(
                    f"group {self._settings.name}: stopped while it started", phase="start"
                )
            failures = [one.failure for one in answers.values() if one.failure is not None]
            if failures:
                raise PhaseFailed(
                    told("start", self._settings.name, failures), phase="start", failures=failures
                )
        except BaseException:
            await self.stop()
            raise
        self._in_order()

    def fill(self, members: Sequence[Member]) -> None:
        """Begin with these, which run already; places without one are lent."""
        self._members = {member.engine_id: member for member in members}
        self._lent = {
            slot.engine_id: slot for slot in self._slots if slot.engine_id not in self._members
        }

    async def replace(self, engine_id: str, lead: Lead) -> Member:
        """Start a fenced engine again in its place; the new one is stale.

        Args:
            lead: leads the new engine to where the others are, before it is one of them.

        Raises:
            EngineFailure: the old one cannot be shown to be gone, or the new one did not start;
                the place stays fenced.
        """
        old = self._members[engine_id]
        if self._is_stopped or not old.fenced_because:
            raise LifecycleError(f"engine {engine_id} is not fenced, or its group was stopped")
        budget_s = self._settings.group.engine.start_timeout_s + KILL_TIMEOUT_S
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(budget_s):
                if self._settings.group.engine.kind is EngineKind.ATTACHED:
                    await confirm_ended_by_others(old)
                await confirm_gone(old)
                await self._start(old.slot, lead)()
        except Exception as error:
            raise EngineFailure(
                f"engine {engine_id}: restart failed: {describe(error)}",
                engine_id=engine_id,
                operation="restart",
                elapsed_s=asyncio.get_running_loop().time() - started,
            ) from error
        return self._members[engine_id]

    # -- places that are lent ---------------------------------------------------------------

    def lent(self) -> tuple[str, ...]:
        """Places whose engines have left."""
        return tuple(self._lent)

    def sleeping(self, engine_id: str) -> Member | None:
        """The engine that sleeps in a lent place; None if nothing runs there."""
        return self._sleeping.get(engine_id)

    def lend(self, engine_id: str, *, keeps_process: bool) -> None:
        """Take an engine out that holds nothing any more; its place is free."""
        member = self._members.pop(engine_id)
        self._lent[engine_id] = member.slot
        if keeps_process:
            self._sleeping[engine_id] = member

    async def start_lent(self, engine_id: str, lead: Lead) -> None:
        """Start an engine in a place where nothing runs; it is stale."""
        if self._is_stopped:
            raise LifecycleError(f"engine {engine_id}: its group was stopped")
        await self._start(self._lent[engine_id], lead)()
        del self._lent[engine_id]
        self._in_order()

    def take_back(self, member: Member) -> None:
        """One that slept is one of the engines again."""
        del self._sleeping[member.engine_id], self._lent[member.engine_id]
        self._members[member.engine_id] = member
        self._in_order()

    async def end_sleeping(self, engine_id: str) -> None:
        """End an engine that cannot be woken; its place stays free."""
        member = self._sleeping.pop(engine_id)
        try:
            await member.process.kill()
        finally:
            await member.engine.aclose()

    def _in_order(self) -> None:
        slots = (slot.engine_id for slot in self._slots)
        self._members = {one: self._members[one] for one in slots if one in self._members}

    def _start(self, slot: EngineSlot, lead: Lead | None = None) -> Callable[[], Awaitable[None]]:
        async def start() -> None:
            # A task of its own, so that a stop need not wait until the start is over.
            task = asyncio.create_task(launch(), name=f"launch:{slot.engine_id}")
            self._launching.add(task)
            task.add_done_callback(self._launching.discard)
            await task

        async def launch() -> None:
            self._members[slot.engine_id] = await self._starter.start(slot, lead)

        return start

    async def stop(self) -> None:
        """End all engines: a bounded polite try, then the kill."""
        grace_s = self._settings.lifecycle.stop_timeout_s
        self._is_stopped = True
        launching = list(self._launching)
        for task in launching:
            task.cancel()
        await settle(launching)
        members = [*self._members.values(), *self._sleeping.values()]
        self._members, self._lent, self._sleeping = {}, {}, {}

        async def end(member: Member) -> None:
            try:
                if await member.process.stop(grace_s):
                    logger.warning("engine %s had to be killed", member.engine_id)
            finally:
                await member.engine.aclose()

        answers = await fan_out(
            {member.engine_id: calling(end, member) for member in members},
            operation="stop",
            budget_s=grace_s + 30.0,
        )
        _log_failures(answers)

    async def fence(self, failures: Sequence[EngineFailure]) -> None:
        """Keep these engines out of everything and end their processes."""
        for failure in failures:
            self._members[failure.engine_id].fenced_because = str(failure)
            happened("fenced", str(failure), engine_id=failure.engine_id)

        async def end(member: Member) -> None:
            logger.error("fenced: %s\n%s", member.fenced_because, await log_tail(member.process))
            try:
                await member.process.kill()
                member.is_gone = True
            finally:
                await member.engine.aclose()

        answers = await fan_out(
            {one.engine_id: calling(end, self._members[one.engine_id]) for one in failures},
            operation="kill",
            budget_s=KILL_TIMEOUT_S,
        )
        _log_failures(answers)  # the fence stands all the same

    async def confirm_gone(self) -> None:
        """Make sure that no fenced engine still holds memory; end those whose kill failed.

        Raises:
            PhaseFailed: naming the engines that may still hold theirs.
        """
        answers = await fan_out(
            {
                member.engine_id: calling(confirm_gone, member)
                for member in self._members.values()
                if member.fenced_because and not member.is_gone
            },
            operation="kill",
            budget_s=KILL_TIMEOUT_S,
        )
        failures = [one.failure for one in answers.values() if one.failure is not None]
        if failures:
            raise PhaseFailed(
                f"{told('kill', self._settings.name, failures)}; its memory may not be free",
                phase="release",
                failures=failures,
            )


def calling(
    act: Callable[[Member], Awaitable[Any]], member: Member
) -> Callable[[], Awaitable[Any]]:
    """``act(member)``, to be started later."""
    return lambda: act(member)


def told(command: str, group: str, failures: Sequence[EngineFailure]) -> str:
    """Failures of one command in one line."""
    told = "; ".join(str(failure) for failure in failures) or "too few engines"
    return f"group {group}: {command} failed: {told}"


def _log_failures(answers: Mapping[str, Answer[Any]]) -> None:
    for answer in answers.values():
        if answer.failure is not None:
            logger.error("%s", answer.failure)
