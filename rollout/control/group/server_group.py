"""Engines with equal settings and one common lifecycle.

Always true:
- the group is in one phase, and a command runs on all its engines (``command_runner``);
- an engine that fails a command is fenced and its process killed, so that it neither serves nor
  holds memory that the trainer is about to use;
- what each engine has released is recorded per memory tag, and nothing is released or resumed
  twice: SGLang crashes on that;
- no engine generates with memory released, or with changed weights that were not verified;
- a release returns only after fenced engines are known to be gone.

``ServerGroup`` does not depend on Ray; every method is a coroutine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from engines.launch import EngineLauncher, RunningEngine
from engines.protocol.plain_text import describe
from rollout.config import Drain
from rollout.control.engine.catch_up import bring_to_phase
from rollout.control.engine.drafts import read_drafts
from rollout.control.engine.drain import flush, pause
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.memory import KV_TAGS, WEIGHTS_TAGS, EngineMemory, why_no_room
from rollout.control.engine.probe import Probe, check_expected
from rollout.control.engine.start import Connect, Starter, connect_http
from rollout.control.engine.state import EngineState
from rollout.control.engine.stop import log_tail
from rollout.control.group.adapters import GroupAdapters
from rollout.control.group.command_runner import CommandRunner, left_until, now
from rollout.control.group.engine_boots import EngineBoots
from rollout.control.group.engine_recovery import (
    EngineRecovery,
    LostState,
    adopt_running_engines,
    check_any_restored,
)
from rollout.control.group.engine_set import EngineSet, as_failure
from rollout.control.group.health_probe import GroupProbe, probe_all
from rollout.control.group.push_path_check import PushPathCheck, check_snapshots, take_snapshot
from rollout.control.group.scaling import EngineScaling
from rollout.control.group.verify import (
    check_equal_weights,
    collect_fingerprints,
    verify_group,
    why_no_engine_holds,
)
from rollout.control.group.weight_update import WeightUpdater
from rollout.control.group.weight_watch import WeightWatch
from rollout.core.errors import EngineFailure, LifecycleError, RolloutError
from rollout.core.fanout import EngineReply, fan_out, run_to_completion
from rollout.core.types import EngineReport, EngineSlot, EngineStatus, GroupStatus, PhaseReport
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import Cursor, Excerpt, Kind
from rollout.rules import lifecycle
from rollout.rules.deadlines import leave_timeout_s
from rollout.rules.fingerprint_check import Verification
from rollout.rules.health import PROBE_KINDS
from rollout.rules.lifecycle import STAGE, Command, Phase
from rollout.rules.release_policy import elastic_backup_note, group_traits, release_policy
from rollout.weights.push.weight_push import WeightPush

logger = logging.getLogger(__name__)

_RESUMED_BY = {Command.ONLOAD_WEIGHTS: WEIGHTS_TAGS, Command.ONLOAD_KV: KV_TAGS}

# Of a command's time, which waits half of it for what the group does.
_SHARE_OF_CHECK = 0.25


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
            timeline: records the commands; None records in memory.

        Raises:
            ConfigError: an offload would lose weights that nothing restores.
        """
        self.name = settings.name
        self.timeline = timeline or Timeline(settings.source)
        self._settings = settings
        if note := elastic_backup_note(settings.path, settings.group, settings.update):
            logger.warning("%s", note)
        terms = settings.path, settings.group, settings.update, settings.not_pushed
        self._policy = release_policy(*terms)
        self._traits = group_traits(*terms)
        self._slots = {slot.engine_id: slot for slot in slots}
        self._probe = Probe(settings)
        self._starter = self._make_starter(launcher, connect)
        self._engines = EngineSet(settings, slots, self._starter)
        self._commands = CommandRunner(settings, self._traits, self._engines, self.timeline)
        self._memory = EngineMemory(self._policy, settings.model_path)
        self._weight_updater = WeightUpdater(settings, self._engines)
        self._adapters = GroupAdapters(settings, self._engines, self._probe)
        self._path_check = PushPathCheck(settings, self._engines, self._weight_updater)
        self._recovery = EngineRecovery(
            self._engines,
            self._commands,
            settings.all_sources(),
            self._probe,
            self._adapters,
            is_attached=settings.group.engine.is_attached,
        )
        self._boots = EngineBoots(
            self._engines,
            self._starter,
            self._memory,
            settings.health,
            is_attached=settings.group.engine.is_attached,
            is_on_gpus=settings.group.engine.gpus > 0,
        )
        self._weight_watch = WeightWatch(
            self._engines,
            self._commands,
            self._probe,
            self._recovery.exclusive,
            settings.lifecycle.command_timeout_s * _SHARE_OF_CHECK,
        )
        self._scaling = EngineScaling(
            settings, self._engines, self._commands, self._memory, self._boots
        )

    def _make_starter(self, launcher: EngineLauncher, connect: Connect | None) -> Starter:
        backup = self._policy.weights_cpu_backup
        return Starter(
            self._settings,
            launcher,
            connect or _over_http(self._settings, backup),
            probe=self._probe,
            memory_saver=self._traits.needs_offload,
            weights_cpu_backup=backup,
        )

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> GroupStatus:
        """Launch all engines and check their features.

        Raises:
            PhaseFailed: an engine did not start; those that did are stopped again.
            WeightMismatch: so are attached ones of one version whose weights differ.
        """
        with self.timeline.span(Kind.GROUP, "start"):
            try:
                if self._settings.group.standby and self._settings.group.engine.gpus:
                    await self._boots.stand_by_first()
                await self._engines.start()
                if self._settings.group.engine.is_attached:
                    check_equal_weights(self._engines)
            except BaseException:
                await self._boots.end()
                if len(self._engines):
                    await self._engines.stop()
                raise
            self._commands.phase = Phase.SERVING
        return await self.status()

    async def take_over(
        self, lost: LostState, processes: Mapping[str, RunningEngine]
    ) -> GroupStatus:
        """Continue from the phase of a lost group, with the engines that confirm it.

        Args:
            processes: the running process of each engine and standby, by its name.
        """
        budget_s = 2 * self._settings.health.probe_timeout_s
        await adopt_running_engines(
            self._engines,
            self._boots,
            self._starter,
            self._slots,
            processes,
            lost,
            self._policy.tags if self._traits.needs_offload else (),
            self._traits,
            budget_s,
        )
        self._commands.phase = lost.phase
        if lifecycle.must_finish(lost.unfinished):
            assert lost.unfinished is not None
            try:
                await self.run(lost.unfinished)
            except RolloutError as error:  # the command is called again, and fails with the reason
                logger.error("group %s: %s", self.name, describe(error))
        return await self.status()

    async def stop(self) -> None:
        """Stop all engines within ``STOP_TIMEOUT_S``, then kill the rest."""
        with self.timeline.span(Kind.GROUP, "stop"):
            try:
                await self._weight_watch.aclose()
                await self._boots.close()
            finally:
                await self._engines.stop()
        await self.timeline.aclose()

    # -- the lifecycle ----------------------------------------------------------------------

    async def run(
        self,
        command: Command,
        order: int | None = None,
        *,
        push: WeightPush | None = None,
        version: int | None = None,
        budget_s: float | None = None,
    ) -> PhaseReport:
        """Run one command of the lifecycle on every engine that is not fenced.

        Ends after all engines have replied, even if the caller has given up.

        Args:
            order: number of the command; one older than the last is refused.
            push: the new weights, for ``update_weights``; without it, engines get those of
                ``version`` from a weight source.
            version: the weight version the engines must hold, for ``verify`` and ``snapshot``.
            budget_s: the rest of the phase of the server, in which all engines must have replied,
                or None for as long as the settings say, without a server.

        Raises:
            LifecycleError: the command is not legal now, and no engine was called; or an engine
                refuses a snapshot.
            PhaseFailed: too few engines remain, or one failed and ``on_failure`` is ``raise``; or
                the command before it still runs, and no engine was called.
            WeightsUnavailable: no engine got its weights, and none failed.
        """
        if budget_s is None:
            budget_s = lifecycle.budget_s(command, self._settings.lifecycle)
        async with self._commands.in_order(order, command, budget_s) as ends_s:
            started = now()
            if lifecycle.is_repeat(self._commands.phase, command):
                report = self._commands.report(command, {}, started)
            else:
                why_not = self._why_not(command, version) or await why_no_room(
                    _RESUMED_BY.get(command, ()), self._engines.unfenced()
                )
                target = self._commands.target(command, why_not)
                if command is Command.UPDATE_WEIGHTS and push is not None and push.checks_path:
                    work = self._check_path(push, target, ends_s, started)
                elif command is Command.UPDATE_WEIGHTS and push is not None:
                    answers = await self._update_weights(push, ends_s)
                    work = self._commands.conclude(command, target, answers, started)
                else:
                    work = self._carry_out(command, version, ends_s, target, started)
                # Not cancellable: the group would not know the phase of its engines.
                report = await run_to_completion(work)
            if command is Command.RELEASE_MEMORY_OCCUPATION:
                await self._boots.end(keeps_asleep=True)
        if command is Command.RELEASE_MEMORY_OCCUPATION:
            await self._engines.confirm_gone()
        return report

    def _why_not(self, command: Command, version: int | None) -> str:
        """Why ``command`` cannot run although the table allows it."""
        engines = self._engines.unfenced()
        match command:
            case Command.UPDATE_WEIGHTS:
                return next(filter(None, (engine.why_cannot_update() for engine in engines)), "")
            case Command.SNAPSHOT:
                return self._path_check.why_not(version)
            case Command.VERIFY:
                return why_no_engine_holds(version, self._engines)
            case Command.CONTINUE_GENERATION:
                return next(filter(None, (engine.why_cannot_serve() for engine in engines)), "")
        return ""

    async def _carry_out(
        self,
        command: Command,
        version: int | None,
        ends_s: float,
        target: Phase,
        started: float,
    ) -> PhaseReport:
        # The log-prob check needs an engine that generates.  If one engine needs it, all run it.
        with_check = self._probe.any_pending(self._engines.unfenced())
        work: dict[Command, Callable[[EngineState], Awaitable[Any]]] = {
            Command.PAUSE_GENERATION: partial(self._pause, ends_s=ends_s),
            Command.FLUSH_CACHE: partial(self._flush, ends_s=ends_s),
            Command.RELEASE_MEMORY_OCCUPATION: self._memory.release,
            Command.ONLOAD_WEIGHTS: self._memory.onload_weights,
            Command.SNAPSHOT: take_snapshot,
            Command.UPDATE_WEIGHTS: partial(self._restore, version=version),
            Command.VERIFY: partial(collect_fingerprints, version=version),
            Command.ONLOAD_KV: self._memory.onload_kv,
            Command.CONTINUE_GENERATION: partial(self._continue, with_check=with_check),
        }
        answers = await fan_out(
            {
                member.engine_id: partial(work[command], member)
                for member in self._engines.unfenced()
            },
            operation=command.value,
            budget_s=left_until(ends_s),
        )
        if len(self._engines):  # it was not stopped meanwhile
            if command is Command.SNAPSHOT:
                check_snapshots(answers, self.name)
            elif command is Command.UPDATE_WEIGHTS:
                check_any_restored(answers, self.name)
            elif command is Command.VERIFY:
                answers = verify_group(answers, self._engines, self._probe)
            elif command is Command.CONTINUE_GENERATION:
                answers = self._probe.verify_replies(answers, self._engines.members())
        return await self._commands.conclude(command, target, answers, started)

    async def _pause(self, member: EngineState, ends_s: float) -> None:
        await pause(member, self._drain_of(member), left_until(ends_s))

    async def _flush(self, member: EngineState, ends_s: float) -> None:
        await flush(member, self._drain_of(member), left_until(ends_s))

    def _drain_of(self, member: EngineState) -> Drain:
        drain = self._settings.lifecycle.drain
        if drain is Drain.RETRACT and self._probe.is_only_check_for(member):
            return Drain.ABORT  # retracted requests would continue before the log-prob check
        return drain

    async def _update_weights(
        self, push: WeightPush, ends_s: float
    ) -> dict[str, EngineReply[None]]:
        self._check_canary(push)
        return await self._weight_updater.push(push, left_until(ends_s))

    async def _check_path(
        self, push: WeightPush, target: Phase, ends_s: float, started: float
    ) -> PhaseReport:
        """After half of it the weights are random, and at its end those that differ are fenced."""
        self._check_canary(push)
        answers = await self._path_check.run(push, ends_s)
        return await self._commands.conclude(Command.UPDATE_WEIGHTS, target, answers, started)

    def _check_canary(self, push: WeightPush) -> None:
        if push.canary and self._probe.prompts:
            check_expected(push.canary, self._probe.prompts)

    async def _restore(self, member: EngineState, version: int | None) -> None:
        assert version is not None, "update_weights needs a push or a version"
        await self._recovery.restore(member, version)

    async def _continue(self, member: EngineState, *, with_check: bool) -> Verification | None:
        if member.drafts is not None:
            await read_drafts([member])
            member.drafts.begin(member.weight_version)
        await member.continue_generation()
        if member.is_stale:
            return None
        return await self._probe.check(member, with_logprobs=with_check)

    # -- adapters, while the engines serve --------------------------------------------------

    async def stage_adapter(self, push: WeightPush) -> PhaseReport:
        """Load a version of an adapter into all engines that serve, and verify it; or into none.

        Raises what ``GroupAdapters.stage`` raises.
        """
        async with self._commands.in_order(None, STAGE, self._settings.lifecycle.update_timeout_s):
            started = now()
            answers = await run_to_completion(self._adapters.stage(push))
            return self._commands.report(STAGE, answers, started)

    async def unload_adapters(self, names: Sequence[str]) -> bool:
        """Unload versions that nothing uses; whether the engines serve, so that they could."""
        budget_s = self._settings.lifecycle.update_timeout_s
        async with self._commands.in_order(None, "unload_adapters", budget_s):
            if serves := self._commands.phase is Phase.SERVING:
                await run_to_completion(self._adapters.unload(names))
            return serves

    async def know_adapters(self, pushes: Sequence[WeightPush]) -> None:
        """These are on the engines of the lost group that this one replaces."""
        self._adapters.know(pushes)

    # -- status -----------------------------------------------------------------------------

    async def status(self) -> GroupStatus:
        """The recorded state of the group and its engines; calls no engine."""
        phase = self._commands.phase.value
        engines, asleep = await asyncio.gather(
            asyncio.gather(*(self._status_of(member, phase) for member in self._engines.members())),
            asyncio.gather(*(sleeper.status("asleep") for sleeper in self._boots.sleeping())),
        )
        return GroupStatus(
            name=self.name,
            worker_type=self._settings.group.worker_type,
            phase=phase,
            needs_offload=self._traits.needs_offload,
            engines=tuple(engines),
            vacant_slots=tuple(self._engines.vacant),
            kind=self._settings.group.engine.kind.value,
            asleep=tuple(asleep),
            python=self._settings.group.engine.python,
        )

    async def _status_of(self, member: EngineState, phase: str) -> EngineStatus:
        status = await member.status(phase)
        if member.fence_reason and member.engine_id in self._boots:
            return replace(status, state="booting")
        if self._settings.group.standby and not member.fence_reason:
            return replace(status, standby=self._boots.standby_state(member.engine_id))
        return status

    async def pushed_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the tensors of the last push, also if they came with its stream."""
        return self._weight_updater.fingerprints

    async def recorded(self, cursor: Cursor) -> Excerpt:
        """The timeline since ``cursor``, and the open spans."""
        return self.timeline.since(cursor)

    async def log_tail(self, engine_id: str, num_lines: int = 20) -> str:
        """The last lines of an engine's log."""
        return await log_tail(self._engines[engine_id].process, num_lines)

    # -- remove and add engines -------------------------------------------------------------

    async def remove(self, engine_id: str) -> EngineReport:
        """Drain an engine that is out of routing, free its memory, and vacate its slot.

        Raises what ``RolloutServer.remove_engine`` raises.
        """
        budget_s = leave_timeout_s(self._settings.lifecycle)
        async with self._commands.in_order(None, "remove", budget_s):
            return await self._scaling.remove(engine_id)

    async def add(self, engine_id: str, version: int) -> EngineStatus:
        """Fill a vacant slot; bring the engine to this phase and, if possible, to ``version``.

        Raises what ``RolloutServer.add_engine`` raises.
        """
        async with self._recovery.exclusive():
            started = now()
            member = await self._scaling.add(engine_id)
            try:
                await self._recovery.readmit(engine_id, version)
            except BaseException as error:  # it is in the group, and its weights are unknown
                cause = error if isinstance(error, Exception) else TimeoutError("it was cut off")
                failure = as_failure(cause, engine_id, "add", started)
                was_stopped = self._engines.get(engine_id) is None  # its group, meanwhile
                if not was_stopped:
                    await self._engines.fence([failure])
                if cause is not error:
                    raise
                if was_stopped:
                    why = f"engine {engine_id}: its group was stopped meanwhile"
                    raise LifecycleError(why, command="engines.add") from error
                raise failure from error
            return await member.status(self._commands.phase.value)

    # -- recovery ---------------------------------------------------------------------------

    async def probe(self, budget_s: float, distrusted: Sequence[str] = ()) -> GroupProbe:
        """Probe all engines, with the kind of probe for this phase.  Standbys that are missing
        begin to boot.

        Args:
            distrusted: engines whose weight version is checked too, as that of attached engines
                always is.
        """
        if self._settings.group.standby:
            await self._boots.tend_standbys(self._may_boot_standbys)
        commands, kind = self._commands, PROBE_KINDS[self._commands.phase]
        num_commands, had_command = commands.num_commands, self._recovery.is_command_running()
        members, is_attached = self._engines.members(), self._settings.group.engine.is_attached
        if is_attached:
            distrusted = [member.engine_id for member in members]
        probes = await probe_all(members, kind, budget_s, distrusted)
        if commands.phase is Phase.SERVING:
            await read_drafts(member for member in members if not member.fence_reason)
        if is_attached:
            probes = self._weight_watch.watch(probes)
        is_steady = num_commands == commands.num_commands and not had_command
        return GroupProbe(is_steady, probes, self._boots.standbys())

    def _may_boot_standbys(self) -> bool:
        return self._commands.phase is Phase.SERVING and not self._commands.turn.locked()

    async def fence(self, engine_id: str, reason: str) -> None:
        """Fence an engine and end its process, also while a command hangs on it.

        An engine that is already fenced only gets the new reason.
        """
        with self.timeline.span(Kind.GROUP, "fence", engine_id=engine_id):
            member = self._engines[engine_id]
            if member.fence_reason:
                member.fence_reason = reason
                return
            failure = EngineFailure(reason, engine_id=engine_id, operation="fence")
            await self._engines.fence([failure])

    async def boot(self, engine_id: str, *, memory_is_free: bool = False) -> bool:
        """Start an engine on the slot of a fenced one or on a vacant one, unless one sleeps there.

        It starts beside the commands; ``admit`` or ``add`` lets it join the others.

        Args:
            memory_is_free: the trainer has freed the memory that the group has released.

        Returns:
            Whether it has booted; otherwise the trainer needs the memory.

        Raises:
            EngineFailure: the old engine may still run, or the new one did not start.
        """
        is_lent = self._commands.phase is Phase.OFFLOADED and self._traits.needs_offload
        is_lent &= not memory_is_free
        if is_lent and engine_id not in self._boots.standbys():
            return False
        with self.timeline.span(Kind.ENGINE, "boot", engine_id=engine_id):
            return await self._boots.boot(engine_id, is_lent=is_lent)

    async def end_boot(self, engine_id: str) -> None:
        """End an engine that boots or has booted there, and that nothing will let join."""
        await self._boots.end([engine_id], keeps_asleep=True)

    async def admit(self, engine_id: str) -> bool:
        """Bring an engine that has booted to this phase; it joins the others, and is stale.

        Returns:
            Whether it has joined; otherwise its boot was ended before.
        """
        async with self._recovery.exclusive():
            member = self._boots.take(engine_id)
            if member is None:
                return False
            with self.timeline.span(Kind.ENGINE, "admit", engine_id=engine_id):
                catch_up = partial(bring_to_phase, phase=self._commands.phase, memory=self._memory)
                await self._engines.join(member, catch_up, "admit")
            self.timeline.event("restarted", engine_id=engine_id)
            return True

    async def why_cannot_restore(self, version: int) -> str:
        """Why no weight source could give its engines ``version``."""
        return await self._recovery.why_cannot_restore(version)

    async def readmit(self, engine_id: str, version: int) -> bool:
        """Let a stale engine serve if it holds ``version`` or a source can restore it.

        Returns:
            Whether it serves now.

        Raises:
            WeightMismatch: it does not hold the weights that it reports.
        """
        async with self._recovery.exclusive():
            with self.timeline.span(Kind.ENGINE, "readmit", engine_id=engine_id):
                serves = await self._recovery.readmit(engine_id, version)
            if serves:
                self.timeline.event("readmitted", f"at version {version}", engine_id=engine_id)
            return serves


def _over_http(settings: GroupSettings, weights_cpu_backup: bool) -> Connect:
    return connect_http(
        settings.lifecycle,
        settings.health,
        settings.group.engine.kind,
        weights_cpu_backup=weights_cpu_backup,
    )


__all__ = ["GroupSettings", "ServerGroup"]
