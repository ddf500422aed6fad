"""Engines alike in every setting, and the one lifecycle they go through together.

Always true:
- the group is in one phase, and a command is carried out on all its engines (``group_commands``);
- an engine that fails a command is fenced and its process killed, so that it can neither serve
  nor hold memory the trainer is about to use;
- what each engine has released is recorded per memory tag, and nothing is released or resumed
  twice: SGLang dies of that;
- no engine generates with memory released, or with weights that changed and were not verified;
- a release says that it is done only when fenced engines are known to be gone.

``ServerGroup`` knows nothing of Ray; every method is a coroutine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from engines.launch import EngineLauncher, RunningEngine
from engines.protocol import MemoryTag
from rollout.config import Drain
from rollout.draining import flush, pause
from rollout.ending import log_tail
from rollout.errors import EngineFailure
from rollout.fanout import describe, finish
from rollout.group_commands import GroupCommands, now
from rollout.group_settings import GroupSettings
from rollout.hearing import Hearing, check_expected
from rollout.lending import Lending
from rollout.lifecycle import Command, Phase
from rollout.member import Member
from rollout.memory import release, resume, size_of_weights
from rollout.mending import Mending
from rollout.peers import PeerSource
from rollout.policy import elastic_backup_note, group_traits, release_policy
from rollout.proving import compare, reached_nobody, testify
from rollout.roster import Roster
from rollout.starting import Connect, Starter, connect_http
from rollout.taking_over import take_over
from rollout.timeline.recorder import Timeline
from rollout.timeline.span import Excerpt, Kind
from rollout.types import EngineReport, EngineSlot, EngineStatus, GroupStatus, PhaseReport
from rollout.updating import Updating
from rollout.verification import Proof
from rollout.watching import GroupProbe
from rollout.weights.push import WeightPush
from rollout.weights.source import WeightSource

logger = logging.getLogger(__name__)


class ServerGroup:
    """One lifecycle over several engines."""

    def __init__(
        self,
        settings: GroupSettings,
        slots: Sequence[EngineSlot],
        launcher: EngineLauncher,
        connect: Connect | None = None,
        *,
        timeline: Timeline | None = None,
    ) -> None:
        """Decide the release policy; nothing is started.

        Args:
            timeline: where what happens is recorded; one in memory if left out.

        Raises:
            ConfigError: the group would lose weights on an offload that nothing brings back.
        """
        self.name = settings.name
        self.timeline = timeline or Timeline(settings.source)
        self._settings = settings
        if note := elastic_backup_note(settings.path, settings.group, settings.update):
            logger.warning("%s", note)
        self._policy = release_policy(settings.path, settings.group, settings.update)
        self._traits = group_traits(settings.path, settings.group, settings.update)
        self._slots = {slot.engine_id: slot for slot in slots}
        self._hearing = Hearing(settings)
        starter = self._starter = Starter(
            settings,
            launcher,
            connect or connect_http(settings.lifecycle, settings.health),
            hearing=self._hearing,
            memory_saver=self._traits.needs_offload,
            weights_cpu_backup=self._policy.weights_cpu_backup,
        )
        self._roster = Roster(settings, slots, starter)
        self._commands = GroupCommands(settings, self._traits, self._roster, self.timeline)
        self._checkpoint_bytes = size_of_weights(settings.model_path)
        self._updating = Updating(settings, self._roster)
        self._mending = Mending(
            self._roster,
            self._commands,
            self._policy.tags if self._traits.needs_offload else (),
            self._sources(),
            self._hearing,
        )
        self._lending = Lending(
            settings, self._roster, self._commands, self._policy, self._checkpoint_bytes
        )

    def _sources(self) -> tuple[WeightSource, ...]:
        settings = self._settings
        peers = (PeerSource(self._roster.unfenced),) if settings.health.weights_from_peers else ()
        # Under an adapter a base of its own version is wanted, which no peer says it has.
        adapters = self._updating.adapters.over(settings.all_sources())
        return (*settings.all_sources(*peers), adapters)

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> GroupStatus:
        """Launch all engines and check that they are what the configuration needs.

        Raises:
            PhaseFailed: an engine did not start; the ones that did are stopped again.
        """
        with self.timeline.span(Kind.GROUP, "start"):
            await self._roster.start()
        return await self.status()

    async def take_over(
        self, known: GroupStatus, processes: Mapping[str, RunningEngine], version: int | None
    ) -> GroupStatus:
        """Begin where a group that was lost has left off, with its engines.

        Args:
            known: the lost group as it was known last, in the phase it had reached for certain.
            processes: what each of its engines runs as.
            version: the weight version they must hold to be taken over as they are; None ends
                them all, to be started again.
        """
        budget_s = 2 * self._settings.health.probe_timeout_s
        await take_over(
            self._roster, self._starter, self._slots, known, processes, version, budget_s
        )
        self._commands.phase = Phase(known.phase)
        return await self.status()

    async def stop(self) -> None:
        """End all engines: a bounded polite try, then the kill."""
        with self.timeline.span(Kind.GROUP, "stop"):
            await self._roster.stop()
        await self.timeline.aclose()

    # -- the lifecycle, in the order of a step ----------------------------------------------

    async def pause(self, order: int | None = None) -> PhaseReport:
        """Stop all generation; what becomes of requests in flight is ``lifecycle.drain``."""
        budget_s = self._settings.lifecycle.pause_timeout_s

        async def stop_generating(member: Member) -> None:
            await pause(member, self._drain_of(member), budget_s)

        return await self._commands.command(Command.PAUSE, stop_generating, budget_s, order)

    async def flush(self, order: int | None = None) -> PhaseReport:
        """Wait, inside each engine, until nothing is in flight, and drop its prefix cache."""
        budget_s = self._settings.lifecycle.flush_timeout_s

        async def empty(member: Member) -> None:
            await flush(member, self._drain_of(member), budget_s)

        return await self._commands.command(Command.FLUSH, empty, budget_s, order)

    def _drain_of(self, member: Member) -> Drain:
        drain = self._settings.lifecycle.drain
        if drain is Drain.RETRACT and self._hearing.alone_proves(member):
            return Drain.ABORT  # what is retracted would go on before a canary can be asked
        return drain

    async def release(self, order: int | None = None) -> PhaseReport:
        """Give the memory back, and measure that it came free."""

        async def give_back(member: Member) -> int:
            return await release(member, self._policy, self._checkpoint_bytes)

        report = await self._commands.command(
            Command.RELEASE, give_back, self._settings.lifecycle.release_timeout_s, order
        )
        await self._roster.confirm_gone()
        return report

    async def resume_weights(self, order: int | None = None) -> PhaseReport:
        """Take the memory of the weights back; its contents are not trusted yet."""
        return await self._resume(Command.RESUME_WEIGHTS, (MemoryTag.WEIGHTS,), order)

    async def update_weights(self, push: WeightPush, order: int | None = None) -> PhaseReport:
        """Give every engine the new weights."""
        budget_s = self._settings.lifecycle.update_timeout_s
        async with self._commands.in_turn(order, Command.UPDATE_WEIGHTS, budget_s):
            return await self._update_weights(push)

    async def _update_weights(self, push: WeightPush) -> PhaseReport:
        command, started = Command.UPDATE_WEIGHTS, now()
        why_not = next(filter(None, (one.without_weights() for one in self._roster.unfenced())), "")
        target = self._commands.target(command, why_not)
        if push.canary and self._hearing.prompts:
            check_expected(push.canary, self._hearing.prompts)
        answers = await self._updating.push(push)
        return await finish(self._commands.conclude(command, target, answers, started))

    async def verify(self, version: int, order: int | None = None) -> PhaseReport:
        """Prove that every engine holds ``version``: it says so, and its weights do.

        The fingerprints of what must not have changed are compared with the engine's own, those
        of what was pushed with the other engines'.
        """

        async def ask(member: Member) -> Proof | None:
            return await testify(member, version)

        return await self._commands.command(
            Command.VERIFY,
            ask,
            self._settings.lifecycle.verify_timeout_s,
            order,
            why_not=lambda: reached_nobody(version, self._roster),
            review=lambda answers: compare(answers, self._roster, self._hearing),
        )

    async def resume_kv(self, order: int | None = None) -> PhaseReport:
        """Take the memory of KV cache and CUDA graphs back."""
        return await self._resume(
            Command.RESUME_KV, (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH), order
        )

    async def continue_generation(self, order: int | None = None) -> PhaseReport:
        """Let the engines generate again; the gate is still shut.

        Only now can they tell a canary, and those do of whom the fingerprints left something open.
        """
        is_due = self._hearing.is_due(self._roster.unfenced())

        async def go_on(member: Member) -> Proof | None:
            await member.engine.continue_generation()
            return await self._hearing.prove(member) if is_due and not member.is_stale else None

        return await self._commands.command(
            Command.CONTINUE,
            go_on,
            self._settings.lifecycle.continue_timeout_s,
            order,
            why_not=self._unfit_to_serve,
            review=lambda answers: self._hearing.review(answers, self._roster.members()),
        )

    def _unfit_to_serve(self) -> str:
        return next(filter(None, (one.unfit_to_serve() for one in self._roster.unfenced())), "")

    async def _resume(
        self, command: Command, tags: Sequence[MemoryTag], order: int | None
    ) -> PhaseReport:
        async def take_back(member: Member) -> None:
            await resume(member, tags)

        return await self._commands.command(
            command, take_back, self._settings.lifecycle.resume_timeout_s, order
        )

    # -- looking ----------------------------------------------------------------------------

    async def status(self) -> GroupStatus:
        """The group and its engines as they are known here; asks no engine anything."""
        phase = self._commands.phase.value
        engines = [
            member.status(phase, await member.process.resident_bytes())
            for member in self._roster.members()
        ]
        return GroupStatus(
            name=self.name,
            worker_type=self._settings.group.worker_type,
            phase=phase,
            needs_offload=self._traits.needs_offload,
            engines=tuple(engines),
            lent=self._roster.lent(),
        )

    async def recorded(self, cursor: int) -> Excerpt:
        """What has happened since ``cursor``, and what runs."""
        return self.timeline.since(cursor)

    async def log_tail(self, engine_id: str) -> str:
        """The end of an engine's log, for people."""
        return await log_tail(self._roster[engine_id].process)

    # -- leaving and coming back ------------------------------------------------------------

    async def remove(self, engine_id: str, keep_process: bool) -> EngineReport:
        """Empty an engine that gets no requests any more, free its memory, give its place away.

        Raises:
            EngineFailure: it could not be emptied, or its memory did not come free; it is fenced.
        """
        budgets = self._settings.lifecycle
        budget_s = budgets.pause_timeout_s + budgets.flush_timeout_s + budgets.release_timeout_s
        async with self._commands.in_turn(None, "remove", budget_s):
            return await self._lending.remove(engine_id, keep_process=keep_process)

    async def add(self, engine_id: str, version: int) -> EngineStatus:
        """Take a place back; its engine is led to this phase and, if it can be, to ``version``.

        Raises:
            LifecycleError: no such place is free, or its memory is the trainer's now.
            EngineFailure: it did not start or wake, and its place is free; or it does not hold
                the weights that it says it holds, and it is fenced.
        """
        async with self._mending.going_on():
            member = await self._lending.add(engine_id, self._mending.tags)
            try:
                await self._mending.adopt(engine_id, version)
            except Exception as error:  # it is in the group, and nobody knows what it holds
                failure = EngineFailure(
                    f"engine {engine_id}: add failed: {describe(error)}",
                    engine_id=engine_id,
                    operation="add",
                )
                await self._roster.fence([failure])
                raise failure from error
            return member.status(self._commands.phase.value, await member.process.resident_bytes())

    # -- failing and coming back ------------------------------------------------------------

    async def probe(self, budget_s: float, distrusted: Sequence[str] = ()) -> GroupProbe:
        """Look at all engines, in the way that makes sense in this phase."""
        return await self._mending.probe(self._commands.phase, budget_s, distrusted)

    async def fence(self, engine_id: str, reason: str) -> None:
        """Take an engine out of everything and end its process, also while a command hangs on it.

        One that is fenced already only gets the new reason.
        """
        with self.timeline.span(Kind.GROUP, "fence", engine_id=engine_id):
            await self._mending.fence(engine_id, reason)

    async def restart(self, engine_id: str) -> None:
        """Start a fenced engine again in its place and lead it to this phase; it is stale then.

        Raises:
            EngineFailure: what was there may not be gone, or it did not start; it stays fenced.
        """
        async with self._mending.going_on():
            with self.timeline.span(Kind.ENGINE, "restart", engine_id=engine_id):
                await self._mending.restart(engine_id, self._commands.phase)
            self.timeline.event("restarted", engine_id=engine_id)

    async def adopt(self, engine_id: str, version: int) -> bool:
        """Let a stale engine serve again if it holds ``version`` or can be given it; True if so.

        Raises:
            WeightMismatch: it says that it holds them, and does not.
        """
        async with self._mending.going_on():
            with self.timeline.span(Kind.ENGINE, "adopt", engine_id=engine_id):
                serves = await self._mending.adopt(engine_id, version)
            if serves:
                self.timeline.event("adopted", f"at version {version}", engine_id=engine_id)
            return serves


__all__ = ["GroupSettings", "ServerGroup"]
