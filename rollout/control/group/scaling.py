"""Removes engines from a group that runs, and adds them again.

Always true: before a slot is reported vacant, its engine is drained and the freed memory is
measured.  An added engine gets no requests until its weights are verified.  A slot never has two
engines.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from rollout.config import Drain
from rollout.control.engine.catch_up import bring_to_phase
from rollout.control.engine.drain import flush, pause
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.memory import EngineMemory
from rollout.control.engine.state import EngineState
from rollout.control.engine.stop import confirm_gone
from rollout.control.group.command_runner import CommandRunner, now
from rollout.control.group.engine_boots import EngineBoots
from rollout.control.group.engine_set import EngineSet, as_failure
from rollout.core.errors import LifecycleError
from rollout.core.fanout import run_to_completion
from rollout.core.types import EngineReport, GroupStatus
from rollout.rules.deadlines import STOP_TIMEOUT_S
from rollout.rules.lifecycle import Phase
from rollout.weights.routes.broadcast import leave_group

logger = logging.getLogger(__name__)

_BEFORE_FLUSH = (Phase.SERVING, Phase.PAUSED)


def check_can_leave(engine_id: str, group: GroupStatus, min_engines: int | None) -> None:
    """Refuse to remove an engine from a group that could not continue without it.

    Args:
        min_engines: as configured; None counts as 1.

    Raises:
        LifecycleError: too few engines would remain.
    """
    unfenced = [engine.engine_id for engine in group.engines if not engine.fence_reason]
    fewest = 1 if min_engines is None else min_engines
    num_left = len(unfenced) - (engine_id in unfenced)
    if engine_id in unfenced and num_left < fewest:
        raise LifecycleError(
            f"cannot remove engine {engine_id}: {num_left} engines would remain in group "
            f"{group.name}, {fewest} needed (min_engines)",
            command="engines.remove",
            phase=group.phase,
        )


class EngineScaling:
    """The part of a group that removes and adds engines."""

    def __init__(
        self,
        settings: GroupSettings,
        engines: EngineSet,
        commands: CommandRunner,
        memory: EngineMemory,
        boots: EngineBoots,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._commands = commands
        self._memory = memory
        self._boots = boots

    # -- remove -----------------------------------------------------------------------------

    async def remove(self, engine_id: str) -> EngineReport:
        """See ``ServerGroup.remove``.

        An attached engine, whose process is not ours, sleeps with its memory released, and ``add``
        wakes it.
        """
        if self._engines.get(engine_id) is None:
            raise LifecycleError(f"group {self._settings.name} has no engine {engine_id}")
        member, started = self._engines[engine_id], now()
        keeps = self._settings.group.engine.is_attached
        await self._boots.end([engine_id])
        # Not cancellable: an engine without its memory would be one of the others.
        freed = await run_to_completion(self._leave(member, keeps))
        report = EngineReport(engine_id, now() - started, freed_bytes=freed)
        logger.info("engine %s left its group after %.1f s", engine_id, report.elapsed_s)
        return report

    async def _leave(self, member: EngineState, keeps_process: bool) -> int:
        """Empty an engine and vacate its slot; the bytes that it has freed."""
        if member.fence_reason:
            await confirm_gone(member, self._engines.kill_timeout_s)
            freed, keeps_process = 0, False
        else:
            freed = await self._empty(member, keeps_process)
        if self._engines.get(member.engine_id) is None:
            raise LifecycleError(f"engine {member.engine_id}: its group was stopped meanwhile")
        self._engines.vacate(member.engine_id)
        if keeps_process:
            self._boots.add_sleeping(member)
        return freed

    async def _empty(self, member: EngineState, keeps_process: bool) -> int:
        budgets, started = self._settings.lifecycle, now()
        try:
            await self._drain(member)
            if keeps_process:
                async with asyncio.timeout(budgets.memory_timeout_s):
                    return await self._release(member)
            before = await member.process.resident_bytes()
            await self._end(member)
            return before or 0
        except Exception as error:
            failure = as_failure(error, member.engine_id, "remove", started)
            was_stopped = self._engines.get(member.engine_id) is None  # its group, meanwhile
            if not was_stopped:
                await self._engines.fence([failure])
            raise failure from error

    async def _drain(self, member: EngineState) -> None:
        """Pause and flush; afterwards nothing is in flight."""
        budget_s = self._settings.lifecycle.command_timeout_s
        if self._commands.phase in _BEFORE_FLUSH:
            async with asyncio.timeout(budget_s):
                await pause(member, Drain.ABORT, budget_s)
            async with asyncio.timeout(budget_s):
                await flush(member, Drain.ABORT, budget_s)

    async def _release(self, member: EngineState) -> int:
        if member.update_group:  # the next push creates a broadcast group without it
            await leave_group(member.engine, member.update_group)
            member.update_group = ""
        if not self._memory.policy.tags:
            return 0  # a group that keeps its GPUs has engines without a memory saver
        return await self._memory.release(member)

    async def _end(self, member: EngineState) -> None:
        """Stop its process, and confirm that it has ended."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S + self._engines.kill_timeout_s):
                await member.process.stop(STOP_TIMEOUT_S)
        finally:
            await member.engine.aclose()
        await confirm_gone(member, self._engines.kill_timeout_s)

    # -- add --------------------------------------------------------------------------------

    async def add(self, engine_id: str) -> EngineState:
        """Fill a vacant slot with the engine that sleeps there or has booted; it is stale then."""
        self._check_is_free(engine_id)
        phase, member = self._commands.phase, self._boots.take(engine_id)
        if member is None:
            why = "its boot was ended by an offload; add it again"
            if phase is Phase.OFFLOADED:
                why = (
                    f"group {self._settings.name} is offloaded and the trainer uses its memory; "
                    "onload first"
                )
            raise LifecycleError(
                f"cannot add engine {engine_id}: {why}",
                command="engines.add",
                phase=phase,
            )
        await self._engines.join(
            member, partial(bring_to_phase, phase=phase, memory=self._memory), "add"
        )
        return member

    def _check_is_free(self, engine_id: str) -> None:
        if engine_id not in self._engines.vacant:
            vacant = ", ".join(self._engines.vacant) or "none"
            raise LifecycleError(
                f"cannot add engine {engine_id}: it has no vacant slot in group "
                f"{self._settings.name}; vacant: {vacant}",
                command="engines.add",
            )
