"""Recovery of the engines of one group, and of a group whose actor was lost.

Always true:
- an engine is restarted or readmitted only while no command runs.  It can be probed and fenced at
  any time, also while a command hangs;
- an engine of a lost group is reused only if no command ran on it when its group was lost, and it
  serves the published weights.  The released tags of any other engine are unknown, and SGLang
  crashes on a second release: it is fenced and ended, and recovery restarts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from engines.launch import RunningEngine
from engines.protocol import WeightsReport
from engines.protocol.plain_text import describe
from rollout.control.engine.catch_up import readmit
from rollout.control.engine.logprob_check import LogprobCheck
from rollout.control.engine.sentinel import Sentinel
from rollout.control.engine.start import Starter
from rollout.control.engine.state import EngineState
from rollout.control.group.adapters import GroupAdapters
from rollout.control.group.command_runner import CommandRunner
from rollout.control.group.engine_set import EngineSet
from rollout.core.errors import EngineFailure, LifecycleError, RolloutError, WeightMismatch
from rollout.core.types import EngineSlot, EngineStatus, GroupStatus
from rollout.rules.lifecycle import Phase
from rollout.weights.store.weight_source import WeightSource

logger = logging.getLogger(__name__)

_LOST = "its group was lost while a command ran or memory was released"


class EngineRecovery:
    """The part of a group that readmits engines, and runs beside no command.

    Args:
        sources: weight sources for a restarted engine, in the order in which they are tried.
    """

    def __init__(
        self,
        engines: EngineSet,
        commands: CommandRunner,
        sources: Sequence[WeightSource],
        logprob_check: LogprobCheck,
        sentinel: Sentinel,
        adapters: GroupAdapters,
    ) -> None:
        self._adapters = adapters
        self._engines = engines
        self._commands = commands
        self._sources = sources
        self._logprob_check = logprob_check
        self._sentinel = sentinel
        self._num_running = 0
        self._entry = asyncio.Lock()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Run without any command; other recoveries may run too.  The first one takes the turn."""
        async with self._entry:
            if not self._num_running:
                await self._commands.turn.acquire()
            self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._commands.turn.release()

    def is_command_running(self) -> bool:
        """Whether a command holds the turn, and not a recovery."""
        return self._commands.turn.locked() and not self._num_running

    async def readmit(self, engine_id: str, version: int) -> bool:
        """See ``ServerGroup.readmit``."""
        member = self._engines[engine_id]
        if member.fence_reason or not member.is_stale:
            return not member.fence_reason
        is_refused = version == self._logprob_check.refused_version
        sources = () if is_refused else self._sources
        reference = self._reference_for(version, member)
        try:
            complete = self._adapters.complete
            return await readmit(member, version, sources, reference, self._why_wrong, complete)
        except WeightMismatch:
            if not self._verified_at(version):
                self._logprob_check.refused_version = version
            raise

    def _verified_at(self, version: int) -> list[EngineState]:
        return [one for one in self._engines.unfenced() if one.is_verified_at(version)]

    async def _why_wrong(self, member: EngineState, version: int, why_inconclusive: str) -> str:
        """Why a restarted engine does not answer as ``version`` does.

        Args:
            why_inconclusive: why its fingerprints are not enough; empty if they are.

        Returns:
            Empty if it does.  Also empty if that cannot be checked now: then the engine is checked
            with the others when they continue.
        """
        if why_inconclusive:
            self._logprob_check.require(member, why_inconclusive)
        if self._commands.phase is not Phase.SERVING:
            return ""
        try:
            await self._sentinel.check(member)
        except LifecycleError as error:
            return str(error)
        if not member.needs_logprob_check:
            return ""
        return await self._logprob_check.why_mismatch(member, self._verified_at(version))

    def _reference_for(self, version: int, stale: EngineState) -> WeightsReport | None:
        """Fingerprints of an engine verified at ``version``; may be ``stale`` itself."""
        references = (
            member.record
            for member in (*self._engines.unfenced(), stale)
            if member.weight_version == version
            and (member.is_verified or member is stale)
            and not member.changed
        )
        return next(references, None)


async def adopt_running_engines(
    engines: EngineSet,
    starter: Starter,
    slots: Mapping[str, EngineSlot],
    known: GroupStatus,
    processes: Mapping[str, RunningEngine],
    version: int | None,
    budget_s: float,
) -> None:
    """Fill the set with the engines of ``known``; see ``ServerGroup.take_over``.

    Args:
        budget_s: deadline for one engine to pass its checks.
    """

    async def adopt(engine: EngineStatus) -> EngineState:
        slot, process = slots[engine.engine_id], processes[engine.engine_id]
        reason = engine.fence_reason or ("" if version is not None else _LOST)
        if not reason:
            try:
                async with asyncio.timeout(budget_s):
                    return await _reuse(starter, slot, process, engine, version)
            except Exception as error:
                reason = f"its group was lost, and it cannot be reused: {describe(error)}"
        return starter.unknown(slot, process, f"engine {engine.engine_id}: {reason}")

    members = await asyncio.gather(*(adopt(engine) for engine in known.engines))
    engines.fill(members)
    fenced = [member for member in members if member.fence_reason]
    logger.warning(
        "group %s: %d of %d engines of the lost group reused",
        known.name,
        len(members) - len(fenced),
        len(members),
    )
    await engines.fence(
        [
            EngineFailure(member.fence_reason, engine_id=member.engine_id, operation="take over")
            for member in fenced
        ]
    )


async def _reuse(
    starter: Starter,
    slot: EngineSlot,
    process: RunningEngine,
    known: EngineStatus,
    version: int | None,
) -> EngineState:
    if not await process.is_alive():
        raise RolloutError("its process has ended")
    member = await starter.admit(slot, process)
    try:
        if not await member.engine.is_ready():
            raise RolloutError("it takes no requests")
        member.process_name = known.process_name
        if known.is_stale:
            member.is_stale, member.is_verified = True, False
        elif member.weight_version != version:
            raise RolloutError(f"it holds weight version {member.weight_version}, not {version}")
    except BaseException:
        await member.aclose()
        raise
    return member
