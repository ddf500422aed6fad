"""One command of the lifecycle on the groups of a server: asked at once, waited for together.

Always true: a step returns after every group it asked has answered or is late; after one that
failed the gate is shut, if it was not open, and says why to whoever knocks; there is no
``finally`` that opens it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from rollout import lifecycle
from rollout.config import Drain, LifecycleConfig
from rollout.errors import LifecycleError
from rollout.fanout import barrier, describe
from rollout.gatekeeper import Gatekeeper
from rollout.group_view import GroupView
from rollout.lifecycle import Command, Phase
from rollout.ports import GROUP_MARGIN_S, GroupPort
from rollout.recovery import Recovery
from rollout.timeline.recorder import Timeline
from rollout.timeline.span import Kind
from rollout.types import PhaseReport, StepReport
from rollout.weights.push import WeightPush
from rollout.weights.store.store import WeightStore

logger = logging.getLogger(__name__)


class Steps:
    """Carries out commands, whose order is its caller's.

    Attributes:
        weight_version: the version published last.
        doing: the command that is under way; empty for none.
    """

    def __init__(
        self,
        name: str,
        budgets: LifecycleConfig,
        view: GroupView,
        gate: Gatekeeper,
        recovery: Recovery,
        timeline: Timeline,
        store: WeightStore | None = None,
        note: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """Nothing is done.

        Args:
            note: writes down where things are, before and after each command; told whether
                that must outlive a power failure.
        """
        self.weight_version = 0
        self.doing = ""
        self._note = note or _nothing
        self._timeline = timeline
        self._name = name
        self._budgets = budgets
        self._view = view
        self._gate = gate
        self._recovery = recovery
        self._store = store
        self._pushed: WeightPush | None = None
        self._order = 0
        self._has_failed = False

    # -- several, each for the groups that have it before them ------------------------------

    async def advance(self, *commands: Command) -> StepReport:
        """One after the other, each for the groups that still have it before them."""
        steps = {
            Command.PAUSE: self.pause,
            Command.FLUSH: self.flush,
            Command.RELEASE: self.release,
            Command.RESUME_WEIGHTS: self.resume_weights,
            Command.VERIFY: self.verify,
            Command.RESUME_KV: self.resume_kv,
            Command.CONTINUE: self.continue_generation,
        }
        await self._look_again()
        report = StepReport(weight_version=self.weight_version)
        for command in commands:
            if command is Command.PAUSE:
                lifecycle.check_can_offload(self._view.phases)
            report = report.merged(await steps[command](self._view.before(command)))
        return report

    async def catch_up(self) -> StepReport:
        """Lead groups that a failed offload left behind to where new weights can reach them."""
        report = StepReport(weight_version=self.weight_version)
        if self._gate.state == "open":
            return report
        await self._look_again()
        for command, step in ((Command.PAUSE, self.pause), (Command.FLUSH, self.flush)):
            if names := self._view.before(command):
                report = report.merged(await step(names))
        return report

    async def _look_again(self) -> None:
        """After a failure a group may have gone on: a call its caller had given up came late."""
        if self._has_failed:
            await self._view.look_at_phases()

    # -- each of them -----------------------------------------------------------------------

    async def pause(self, names: Iterable[str]) -> StepReport:
        await self._gate.shut("holding", "the engines are paused for a weight update", "pause")
        if self._budgets.drain is Drain.FINISH:
            late = await self._gate.drain(self._budgets.drain_timeout_s)
            if late:
                logger.warning("server %s: %s; they are aborted", self._name, late)
        return await self._step(Command.PAUSE, names, lambda group, o: group.pause(o))

    async def flush(self, names: Iterable[str]) -> StepReport:
        return await self._step(Command.FLUSH, names, lambda group, o: group.flush(o))

    async def release(self, names: Iterable[str]) -> StepReport:
        return await self._step(Command.RELEASE, names, lambda group, o: group.release(o))

    async def resume_weights(self, names: Iterable[str]) -> StepReport:
        names = list(names)
        # Offloaded, nobody could be started: the memory is ours again only from here on.
        await self._recovery.revive(names)
        return await self._step(
            Command.RESUME_WEIGHTS, names, lambda group, o: group.resume_weights(o)
        )

    async def update_weights(self, push: WeightPush) -> StepReport:
        await self._look_again()
        # All or none: a group that took what another refused would hold what is never published.
        for name, phase in self._view.phases.items():
            lifecycle.next_phase(phase, Command.UPDATE_WEIGHTS, self._view.traits[name])
        read = push.read_by(len(self._view.groups))
        report = await self._step(
            Command.UPDATE_WEIGHTS,
            self._view.groups,
            lambda group, o: group.update_weights(read, o),
            weight_version=push.version,
        )
        self.weight_version = push.version
        self._pushed = push
        return report

    async def verify(self, names: Iterable[str]) -> StepReport:
        version = self.weight_version
        return await self._step(Command.VERIFY, names, lambda group, o: group.verify(version, o))

    async def resume_kv(self, names: Iterable[str]) -> StepReport:
        return await self._step(Command.RESUME_KV, names, lambda group, o: group.resume_kv(o))

    async def continue_generation(self, names: Iterable[str]) -> StepReport:
        report = await self._step(
            Command.CONTINUE, names, lambda group, o: group.continue_generation(o)
        )
        await self.open_gate()
        return report

    async def open_gate(self) -> None:
        """All engines are fit to serve: let requests in."""
        await self._gate.open(self.weight_version)
        self._has_failed = False
        await self._note(True)
        pushed, self._pushed = self._pushed, None
        if self._store is not None and pushed is not None:
            # Proved and serving, so worth keeping; and nobody waits for that.
            self._store.offer(pushed)

    # -- how ----------------------------------------------------------------------------------

    async def _step(
        self,
        command: Command,
        names: Iterable[str],
        call: Callable[[GroupPort, int], Awaitable[PhaseReport]],
        *,
        weight_version: int | None = None,
    ) -> StepReport:
        self._order += 1
        self.doing = command.value
        started = asyncio.get_running_loop().time()
        budget_s = self._budget_s(command)
        try:
            await self._note(False)
            with self._timeline.span(Kind.PHASE, command.value, budget_s=budget_s) as span:
                span.weight_version = weight_version or self.weight_version
                reports = await barrier(
                    {name: call(self._view.groups[name], self._order) for name in names},
                    operation=command.value,
                    budget_s=budget_s + GROUP_MARGIN_S,
                )
        except BaseException as error:  # cancelled, the groups have gone on all the same
            await self._after_failure(command, error)
            self.doing = ""
            await self._note(True)
            raise
        for name, report in reports.items():
            self._view.phases[name] = Phase(report.phase)
        if any(report.failures for report in reports.values()):
            await self._gate.publish_members()
            self._recovery.look_soon()
        self.doing = ""
        await self._note(False)
        return StepReport(
            phase_s={command.value: asyncio.get_running_loop().time() - started},
            freed_bytes=sum(report.freed_bytes for report in reports.values()),
            weight_version=self.weight_version,
            reports=tuple(reports.values()),
        )

    async def _after_failure(self, command: Command, error: BaseException) -> None:
        """A failed phase leaves the gate shut and says so; groups keep what they reached.

        A command that was refused leaves the gate as it is, but other groups may have obeyed it.
        """
        cancelled = isinstance(error, asyncio.CancelledError)
        reason = f"{command} was cancelled" if cancelled else describe(error)
        before = self._view.fenced()
        self._has_failed = True
        steps: list[Callable[[], Awaitable[object]]] = [self._gate.publish_members]
        if self._gate.state != "open" and not isinstance(error, LifecycleError):
            steps.insert(0, lambda: self._gate.shut("closed", reason, command.value))
        for step in steps:
            try:
                await step()
            except Exception as more:  # must not hide the failure that is being told
                logger.error(
                    "server %s: after a failed %s: %s", self._name, command, describe(more)
                )
        self._view.take_last_known_phases()
        # The error of one group says nothing of whom another has fenced meanwhile.
        for engine_id, because in self._view.fenced().items():
            if engine_id not in before and because not in str(error):
                error.add_note(f"also fenced: {because}")
        self._recovery.look_soon()

    def _budget_s(self, command: Command) -> float:
        budgets = self._budgets
        return {
            Command.PAUSE: budgets.pause_timeout_s,
            Command.FLUSH: budgets.flush_timeout_s,
            Command.RELEASE: budgets.release_timeout_s,
            Command.RESUME_WEIGHTS: budgets.resume_timeout_s,
            Command.UPDATE_WEIGHTS: budgets.update_timeout_s,
            Command.VERIFY: budgets.verify_timeout_s,
            Command.RESUME_KV: budgets.resume_timeout_s,
            Command.CONTINUE: budgets.continue_timeout_s,
        }[command]


async def _nothing(durable: bool) -> None:
    """Nobody keeps a journal."""
