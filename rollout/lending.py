"""Taking an engine out of its group, and back.

Always true: an engine that is lent is empty, and what it held has been measured to be free, before
its place is; one that comes back gets no requests until it is proved to hold the weights of its
group; a place is never taken twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from engines.protocol import MemoryTag
from rollout.config import Drain, EngineKind
from rollout.draining import flush, pause
from rollout.ending import KILL_TIMEOUT_S, confirm_gone
from rollout.errors import EngineFailure, LifecycleError
from rollout.fanout import describe, finish
from rollout.group_commands import GroupCommands, now
from rollout.group_settings import GroupSettings
from rollout.leading import released_in, walk
from rollout.lifecycle import Phase
from rollout.member import Member
from rollout.memory import release, resume
from rollout.policy import ReleasePolicy
from rollout.roster import Roster
from rollout.types import EngineReport, GroupStatus
from rollout.weights.transports.by_broadcast import leave_group

logger = logging.getLogger(__name__)

_BEFORE_FLUSH = (Phase.SERVING, Phase.PAUSED)


def check_can_leave(engine_id: str, group: GroupStatus, min_engines: int | None) -> None:
    """Refuse to take an engine out of a group that could not go on without it.

    Args:
        min_engines: as configured; None counts as 1.

    Raises:
        LifecycleError: too few would be left.
    """
    well = [one.engine_id for one in group.engines if not one.fenced_because]
    fewest = 1 if min_engines is None else min_engines
    left = len(well) - (engine_id in well)
    if engine_id in well and left < fewest:
        raise LifecycleError(
            f"cannot remove engine {engine_id}: {left} engines would be left in group "
            f"{group.name}, {fewest} needed (min_engines)",
            command="remove_engine",
            phase=group.phase,
        )


class Lending:
    """The part of a group that gives places away and takes them back.

    Args:
        checkpoint_bytes: size of the weights on disk, for what a release must free.
    """

    def __init__(
        self,
        settings: GroupSettings,
        roster: Roster,
        commands: GroupCommands,
        policy: ReleasePolicy,
        checkpoint_bytes: int,
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._commands = commands
        self._policy = policy
        self._checkpoint_bytes = checkpoint_bytes

    # -- out --------------------------------------------------------------------------------

    async def remove(self, engine_id: str, *, keep_process: bool) -> EngineReport:
        """Empty the engine, free its memory, and make its place free.

        Args:
            keep_process: it sleeps with its memory released, and is taken back as it is;
                otherwise its process is ended.  An attached engine is always kept.

        Raises:
            LifecycleError: there is no such engine.
            EngineFailure: it could not be emptied or its memory did not come free; it is fenced.
        """
        if engine_id not in self._roster:
            raise LifecycleError(f"group {self._settings.name} has no engine {engine_id}")
        member, started = self._roster[engine_id], now()
        keeps = keep_process or self._settings.group.engine.kind is EngineKind.ATTACHED
        if member.fenced_because:
            await confirm_gone(member)
            freed, keeps = 0, False
        else:
            # Cancelled in between, nobody would know what it has released.
            freed = await finish(self._empty(member, keeps))
        if engine_id not in self._roster:
            raise LifecycleError(f"engine {engine_id}: its group was stopped meanwhile")
        self._roster.lend(engine_id, keeps_process=keeps)
        report = EngineReport(engine_id, now() - started, freed_bytes=freed)
        logger.info("engine %s left its group after %.1f s", engine_id, report.elapsed_s)
        return report

    async def _empty(self, member: Member, keeps_process: bool) -> int:
        budgets, started = self._settings.lifecycle, now()
        try:
            await self._drain(member)
            if keeps_process:
                async with asyncio.timeout(budgets.release_timeout_s):
                    return await self._release(member)
            before = await member.process.resident_bytes()
            await self._end(member)
            return before or 0
        except Exception as error:
            failure = EngineFailure(
                f"engine {member.engine_id}: remove failed: {describe(error)}",
                engine_id=member.engine_id,
                operation="remove",
                elapsed_s=now() - started,
            )
            if member.engine_id in self._roster:  # its group was not stopped meanwhile
                await self._roster.fence([failure])
            raise failure from error

    async def _drain(self, member: Member) -> None:
        """Nothing is in flight afterwards, whatever it is paused with; nothing is admitted."""
        budgets = self._settings.lifecycle
        if self._commands.phase in _BEFORE_FLUSH:
            async with asyncio.timeout(budgets.pause_timeout_s):
                await pause(member, Drain.ABORT, budgets.pause_timeout_s)
            async with asyncio.timeout(budgets.flush_timeout_s):
                await flush(member, Drain.ABORT, budgets.flush_timeout_s)

    async def _release(self, member: Member) -> int:
        if member.update_group:  # the next push makes a group without it
            await leave_group(member.engine, member.update_group)
            member.update_group = ""
        if not self._policy.tags:
            return 0  # a group that keeps its GPUs has engines without a memory saver
        return await release(member, self._policy, self._checkpoint_bytes)

    async def _end(self, member: Member) -> None:
        """End its process; gone for certain when this returns."""
        try:
            async with asyncio.timeout(self._settings.lifecycle.stop_timeout_s + KILL_TIMEOUT_S):
                await member.process.stop(self._settings.lifecycle.stop_timeout_s)
        finally:
            await member.engine.aclose()
        await confirm_gone(member)

    # -- back -------------------------------------------------------------------------------

    async def add(self, engine_id: str, tags: Sequence[MemoryTag]) -> Member:
        """Take a place back: wake the engine that sleeps there, or start one; it is stale then.

        Args:
            tags: what the group releases when it is offloaded; empty if it keeps its GPUs.

        Raises:
            LifecycleError: no such place is free, or its memory is the trainer's now.
            EngineFailure: it did not start or wake; its place is free, and nothing runs there.
        """
        self._check_is_free(engine_id)
        phase, started = self._commands.phase, now()
        sleeping = self._roster.sleeping(engine_id)
        if sleeping is None and phase is Phase.OFFLOADED and tags:
            raise LifecycleError(
                f"cannot add engine {engine_id}: group {self._settings.name} is offloaded, its "
                "memory is the trainer's; onload first",
                command="add_engine",
                phase=phase,
            )
        try:
            if sleeping is None:
                budget_s = self._settings.group.engine.start_timeout_s + KILL_TIMEOUT_S
                async with asyncio.timeout(budget_s):
                    await self._roster.start_lent(engine_id, lambda one: walk(one, phase, tags))
            else:
                await finish(self._wake(sleeping, phase, tags))
        except Exception as error:
            raise EngineFailure(
                f"engine {engine_id}: add failed: {describe(error)}",
                engine_id=engine_id,
                operation="add",
                elapsed_s=now() - started,
            ) from error
        return self._roster[engine_id]

    def _check_is_free(self, engine_id: str) -> None:
        if engine_id not in self._roster.lent():
            free = ", ".join(self._roster.lent()) or "none"
            raise LifecycleError(
                f"cannot add engine {engine_id}: it has no free place in group "
                f"{self._settings.name}; free are: {free}",
                command="add_engine",
            )

    async def _wake(self, member: Member, phase: Phase, tags: Sequence[MemoryTag]) -> None:
        """Lead an engine that sleeps, paused, flushed and released, to where the others are."""
        budgets = self._settings.lifecycle
        try:
            if member.released and not self._policy.weights_cpu_backup:
                member.weight_version = None
            member.is_stale, member.is_proved = True, False
            stays = released_in(phase, tags)
            for tags_now in ((MemoryTag.WEIGHTS,), (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)):
                async with asyncio.timeout(budgets.resume_timeout_s):
                    await resume(member, [tag for tag in tags_now if tag not in stays])
            if phase is Phase.SERVING:
                async with asyncio.timeout(budgets.continue_timeout_s):
                    await member.engine.continue_generation()
        except BaseException:
            # Nobody knows any more what it holds.
            await self._roster.end_sleeping(member.engine_id)
            raise
        self._roster.take_back(member)
