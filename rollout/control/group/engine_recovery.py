"""Recovery of the engines of one group, and of a group whose actor was lost.

Always true:
- an engine is restarted or readmitted only while no command runs.  It can be probed and fenced at
  any time, also while a command hangs;
- an engine of a lost group is reused only if its own report agrees with the phase of the group: its
  weights, its released memory, and whether it takes requests.  Any other engine is fenced
  and ended, and recovery restarts it: SGLang crashes on a second release;
- a standby of a lost group is reused like an engine of an offloaded group, by its own report or if
  the engine beside it lives: it is woken only after that has ended.  Any other is ended;
- an engine that does not report its released memory (SGLang) has released what the phase of its
  group says, because a command is recorded before any engine gets it.  Between a push and the
  resume of its KV cache the phase does not say it: the group may have been offloaded, or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engines.launch import RunningEngine
from engines.protocol import MemoryTag, WeightsReport
from engines.protocol.plain_text import describe
from rollout.control.engine.catch_up import readmit, released_in
from rollout.control.engine.memory import redo
from rollout.control.engine.probe import Probe
from rollout.control.engine.start import Starter
from rollout.control.engine.state import EngineState
from rollout.control.group.adapters import GroupAdapters
from rollout.control.group.command_runner import CommandRunner
from rollout.control.group.engine_boots import EngineBoots
from rollout.control.group.engine_set import EngineSet
from rollout.core.errors import (
    ActorLost,
    EngineFailure,
    RolloutError,
    WeightMismatch,
    WeightsUnavailable,
)
from rollout.core.fanout import EngineReply
from rollout.core.types import EngineSlot, EngineStatus, GroupStatus
from rollout.rules.fingerprint_check import ALL_TENSORS
from rollout.rules.health import why_other_process
from rollout.rules.lifecycle import (
    MOVE_MEMORY,
    Command,
    GroupTraits,
    Phase,
    next_phase,
    spoils_weights,
)
from rollout.weights.store.weight_source import WeightSource

logger = logging.getLogger(__name__)


class EngineRecovery:
    """The part of a group that readmits engines, and runs beside no command.

    Args:
        sources: weight sources for a restarted engine, in the order in which they are tried.
        is_attached: other programs start its engines, with weights that only they know.
    """

    def __init__(
        self,
        engines: EngineSet,
        commands: CommandRunner,
        sources: Sequence[WeightSource],
        probe: Probe,
        adapters: GroupAdapters,
        *,
        is_attached: bool,
    ) -> None:
        self._is_attached = is_attached
        self._adapters = adapters
        self._engines = engines
        self._commands = commands
        self._sources = sources
        self._probe = probe
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
        return await self._readmit(member, version, self._reference_for(version, member))

    async def why_cannot_restore(self, version: int) -> str:
        """See ``ServerGroup.why_cannot_restore``."""
        if version == self._probe.refused_version:
            return f"engines that were given weight version {version} failed their verification"
        reasons = [await source.why_lacks(version) for source in self._sources]
        if "" in reasons:
            return ""
        return "; ".join(reasons) or f"nothing keeps weight version {version}"

    async def restore(self, member: EngineState, version: int) -> None:
        """Give an engine the published weights in place of those that a release has discarded.

        They are verified as those of a restarted engine.

        Raises:
            WeightsUnavailable: no source has them.
            WeightMismatch: it does not hold the weights that it reports.
        """
        reference = self._reference_for(version, member)
        if reference is None and not member.is_stale and not member.changed:
            reference = member.record  # it has served them before
        member.is_verified = False
        if not await self._readmit(member, version, reference):
            raise WeightsUnavailable(f"no source has given it weight version {version}")

    async def _readmit(
        self, member: EngineState, version: int, reference: WeightsReport | None
    ) -> bool:
        is_refused = version == self._probe.refused_version
        sources = () if is_refused else self._sources
        if self._is_attached and not (reference or self._knows_answers(member, version)):
            member.weight_version = None  # its number says nothing of the weights of others
        try:
            complete = self._adapters.complete
            return await readmit(member, version, sources, reference, self._why_wrong, complete)
        except WeightMismatch:
            if not self._verified_at(version):
                self._probe.refused_version = version
            raise

    def _knows_answers(self, member: EngineState, version: int) -> bool:
        """Whether an engine's weights can be compared with what is known of ``version`` without
        fingerprints of another."""
        peers = any(peer.canary for peer in self._verified_at(version))
        return bool(member.pushed or member.expected or member.canary or peers)

    def _verified_at(self, version: int) -> list[EngineState]:
        return [engine for engine in self._engines.unfenced() if engine.is_verified_at(version)]

    def _ended_at(self, version: int) -> list[EngineState]:
        """Engines that have ended, and that had ``version``, verified, when they did."""
        ended = [member for member in self._engines.members() if member.fence_reason]
        if self._engines.replaced is not None:
            ended.append(self._engines.replaced)
        return [old for old in ended if old.is_verified_at(version) and not old.changed]

    async def _why_wrong(self, member: EngineState, version: int, why_inconclusive: str) -> str:
        """Why a restarted engine does not answer as ``version`` does.

        Args:
            why_inconclusive: why its fingerprints are not enough.

        Returns:
            Empty if it does.  Also empty if that cannot be checked now: then the engine is checked
            with the others when they continue.
        """
        peers = self._verified_at(version)
        if not peers:
            before = (old.own_canary for old in self._ended_at(version) if old.own_canary)
            member.canary = member.canary or next(before, {})
        if why_inconclusive or (member.canary and not peers):
            self._probe.require(member, why_inconclusive)
        if self._commands.phase is not Phase.SERVING:
            return ""
        return await self._probe.why_wrong(member, peers)

    def _reference_for(self, version: int, stale: EngineState) -> WeightsReport | None:
        """Fingerprints of an engine verified at ``version``: of ``stale`` itself, or of one that
        has ended, too."""
        references = (
            member.record
            for member in (*self._engines.unfenced(), stale, *self._ended_at(version))
            if member.weight_version == version
            and (member.is_verified or member is stale)
            and not member.changed
            and member.record is not None
        )
        return next(references, None)


def check_any_restored(answers: Mapping[str, EngineReply[Any]], group: str) -> None:
    """Check that some engine got its weights, or has failed: otherwise a push can still lead on.

    Raises:
        WeightsUnavailable: no source had them for any.
    """
    failures = [answer.failure for answer in answers.values()]
    if answers and all(
        failure is not None and isinstance(failure.__cause__, WeightsUnavailable)
        for failure in failures
    ):
        raise WeightsUnavailable(
            f"group {group}: no engine got its weights back: {failures[0]}; push them"
        )


@dataclass(frozen=True, slots=True)
class LostState:
    """The state of a lost group, which its engines must confirm.

    Attributes:
        known: the last known status of the group, in the last phase that it completed.
        unfinished: the command during which it was lost, or None if it was at rest.
        version: the published weight version.
    """

    known: GroupStatus
    unfinished: Command | None
    version: int

    @property
    def phase(self) -> Phase:
        return Phase(self.known.phase)


async def adopt_running_engines(
    engines: EngineSet,
    boots: EngineBoots,
    starter: Starter,
    slots: Mapping[str, EngineSlot],
    processes: Mapping[str, RunningEngine],
    lost: LostState,
    tags: Sequence[MemoryTag],
    traits: GroupTraits,
    budget_s: float,
) -> None:
    """Fill the set with the engines of a lost group, and ``boots`` with those that sleep beside
    them; see ``ServerGroup.take_over``.

    Args:
        tags: the memory tags that the group releases on offload.
        budget_s: deadline for one engine to pass its checks.
    """

    async def adopt(engine: EngineStatus, neighbor: RunningEngine | None = None) -> EngineState:
        slot, process = slots[engine.engine_id], processes[engine.process]
        reason = engine.fence_reason
        if not reason:
            try:
                async with asyncio.timeout(budget_s):
                    return await _reuse(
                        starter, slot, process, engine, lost, tags, traits, neighbor
                    )
            except Exception as error:
                reason = f"its group was lost, and it cannot be reused: {describe(error)}"
        name = engine.process if neighbor else engine.engine_id
        return starter.unknown(slot, process, f"engine {name}: {reason}")

    known = lost.known
    neighbors = {engine.engine_id: processes[engine.process] for engine in known.engines}
    # Before any is ended: one that lives shows that none has taken its place.
    members, asleep = await asyncio.gather(
        asyncio.gather(*(adopt(engine) for engine in known.engines)),
        asyncio.gather(*(adopt(standby, neighbors[standby.engine_id]) for standby in known.asleep)),
    )
    engines.fill(members)
    for standby in asleep:
        if not standby.fence_reason:
            boots.add_sleeping(standby)
    fenced = [member for member in members if member.fence_reason]
    logger.warning(
        "group %s: %d of %d engines of the lost group reused",
        lost.known.name,
        len(members) - len(fenced),
        len(members),
    )
    failures = [
        EngineFailure(member.fence_reason, engine_id=member.engine_id, operation="take over")
        for member in fenced
    ]
    refused = [standby for standby in asleep if standby.fence_reason]
    await asyncio.gather(engines.fence(failures), engines.end(refused))


@dataclass(frozen=True, slots=True)
class _Says:
    """What the phase of a lost group, at rest, says of its engines.

    Attributes:
        released: which memory they have released.  Between a push and the resume of its KV cache it
            does not: the group may have been offloaded, or not.
        weights: that those are the published ones.
        survivors: that weights which must survive a release have done so.
    """

    released: bool = True
    weights: bool = True
    survivors: bool = True


_SAYS = {
    Phase.STARTING: _Says(weights=False),
    Phase.SERVING: _Says(),
    Phase.PAUSED: _Says(),
    Phase.FLUSHED: _Says(),
    Phase.OFFLOADED: _Says(weights=False, survivors=False),
    Phase.WEIGHTS_ONLOADED: _Says(weights=False, survivors=False),
    Phase.WEIGHTS_UPDATED: _Says(released=False, weights=False),
    Phase.VERIFIED: _Says(released=False),
    Phase.KV_ONLOADED: _Says(),
}


class _Unreported(Enum):
    """What an engine has released that does not report it."""

    AS_PHASE = "what the phase says"
    REPEATED = "what the unfinished command leaves, which it gets again"
    UNKNOWN = "unknown: it is not reused"


@dataclass(frozen=True, slots=True)
class _Terms:
    """What an engine of a lost group must confirm to be reused.

    Attributes:
        phase: of its group, or of one that sleeps.
        moving: the unfinished command that moves memory, so that its report may differ.
        is_at_rest: no command was unfinished, so that it takes requests or not by its phase.
    """

    phase: Phase
    unreported: _Unreported
    moving: Command | None = None
    is_at_rest: bool = True


def _terms(lost: LostState, traits: GroupTraits, *, is_attached: bool) -> _Terms:
    """The terms for an engine of a lost group.

    Raises:
        RolloutError: none can confirm its weights, and the next push does not bring them.
    """
    says, unfinished = _SAYS[lost.phase], lost.unfinished
    moving = unfinished if unfinished in MOVE_MEMORY else None
    if spoils_weights(unfinished):
        raise RolloutError(f"{unfinished} had begun")
    if traits.weights_survive and (moving or not says.survivors):
        raise RolloutError(
            "no copy of the fingerprints is left, and its weights must survive a release"
        )
    unreported = _Unreported.REPEATED if moving else _Unreported.AS_PHASE
    if not says.released or (moving and is_attached):
        unreported = _Unreported.UNKNOWN
    return _Terms(lost.phase, unreported, moving, unfinished is None)


async def _terms_asleep(neighbor: RunningEngine) -> _Terms:
    """The terms for a standby, which may have been woken if the engine beside it has ended."""
    is_alive = False
    with suppress(ActorLost):
        is_alive = await neighbor.is_alive()
    unreported = _Unreported.AS_PHASE if is_alive else _Unreported.UNKNOWN
    return _Terms(Phase.OFFLOADED, unreported)


async def _reuse(
    starter: Starter,
    slot: EngineSlot,
    process: RunningEngine,
    known: EngineStatus,
    lost: LostState,
    tags: Sequence[MemoryTag],
    traits: GroupTraits,
    neighbor: RunningEngine | None,
) -> EngineState:
    if neighbor is None:
        terms = _terms(lost, traits, is_attached=starter.spec(slot).is_attached)
    elif (process.endpoint, tuple(process.processes)) != (known.endpoint, known.processes):
        raise RolloutError("another process has its name")
    else:
        terms = await _terms_asleep(neighbor)
    if not await process.is_alive():
        raise RolloutError("its process has ended")
    member = await starter.admit(slot, process, is_asleep=neighbor is not None)
    try:
        if why := why_other_process(known.start, member.start):
            raise RolloutError(why)
        member.process_name = known.process_name
        member.released = await _released(member, terms, tags, traits)
        serves = terms.phase is Phase.SERVING
        member.is_paused = not serves
        if terms.is_at_rest and await member.engine.is_ready() != serves:
            takes = "no requests" if serves else "requests"
            raise RolloutError(f"it takes {takes}, and its group is {terms.phase}")
        if known.is_stale:
            member.is_stale, member.is_verified = True, False
            member.know_from(None)
        elif MemoryTag.WEIGHTS in member.released or not _SAYS[terms.phase].weights:
            # Only a push makes them known again.
            member.weight_version, member.is_verified = None, False
            member.changed = ALL_TENSORS
        elif member.weight_version != lost.version:
            raise RolloutError(
                f"it holds weight version {member.weight_version}, not {lost.version}"
            )
    except BaseException:
        await member.engine.aclose()
        raise
    return member


async def _released(
    member: EngineState, terms: _Terms, tags: Sequence[MemoryTag], traits: GroupTraits
) -> set[MemoryTag]:
    """The tags that an engine has released.

    Raises:
        RolloutError: it is unknown, or the engine reports others than the phase of its group says.
    """
    expected = set(released_in(terms.phase, tags))
    reported = (await member.engine.server_info()).released
    if reported is not None:
        if terms.moving is None and set(reported) != expected:
            raise RolloutError(
                f"it has released {', '.join(sorted(reported)) or 'nothing'}, and its group is "
                f"{terms.phase}"
            )
        return {tag for tag in tags if tag in reported}
    if terms.unreported is _Unreported.UNKNOWN:
        raise RolloutError("it does not report what memory it has released")
    if terms.moving is None:
        return expected
    after = set(released_in(next_phase(terms.phase, terms.moving, traits), tags))
    moved = [tag for tag in tags if tag in expected ^ after]
    await redo(member, moved, is_release=terms.moving is Command.RELEASE_MEMORY_OCCUPATION)
    return after
