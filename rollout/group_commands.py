"""How a group carries out a command: on every engine that is not fenced, waited for, concluded.

Always true:
- only a command that the table allows is sent to any engine, and one command at a time;
- it returns after all engines have answered, even when its caller has given up;
- an engine that fails it is fenced and ended;
- the phase is where all engines are that are not fenced, also after a command that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollout import lifecycle
from rollout.errors import LifecycleError, PhaseFailed
from rollout.fanout import Answer, fan_out, finish
from rollout.group_settings import GroupSettings
from rollout.lifecycle import Command, Phase, Traits
from rollout.member import Member
from rollout.roster import Roster, calling, told
from rollout.timeline.recorder import Timeline
from rollout.timeline.span import Kind
from rollout.types import EngineReport, PhaseReport
from rollout.verification import Proof

logger = logging.getLogger(__name__)

Review = Callable[[dict[str, Answer[Any]]], dict[str, Answer[Any]]]


class GroupCommands:
    """The phase of one group, and what moves it.

    Attributes:
        phase: where the group is.
        turn: held by whoever commands the engines: whoever gave up on a command may send the
            next while it still runs.
        num_commands: counted up with each command.
    """

    def __init__(
        self, settings: GroupSettings, traits: Traits, roster: Roster, timeline: Timeline
    ) -> None:
        self.phase = Phase.SERVING
        self.turn = asyncio.Lock()
        self.num_commands = 0
        self._settings = settings
        self._traits = traits
        self._roster = roster
        self._timeline = timeline
        self._last_order = 0

    async def command(
        self,
        command: Command,
        act: Callable[[Member], Awaitable[Any]],
        budget_s: float,
        order: int | None,
        *,
        why_not: Callable[[], str] = str,
        review: Review = dict,
    ) -> PhaseReport:
        """``act`` on every engine that is not fenced.

        Args:
            order: number of the command; an older one than was seen is refused.
            why_not: why it cannot be done although the table allows it; empty if it can.
            review: looks at all answers before they count.
        """
        async with self.in_turn(order, command, budget_s):
            return await self._carry_out(command, act, budget_s, why_not=why_not, review=review)

    @asynccontextmanager
    async def in_turn(
        self, order: int | None, command: str, budget_s: float
    ) -> AsyncIterator[None]:
        """Alone with the engines, and recorded, unless a newer command was here before."""
        self._check_order(order)
        async with self.turn:
            with self._timeline.span(Kind.GROUP, str(command), budget_s=budget_s):
                yield

    async def _carry_out(
        self,
        command: Command,
        act: Callable[[Member], Awaitable[Any]],
        budget_s: float,
        *,
        why_not: Callable[[], str],
        review: Review,
    ) -> PhaseReport:
        started = now()
        if lifecycle.is_repeat(self.phase, command):
            return self._report(command, {}, started)
        target = self.target(command, why_not())

        async def carry_out() -> PhaseReport:
            answers = await fan_out(
                {member.engine_id: calling(act, member) for member in self._roster.unfenced()},
                operation=command.value,
                budget_s=budget_s,
            )
            if len(self._roster):  # it was not stopped meanwhile
                answers = review(answers)
            return await self.conclude(command, target, answers, started)

        # Cancelled in between, the engines would be in a phase that the group knows nothing of.
        return await finish(carry_out())

    def target(self, command: Command, why_not: str = "") -> Phase:
        """Where ``command`` leads.

        Raises:
            LifecycleError: it is not legal now, or ``why_not`` says why it cannot be done.
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
        answers: Mapping[str, Answer[Any]],
        started: float,
    ) -> PhaseReport:
        """Fence who failed, and say where the group is.

        Raises:
            PhaseFailed: too few engines are left, or one failed and that is to be raised.
        """
        name = self._settings.name
        failures = [one.failure for one in answers.values() if one.failure is not None]
        if answers and not len(self._roster):
            raise PhaseFailed(
                f"group {name}: {command} ended because the group was stopped",
                phase=command.value,
                failures=failures,
            )
        await self._roster.fence(failures)
        left = len(self._roster.unfenced())
        if left:  # and they have all done it
            self.phase = target
        if left < self.min_engines() or (failures and self._settings.raises):
            raise PhaseFailed(
                f"{told(command.value, name, failures)}; {left} of {len(self._roster)} "
                f"engines left, {self.min_engines()} needed; the group is {self.phase}",
                phase=command.value,
                failures=failures,
            )
        self.phase = target
        report = self._report(command, answers, started)
        cost = "" if report.checking is None else f": {report.checking}"
        took = f"{report.elapsed_s:.3f} s{cost}"
        logger.info("group %s: %s -> %s in %s", name, command, target, took)
        return report

    def _report(
        self, command: Command, answers: Mapping[str, Answer[Any]], started: float
    ) -> PhaseReport:
        return PhaseReport(
            group=self._settings.name,
            command=command.value,
            phase=self.phase.value,
            elapsed_s=now() - started,
            engines=tuple(
                EngineReport(
                    engine_id=engine_id,
                    elapsed_s=answer.elapsed_s,
                    failure=str(answer.failure or ""),
                    freed_bytes=answer.value if isinstance(answer.value, int) else 0,
                    **_of_weights(answer.value),
                )
                for engine_id, answer in answers.items()
            ),
        )

    def _check_order(self, order: int | None) -> None:
        """Refuse a command older than one already seen: Ray does not keep the order of calls."""
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
        """Fewest engines the group may go on with."""
        return self._settings.fewest_engines(len(self._roster))


def _of_weights(value: Any) -> dict[str, Any]:
    """What an answer says of the weights, for a report."""
    if not isinstance(value, Proof):
        return {}
    return {
        "proved_by": value.by,
        "read_bytes": value.report and value.report.num_bytes,
        "read_cpu_s": value.report and value.report.cpu_s,
    }


def now() -> float:
    """The time, in seconds."""
    return asyncio.get_running_loop().time()
