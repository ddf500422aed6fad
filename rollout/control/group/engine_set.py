"""The engines of one group: start, fence, replace, stop.

Always true: an engine joins the set only after its features were checked against the
configuration.  A fenced engine was killed, or the failed kill was reported.  After ``stop`` no
engine that was launched here runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from engines.process.background import start_task
from engines.protocol.plain_text import describe
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.start import Starter, start_deadline_s
from rollout.control.engine.state import EngineState
from rollout.control.engine.stop import confirm_gone, discard, log_tail
from rollout.core.errors import EngineFailure, PhaseFailed, RolloutError
from rollout.core.fanout import EngineReply, fan_out, wait_all
from rollout.core.types import EngineSlot
from rollout.observability.timeline.recorder import record_event
from rollout.rules.deadlines import STOP_TIMEOUT_S, kill_timeout_s

logger = logging.getLogger(__name__)

_MARGIN_S = 5.0

CatchUp = Callable[[EngineState], Awaitable[None]]
"""Brings a new engine to the phase of the others, before it joins them."""


class EngineSet:
    """All engines of a group, by engine id, in the order of their slots.

    Attributes:
        slots: all of them, also those that are vacant.
        vacant: slots whose engines were removed, by engine id.
        replaced: the last engine with verified weights in whose place another one came.
        kill_timeout_s: deadline for one engine to end and its memory to be free.
    """

    def __init__(
        self, settings: GroupSettings, slots: Sequence[EngineSlot], starter: Starter
    ) -> None:
        self._settings = settings
        self.kill_timeout_s = kill_timeout_s(settings.group.engine)
        self.slots = tuple(slots)
        self._starter = starter
        self._members: dict[str, EngineState] = {}
        self.vacant: dict[str, EngineSlot] = {}
        self.replaced: EngineState | None = None
        self._launching: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    @property
    def start_budget_s(self) -> float:
        """Seconds for one start, and for the end of an engine that did not."""
        model_path, engine = self._settings.model_path, self._settings.group.engine
        return start_deadline_s(model_path, engine) + self.kill_timeout_s

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, engine_id: str) -> EngineState:
        return self._members[engine_id]

    def get(self, engine_id: str) -> EngineState | None:
        return self._members.get(engine_id)

    def slot(self, engine_id: str) -> EngineSlot:
        return next(slot for slot in self.slots if slot.engine_id == engine_id)

    def members(self) -> list[EngineState]:
        return list(self._members.values())

    def unfenced(self) -> list[EngineState]:
        return [member for member in self._members.values() if not member.fence_reason]

    async def start(self) -> None:
        """See ``ServerGroup.start``."""
        self._is_stopped = False
        budget_s = self.start_budget_s + _MARGIN_S
        try:
            answers = await fan_out(
                {slot.engine_id: self._start_with_others(slot) for slot in self.slots},
                operation="start",
                budget_s=budget_s,
            )
            if self._is_stopped:
                raise PhaseFailed(
                    f"group {self._settings.name}: stopped while it started", phase="start"
                )
            failures = [
                reply.failure
                for reply in answers.values()
                if reply.failure and not isinstance(reply.failure.__cause__, _EndedWithOthers)
            ]
            if failures:
                raise PhaseFailed(
                    format_failures("start", self._settings.name, failures),
                    phase="start",
                    failures=failures,
                )
        except BaseException:
            await self.stop()
            raise
        self._in_order()

    def fill(self, members: Sequence[EngineState]) -> None:
        """Begin with engines that already run; slots without an engine are vacant."""
        self._members = {member.engine_id: member for member in members}
        self.vacant = {
            slot.engine_id: slot for slot in self.slots if slot.engine_id not in self._members
        }

    async def join(self, member: EngineState, catch_up: CatchUp, operation: str) -> None:
        """Make an engine one of the others, on the slot that it booted for; it is stale.

        Raises:
            EngineFailure: it cannot catch up with them, and is ended.
        """
        started = asyncio.get_running_loop().time()
        try:
            await self._in_task(self._join(member, catch_up), member.engine_id)
        except Exception as error:
            raise as_failure(error, member.engine_id, operation, started) from error

    async def _join(self, member: EngineState, catch_up: CatchUp) -> None:
        member.is_stale, member.is_verified = True, False
        try:
            await catch_up(member)
        except BaseException:
            await discard(member)
            raise
        self._note_replaced(self._members.get(member.engine_id))
        self._members[member.engine_id] = member
        self.vacant.pop(member.engine_id, None)
        self._in_order()

    def vacate(self, engine_id: str) -> EngineState:
        """Remove a drained engine whose memory is free; its slot is vacant then."""
        member = self._members.pop(engine_id)
        self.vacant[engine_id] = member.slot
        self._note_replaced(member)
        return member

    def _note_replaced(self, old: EngineState | None) -> None:
        version = None if old is None else old.weight_version
        if old is not None and version is not None and old.is_verified_at(version):
            self.replaced = old

    def _in_order(self) -> None:
        slots = (slot.engine_id for slot in self.slots)
        self._members = {name: self._members[name] for name in slots if name in self._members}

    async def _in_task(self, work: Coroutine[Any, Any, None], engine_id: str) -> None:
        """In a separate task, so that a stop can cancel the start."""
        task = start_task(work, f"launch:{engine_id}")
        self._launching.add(task)
        task.add_done_callback(self._launching.discard)
        await task

    def _start_with_others(self, slot: EngineSlot) -> Callable[[], Awaitable[None]]:
        """Start one; the first failure ends the starts of the others, which may take minutes."""

        async def launch() -> None:
            self._members[slot.engine_id] = await self._starter.start(slot)

        async def start() -> None:
            this_task = asyncio.current_task()
            try:
                await self._in_task(launch(), slot.engine_id)
            except asyncio.CancelledError:
                if this_task is None or this_task.cancelling():
                    raise
                raise _EndedWithOthers("another engine of its group did not start") from None
            except Exception:
                for launching in self._launching:
                    launching.cancel()
                raise

        return start

    async def stop(self) -> None:
        """Stop all engines within ``STOP_TIMEOUT_S``, then kill the rest."""
        self._is_stopped = True
        launching = list(self._launching)
        for task in launching:
            task.cancel()
        await wait_all(launching)
        members = [*self._members.values()]
        self._members, self.vacant, self.replaced = {}, {}, None

        async def end(member: EngineState) -> None:
            try:
                if await member.process.stop(STOP_TIMEOUT_S):
                    logger.warning("engine %s had to be killed", member.engine_id)
            finally:
                await member.engine.aclose()

        answers = await fan_out(
            {member.engine_id: partial(end, member) for member in members},
            operation="stop",
            budget_s=STOP_TIMEOUT_S + self.kill_timeout_s + _MARGIN_S,
        )
        _log_failures(answers)

    async def fence(self, failures: Sequence[EngineFailure]) -> None:
        """Fence these engines and end their processes."""
        for failure in failures:
            self._members[failure.engine_id].fence_reason = str(failure)
            record_event("fenced", str(failure), engine_id=failure.engine_id)
        await self.end([self._members[failure.engine_id] for failure in failures])

    async def end(self, members: Sequence[EngineState]) -> None:
        """End the processes of fenced engines."""

        async def end(member: EngineState) -> None:
            logger.error("fenced: %s\n%s", member.fence_reason, await log_tail(member.process))
            try:
                await member.process.kill()
                member.is_gone = True
            finally:
                await member.engine.aclose()

        answers = await fan_out(
            {member.engine_id: partial(end, member) for member in members},
            operation="kill",
            budget_s=self.kill_timeout_s,
        )
        _log_failures(answers)  # the engine stays fenced

    async def confirm_gone(self) -> None:
        """Check that no fenced engine holds memory; kill again where the kill failed.

        Raises:
            PhaseFailed: names the engines that may still hold memory.
        """
        answers = await fan_out(
            {
                member.engine_id: partial(confirm_gone, member, self.kill_timeout_s)
                for member in self._members.values()
                if member.fence_reason and not member.is_gone
            },
            operation="kill",
            budget_s=self.kill_timeout_s,
        )
        failures = [reply.failure for reply in answers.values() if reply.failure is not None]
        if failures:
            failed = format_failures("kill", self._settings.name, failures)
            raise PhaseFailed(
                f"{failed}; its memory may not be free",
                phase="release_memory_occupation",
                failures=failures,
            )


class _EndedWithOthers(RolloutError):
    """The start of an engine was ended because another did not start."""


def as_failure(error: Exception, engine_id: str, operation: str, started: float) -> EngineFailure:
    """The failure of an operation on one engine that began at ``started``."""
    return EngineFailure(
        f"engine {engine_id}: {operation} failed: {describe(error)}",
        engine_id=engine_id,
        operation=operation,
        elapsed_s=asyncio.get_running_loop().time() - started,
    )


def format_failures(command: str, group: str, failures: Sequence[EngineFailure]) -> str:
    """One line for the failures of one command."""
    reasons = "; ".join(str(failure) for failure in failures) or "too few engines"
    return f"group {group}: {command} failed: {reasons}"


def _log_failures(answers: Mapping[str, EngineReply[Any]]) -> None:
    for reply in answers.values():
        if reply.failure is not None:
            logger.error("%s", reply.failure)
