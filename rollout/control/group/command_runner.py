"""The phase of a group: which commands it allows, and the phase after the engines' replies.

Always true:
- only a command that the table allows is sent to any engine, and one command at a time;
- an engine that fails a command is fenced and ended;
- all engines that are not fenced are in this phase, also after a command that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollout.control.engine.group_settings import GroupSettings, fewest_engines
from rollout.control.engine.state import EngineState
from rollout.control.group.engine_set import EngineSet, format_failures
from rollout.core.errors import LifecycleError, PhaseFailed
from rollout.core.fanout import EngineReply
from rollout.core.types import DraftFigures, EngineReport, PhaseReport
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import Kind
from rollout.rules import lifecycle
from rollout.rules.fingerprint_check import Verification
from rollout.rules.lifecycle import MOVE_MEMORY, Command, GroupTraits, Phase

logger = logging.getLogger(__name__)

# Of a command's time, until it begins: an engine that got less would be fenced for what was before.
_MOST_WAITED = 0.5


class CommandRunner:
    """The phase of one group, and its transitions.

    Attributes:
        turn: held while a command runs on the engines.  A caller that gave up on a command may
            send the next one while the first still runs.
        num_commands: number of commands so far.
    """

    def __init__(
        self, settings: GroupSettings, traits: GroupTraits, engines: EngineSet, timeline: Timeline
    ) -> None:
        self.phase = Phase.STARTING
        self.turn = asyncio.Lock()
        self.num_commands = 0
        self._settings = settings
        self._traits = traits
        self._engines = engines
        self._timeline = timeline
        self._last_order = 0

    @asynccontextmanager
    async def in_order(
        self, order: int | None, command: str, budget_s: float
    ) -> AsyncIterator[float]:
        """Hold the engines for one command and record it in the timeline.

        The block gets the moment, of the event loop's clock, when ``budget_s`` are over.  They
        begin before the command has its turn.

        Raises:
            LifecycleError: a newer command has already arrived.
            PhaseFailed: the command before it does not end in time; no engine was called.
        """
        self._check_order(order)
        ends_s = now() + budget_s
        await self._take_turn(command, budget_s * _MOST_WAITED)
        try:
            with self._timeline.span(Kind.GROUP, str(command), budget_s=budget_s):
                yield ends_s
        finally:
            self.turn.release()

    async def _take_turn(self, command: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.turn.acquire()
        except TimeoutError:
            raise PhaseFailed(
                f"group {self._settings.name}: {command} has not begun after {timeout_s:g} s, and "
                "no engine was called: what the group did before still runs; call it again",
                phase=str(command),
            ) from None

    def target(self, command: Command, why_not: str = "") -> Phase:
        """The phase after ``command``.

        Raises:
            LifecycleError: it is not legal now, or ``why_not`` is not empty.
        """
        target = lifecycle.next_phase(self.phase, command, self._traits)
        if why_not:
            raise LifecycleError(
                f"group {self._settings.name}: cannot {command} while {self.phase}: {why_not}",
                command=command,
                phase=self.phase,
            )
        return target

    async def conclude(
        self,
        command: Command,
        target: Phase,
        answers: Mapping[str, EngineReply[Any]],
        started: float,
    ) -> PhaseReport:
        """Fence the engines that failed, and move the group to its new phase.

        Raises:
            PhaseFailed: too few engines remain, or one failed and ``on_failure`` is ``raise``.
        """
        name = self._settings.name
        failures = [reply.failure for reply in answers.values() if reply.failure is not None]
        if answers and not len(self._engines):
            raise PhaseFailed(
                f"group {name}: {command} ended because the group was stopped",
                phase=command.value,
                failures=failures,
            )
        await self._engines.fence(failures)
        num_left = len(self._engines.unfenced())
        # All that are left completed the command.  Those that were ended hold no memory.
        if num_left or command is Command.RELEASE_MEMORY_OCCUPATION:
            self.phase = target
        if num_left < self.min_engines() or (failures and self._settings.raises):
            failed = format_failures(command.value, name, failures)
            raise PhaseFailed(
                f"{failed}; {num_left} of {len(self._engines)} engines left, "
                f"{self.min_engines()} needed; the group is {self.phase}",
                phase=command.value,
                failures=failures,
            )
        self.phase = target
        report = self.report(command, answers, started)
        logger.info("group %s: %s -> %s in %.3f s", name, command, target, report.elapsed_s)
        return report

    def report(
        self, command: Command | str, answers: Mapping[str, EngineReply[Any]], started: float
    ) -> PhaseReport:
        """The report of one command: per engine, and the group's phase."""
        # A stop may have removed engines meanwhile.
        members = {member.engine_id: member for member in self._engines.members()}
        return PhaseReport(
            group=self._settings.name,
            command=str(command),
            phase=self.phase.value,
            elapsed_s=now() - started,
            engines=tuple(
                EngineReport(
                    engine_id=engine_id,
                    elapsed_s=answer.elapsed_s,
                    failure=str(answer.failure or ""),
                    freed_bytes=answer.value if isinstance(answer.value, int) else 0,
                    verified_by=answer.value.by if isinstance(answer.value, Verification) else "",
                    drafts=_drafts_of(members.get(engine_id), command),
                    **_memory_of(members.get(engine_id), command),
                )
                for engine_id, answer in answers.items()
            ),
        )

    def _check_order(self, order: int | None) -> None:
        """Refuse a command older than the last one: Ray does not keep the order of calls."""
        self.num_commands += 1
        if order is None:
            return
        if order <= self._last_order:
            raise LifecycleError(
                f"group {self._settings.name}: command {order} came after command "
                f"{self._last_order}"
            )
        self._last_order = order

    def min_engines(self) -> int:
        """The least number of engines that the group needs to continue."""
        return fewest_engines(self._settings.group, self._settings.lifecycle, len(self._engines))


def now() -> float:
    """The time, in seconds."""
    return asyncio.get_running_loop().time()


def _memory_of(member: EngineState | None, command: Command | str) -> dict[str, Any]:
    """The GPUs of an engine, and the memory in use after a command that changes it."""
    if member is None:
        return {}
    used_bytes = member.used_after if command in MOVE_MEMORY else None
    return {"num_gpus": member.slot.num_gpus, "used_bytes": used_bytes}


def _drafts_of(member: EngineState | None, command: Command | str) -> DraftFigures | None:
    """Its drafted tokens of the time that a continue has ended."""
    has_ended = member is not None and command == Command.CONTINUE_GENERATION
    return member.drafts.last if member and has_ended and member.drafts else None


def left_until(ends_s: float) -> float:
    """Seconds until a moment of the event loop's clock, to a tenth; a tenth if it has passed."""
    return max(round(ends_s - now(), 1), 0.1)
