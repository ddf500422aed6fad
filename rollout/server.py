"""RolloutServer: one model, its groups behind one router, one method per lifecycle command.

Always true:
- a phase begins only after the one before it has ended on every group that takes part;
- the gate is shut before the first engine is paused, and opens only after every group serves
  again at the published weight version.  A command that fails leaves it shut, and says why to
  whoever knocks; there is no ``finally`` that opens it;
- one command runs at a time; a command that is repeated does nothing twice.

A group and the router are *ports* here: plain objects in this process, or handles of Ray actors
whose methods return ObjectRefs.  Both are awaited alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from engines.protocol import Endpoint, WorkerType
from rollout import lifecycle
from rollout.config import ServerConfig, WeightUpdate
from rollout.errors import LifecycleError, WeightMismatch
from rollout.fanout import barrier, describe
from rollout.health import Verdict
from rollout.lifecycle import OFFLOAD, SERVE, Command, Phase, server_phase
from rollout.lock import CommandLock
from rollout.policy import group_traits
from rollout.recovery import FailureSource, GroupTerms, RecoverableGroup, Recovery
from rollout.routing import Member, MemberState
from rollout.types import EngineStatus, GroupStatus, PhaseReport, ServerStatus, StepReport
from rollout.weights.manifest import Manifest, check_push, read_checkpoint_manifest
from rollout.weights.push import WeightPush

logger = logging.getLogger(__name__)

# A group bounds every engine call itself; past this much more, the group itself is lost.
_GROUP_MARGIN_S = 30.0
_LOOK_TIMEOUT_S = 15.0


class GroupPort(RecoverableGroup, Protocol):
    """A ``ServerGroup``, here or in an actor.  Every method starts its work at once."""

    def start(self) -> Awaitable[GroupStatus]: ...
    def stop(self) -> Awaitable[None]: ...
    def pause(self, order: int) -> Awaitable[PhaseReport]: ...
    def flush(self, order: int) -> Awaitable[PhaseReport]: ...
    def release(self, order: int) -> Awaitable[PhaseReport]: ...
    def resume_weights(self, order: int) -> Awaitable[PhaseReport]: ...
    def update_weights(self, push: WeightPush, order: int) -> Awaitable[PhaseReport]: ...
    def verify(self, version: int, order: int) -> Awaitable[PhaseReport]: ...
    def resume_kv(self, order: int) -> Awaitable[PhaseReport]: ...
    def continue_generation(self, order: int) -> Awaitable[PhaseReport]: ...
    def status(self) -> Awaitable[GroupStatus]: ...


class RouterPort(FailureSource, Protocol):
    """A ``RouterHost``, here or in an actor."""

    def start(self) -> Awaitable[Endpoint]: ...
    def stop(self, budget_s: float) -> Awaitable[None]: ...
    def set_gate(
        self,
        state: str,
        *,
        reason: str = "",
        phase: str = "",
        weight_version: int | None = None,
    ) -> Awaitable[Any]: ...
    def set_members(self, epoch: int, members: list[Member]) -> Awaitable[Any]: ...
    def stats(self) -> Awaitable[dict[str, Any]]: ...


class RolloutServer:
    """The lifecycle of one model's engines, over all its groups."""

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        groups: Mapping[str, GroupPort],
        router: RouterPort,
    ) -> None:
        self.name = name
        self._config = config
        self._groups = dict(groups)
        self._router = router
        self._phases = dict.fromkeys(self._groups, Phase.SERVING)
        self._traits = {
            group: group_traits(
                f"servers.{name}.groups.{group}", config.groups[group], config.weights.update
            )
            for group in self._groups
        }
        self._lock = CommandLock(config.lifecycle.lock_timeout_s)
        self._publishing = asyncio.Lock()
        self._recovery = Recovery(
            name,
            config.health,
            self._groups,
            {group: _terms(config, group) for group in self._groups},
            self,
            router,
            self._lock,
        )
        self._last_known: dict[str, GroupStatus] = {}
        self._order = 0
        self._epoch = 0
        self._weight_version = 0
        self._expected: Manifest | None = None
        self._endpoint: Endpoint | None = None
        self._gate = "closed"
        self._has_failed = False

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> ServerStatus:
        """Start engines and router; the gate opens when all engines are ready.

        If anything fails, what was started is stopped before the error goes on.
        """
        async with self._lock.held("start"):
            try:
                # The router first: a port that is taken is known before engines are loaded.
                self._endpoint = await self._router.start()
                self._expected = await asyncio.to_thread(
                    read_checkpoint_manifest, self._config.model_path
                )
                statuses = await barrier(
                    {name: group.start() for name, group in self._groups.items()}
                )
                self._check_start_versions(statuses)
                await self._open_gate()
                self._recovery.start(
                    {
                        name: [engine.engine_id for engine in status.engines]
                        for name, status in statuses.items()
                    }
                )
            except BaseException:
                await self._stop_all()
                raise
        return await self.status()

    async def stop(self) -> None:
        """Stop router and engines within ``stop_timeout_s``; what is late is killed."""
        await self._stop_all()

    async def _stop_all(self) -> None:
        # No lock: a stop must work while a command hangs.
        self._gate = "closed"
        await self._recovery.stop()
        budget_s = self._config.lifecycle.stop_timeout_s
        parts: dict[str, Awaitable[Any]] = {}
        if self._endpoint is not None:
            parts["router"] = self._router.stop(budget_s)
            self._endpoint = None
        parts |= {name: group.stop() for name, group in self._groups.items()}
        try:
            await barrier(parts)
        except Exception as error:  # who stops wants an end, not an error
            logger.error("server %s: while stopping: %s", self.name, describe(error))

    def _check_start_versions(self, statuses: Mapping[str, GroupStatus]) -> None:
        for status in statuses.values():
            for engine in status.engines:
                if engine.weight_version != self._weight_version:
                    raise WeightMismatch(
                        f"engine {engine.engine_id} starts at weight version "
                        f"{engine.weight_version}, not {self._weight_version}",
                        engine_id=engine.engine_id,
                    )

    # -- the lifecycle, in the order of a step ----------------------------------------------

    async def offload(self) -> StepReport:
        """Give the engines' memory to the trainer: pause, flush, release, each a barrier.

        Returns only after the memory is released; ``freed_bytes`` says how much came free.
        Repeated, or after a failure, it goes on from where each group is.
        """
        async with self._lock.held("offload"):
            return await self._advance(*OFFLOAD)

    async def onload(self, push: WeightPush | None = None) -> StepReport:
        """Take the memory back and serve: weights, update, verify, KV cache, continue, gate.

        Repeated, or after a failure, it goes on from where each group is.

        Args:
            push: new weights; None where all weights survive the release (a frozen model), or
                where they were already updated.
        """
        async with self._lock.held("onload"):
            report = StepReport(weight_version=self._weight_version)
            if push is not None:
                self._check_push(push)
                report = await self._catch_up()
            report = report.merged(await self._advance(Command.RESUME_WEIGHTS))
            if push is not None:
                report = report.merged(await self._update_weights(push))
            return report.merged(await self._advance(*SERVE))

    async def update_and_continue(self, push: WeightPush) -> StepReport:
        """New weights for engines that are not offloaded: pause, flush, update, verify, go on."""
        async with self._lock.held("update_and_continue"):
            self._check_push(push)
            report = await self._advance(Command.PAUSE, Command.FLUSH)
            report = report.merged(await self._update_weights(push))
            return report.merged(await self._advance(*SERVE))

    async def advance(self, command: Command) -> StepReport:
        """One command for the groups that still have it before them, and for no others.

        This is how a transaction over several servers goes on from where each group is.
        """
        async with self._lock.held(command.value):
            return await self._advance(command)

    async def pause_generation(self) -> StepReport:
        """Shut the gate and stop generation on every group."""
        async with self._lock.held("pause_generation"):
            return await self._pause(self._groups)

    async def flush_cache(self) -> StepReport:
        """Wait until no engine has anything in flight, and drop the prefix caches."""
        async with self._lock.held("flush_cache"):
            return await self._flush(self._groups)

    async def release_memory_occupation(self) -> StepReport:
        """Release the memory of the groups that offload."""
        async with self._lock.held("release_memory_occupation"):
            return await self._release(self._offloading())

    async def onload_weights(self) -> StepReport:
        """Take the memory of the weights back; nothing serves yet."""
        async with self._lock.held("onload_weights"):
            return await self._onload_weights(self._offloading())

    async def update_weights(self, push: WeightPush) -> StepReport:
        """Push new weights to every group that is not frozen.

        Raises:
            WeightMismatch: the push does not fit the model; nothing was sent.
        """
        async with self._lock.held("update_weights"):
            return await self._update_weights(push)

    async def verify(self) -> StepReport:
        """Prove that every engine holds the published weight version."""
        async with self._lock.held("verify"):
            return await self._verify(self._unverified())

    async def onload_kv(self) -> StepReport:
        """Take the memory of KV caches and CUDA graphs back."""
        async with self._lock.held("onload_kv"):
            return await self._onload_kv(self._offloading())

    async def continue_generation(self) -> StepReport:
        """Let the engines generate and open the gate."""
        async with self._lock.held("continue_generation"):
            return await self._continue(self._groups)

    # -- looking ----------------------------------------------------------------------------

    async def status(self) -> ServerStatus:
        """Where everything is.  Answers also while a command runs."""
        groups = await self._look_at_groups()
        phase = server_phase(self._phases.values())
        return ServerStatus(
            name=self.name,
            phase=phase.value if phase else "mixed",
            weight_version=self._weight_version,
            router_url=self._endpoint.url if self._endpoint else "",
            gate=self._gate,
            lock_owner=self._lock.owner,
            groups=tuple(groups.values()),
        )

    async def _look_at_groups(self) -> dict[str, GroupStatus]:
        """The status of each group; one that cannot be asked is shown as last known, fenced."""

        async def look(name: str, group: GroupPort) -> GroupStatus:
            try:
                async with asyncio.timeout(_LOOK_TIMEOUT_S):
                    status = await group.status()
            except Exception as error:  # a lost group must not hide the others
                known = self._last_known.get(name)
                if known is None:
                    raise
                return _lost(known, describe(error))
            self._last_known[name] = status
            return status

        return await barrier({name: look(name, one) for name, one in self._groups.items()})

    @property
    def weight_version(self) -> int:
        """The version published last."""
        return self._weight_version

    def phases(self) -> Mapping[str, Phase]:
        """Where each group is."""
        return self._phases

    async def expected_manifest(self) -> Manifest | None:
        """What a full push must contain; None if the checkpoint does not say."""
        return self._expected

    async def _advance(self, *commands: Command) -> StepReport:
        steps = {
            Command.PAUSE: self._pause,
            Command.FLUSH: self._flush,
            Command.RELEASE: self._release,
            Command.RESUME_WEIGHTS: self._onload_weights,
            Command.VERIFY: self._verify,
            Command.RESUME_KV: self._onload_kv,
            Command.CONTINUE: self._continue,
        }
        await self._look_again()
        report = StepReport(weight_version=self._weight_version)
        for command in commands:
            if command is Command.PAUSE:
                lifecycle.check_can_offload(self._phases)
            report = report.merged(await steps[command](self._before(command)))
        return report

    async def _catch_up(self) -> StepReport:
        """Lead groups that a failed offload left behind to where new weights can reach them."""
        report = StepReport(weight_version=self._weight_version)
        if self._gate == "open":
            return report
        await self._look_again()
        for command, step in ((Command.PAUSE, self._pause), (Command.FLUSH, self._flush)):
            if names := self._before(command):
                report = report.merged(await step(names))
        return report

    async def _look_again(self) -> None:
        """After a failure a group may have gone on: a call its caller had given up came late."""
        if self._has_failed:
            for name, status in (await self._look_at_groups()).items():
                self._phases[name] = Phase(status.phase)

    def _before(self, command: Command) -> list[str]:
        """The groups that have ``command`` before them."""
        if command is Command.VERIFY:
            return self._unverified()
        if command is Command.CONTINUE:
            return [name for name, phase in self._phases.items() if phase is not Phase.SERVING]
        if command is Command.RELEASE:
            # Who is offloaded is asked again, and does nothing: a resume that came late after
            # its caller had given up would be known there alone, or is out of date from now on.
            down = (Phase.FLUSHED, Phase.OFFLOADED)
            return [name for name in self._offloading() if self._phases[name] in down]
        return self._concerned(command)

    # -- the phases -------------------------------------------------------------------------

    async def _pause(self, names: Iterable[str]) -> StepReport:
        await self._shut_gate("holding", "the engines are paused for a weight update", "pause")
        return await self._phase(Command.PAUSE, names, lambda group, o: group.pause(o))

    async def _flush(self, names: Iterable[str]) -> StepReport:
        return await self._phase(Command.FLUSH, names, lambda group, o: group.flush(o))

    async def _release(self, names: Iterable[str]) -> StepReport:
        return await self._phase(Command.RELEASE, names, lambda group, o: group.release(o))

    async def _onload_weights(self, names: Iterable[str]) -> StepReport:
        names = list(names)
        # Offloaded, nobody could be started: the memory is ours again only from here on.
        await self._recovery.revive(names)
        return await self._phase(
            Command.RESUME_WEIGHTS, names, lambda group, o: group.resume_weights(o)
        )

    async def _update_weights(self, push: WeightPush) -> StepReport:
        self._check_push(push)
        report = await self._phase(
            Command.UPDATE_WEIGHTS, self._groups, lambda group, o: group.update_weights(push, o)
        )
        self._weight_version = push.version
        return report

    async def _verify(self, names: Iterable[str]) -> StepReport:
        version = self._weight_version
        return await self._phase(Command.VERIFY, names, lambda group, o: group.verify(version, o))

    async def _onload_kv(self, names: Iterable[str]) -> StepReport:
        return await self._phase(Command.RESUME_KV, names, lambda group, o: group.resume_kv(o))

    async def _continue(self, names: Iterable[str]) -> StepReport:
        report = await self._phase(
            Command.CONTINUE, names, lambda group, o: group.continue_generation(o)
        )
        await self._open_gate()
        return report

    async def _phase(
        self,
        command: Command,
        names: Iterable[str],
        call: Callable[[GroupPort, int], Awaitable[PhaseReport]],
    ) -> StepReport:
        self._order += 1
        started = asyncio.get_running_loop().time()
        try:
            reports = await barrier(
                {name: call(self._groups[name], self._order) for name in names},
                operation=command.value,
                budget_s=self._budget_s(command) + _GROUP_MARGIN_S,
            )
        except BaseException as error:  # cancelled, the groups have gone on all the same
            await self._after_failure(command, error)
            raise
        for name, report in reports.items():
            self._phases[name] = Phase(report.phase)
        if any(report.failures for report in reports.values()):
            await self.publish_members()
            self._recovery.look_soon()
        return StepReport(
            phase_s={command.value: asyncio.get_running_loop().time() - started},
            freed_bytes=sum(report.freed_bytes for report in reports.values()),
            weight_version=self._weight_version,
            reports=tuple(reports.values()),
        )

    async def _after_failure(self, command: Command, error: BaseException) -> None:
        """A failed phase leaves the gate shut and says so; groups keep what they reached.

        A command that was refused leaves the gate as it is, but other groups may have obeyed it.
        """
        cancelled = isinstance(error, asyncio.CancelledError)
        reason = f"{command} was cancelled" if cancelled else describe(error)
        before = self._fenced()
        self._has_failed = True
        steps = [self.publish_members]
        if self._gate != "open" and not isinstance(error, LifecycleError):
            steps.insert(0, lambda: self._shut_gate("closed", reason, command.value))
        for step in steps:
            try:
                await step()
            except Exception as more:  # must not hide the failure that is being told
                logger.error("server %s: after a failed %s: %s", self.name, command, describe(more))
        self._phases.update(
            {name: Phase(status.phase) for name, status in self._last_known.items()}
        )
        # The error of one group says nothing of whom another has fenced meanwhile.
        for engine_id, because in self._fenced().items():
            if engine_id not in before and because not in str(error):
                error.add_note(f"also fenced: {because}")
        self._recovery.look_soon()

    def _fenced(self) -> dict[str, str]:
        """Engines known to be fenced, and why."""
        return {
            engine.engine_id: engine.fenced_because
            for status in self._last_known.values()
            for engine in status.engines
            if engine.fenced_because
        }

    def _budget_s(self, command: Command) -> float:
        budgets = self._config.lifecycle
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

    def _offloading(self) -> list[str]:
        return [name for name, one in self._traits.items() if one.needs_offload]

    def _unverified(self) -> list[str]:
        """Groups with something to prove: not those only paused, nor those that have proved it."""
        proved = (Phase.SERVING, Phase.PAUSED, Phase.FLUSHED, Phase.VERIFIED, Phase.KV_ONLOADED)
        return [name for name, phase in self._phases.items() if phase not in proved]

    def _concerned(self, command: Command) -> list[str]:
        return [
            name
            for name, phase in self._phases.items()
            if lifecycle.concerns(phase, command, self._traits[name])
        ]

    def _check_push(self, push: WeightPush) -> None:
        update = self._config.weights.update
        if update is WeightUpdate.FROZEN:
            raise WeightMismatch(f"server {self.name} is frozen: its weights are never updated")
        if push.version <= self._weight_version:
            raise WeightMismatch(
                f"weight version {push.version} is not newer than {self._weight_version}, "
                "which the engines were given last"
            )
        if not push.buckets:
            raise WeightMismatch(f"the push of weight version {push.version} holds no tensors")
        if self._expected is not None:
            check_push(push.manifest, self._expected, must_be_complete=update is WeightUpdate.FULL)

    # -- gate and membership ----------------------------------------------------------------

    async def _open_gate(self) -> None:
        await self.publish_members()
        await self._router.set_gate("open", weight_version=self._weight_version)
        self._gate = "open"
        self._has_failed = False

    async def _shut_gate(self, state: str, reason: str, phase: str) -> None:
        await self._router.set_gate(state, reason=reason, phase=phase)
        self._gate = state

    async def publish_members(self) -> None:
        """Tell the router who serves, as it is now."""
        async with self._publishing:  # or an older view could get a newer epoch
            statuses = await self._look_at_groups()
            out = self._recovery.out_of_routing()
            self._epoch += 1
            await self._router.set_members(
                self._epoch,
                [
                    _member(status.worker_type, engine, out.get(engine.engine_id))
                    for status in statuses.values()
                    for engine in status.engines
                ],
            )
            self._recovery.has_published(out)


def _lost(status: GroupStatus, because: str) -> GroupStatus:
    reason = f"its group cannot be reached: {because}"
    engines = (
        replace(engine, state="fenced", fenced_because=engine.fenced_because or reason)
        for engine in status.engines
    )
    return replace(status, engines=tuple(engines))


def _terms(config: ServerConfig, name: str) -> GroupTerms:
    group = config.groups[name]
    fewest = group.num_engines if config.lifecycle.on_failure == "raise" else 1
    return GroupTerms(
        needs_offload=group.needs_offload,
        min_engines=fewest if group.min_engines is None else group.min_engines,
        has_processes=group.engine.kind != "attached",
        start_timeout_s=group.engine.start_timeout_s,
        adopt_timeout_s=config.lifecycle.update_timeout_s,
    )


def _member(
    worker_type: WorkerType, engine: EngineStatus, out: tuple[Verdict, str] | None
) -> Member:
    state, because = MemberState.SERVING, ""
    if engine.fenced_because:
        state, because = MemberState.FENCED, engine.fenced_because
    elif engine.is_stale:
        state, because = MemberState.FENCED, "started again, it lacks the published weights"
    elif out is not None:
        verdict, because = out
        state = MemberState.DEAD if verdict is Verdict.DEAD else MemberState.DRAINING
    return Member(engine.engine_id, engine.endpoint, state, worker_type, because=because)
