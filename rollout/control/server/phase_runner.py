"""Runs one command of the lifecycle on the groups of a server, on all at the same time.

Always true: a command ends after every group has replied or is late.  What it did to the groups,
the record of it and what the router is given are one unit, which no cancel cuts.  After a failed or
cancelled command, a gate that was not open is closed: requests get 503 with the reason.  No
``finally`` opens it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from engines.protocol.plain_text import describe
from rollout.config import Drain, LifecycleConfig, WeightUpdate
from rollout.control.recovery.monitor import RecoveryMonitor
from rollout.control.server.adapter_versions import AdapterVersions
from rollout.control.server.gate_control import GateControl
from rollout.control.server.group_registry import GroupRegistry
from rollout.control.server.journal import JournalRecord, ServerJournal, entries_of
from rollout.core.errors import ActorLost, LifecycleError, PhaseFailed
from rollout.core.fanout import barrier, run_to_completion
from rollout.core.types import PhaseReport, StepReport
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import Kind
from rollout.rules import lifecycle
from rollout.rules.lifecycle import STAGE, Command, Phase
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.push_version import LastPush, why_not_newer
from rollout.weights.push.unchanged import PushChanges
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.store.store import WeightStore

logger = logging.getLogger(__name__)


class PhaseRunner:
    """Runs commands; the caller decides their order.

    Args:
        journal: gets the state before and after each command.
        adapters: the versions of adapters on the engines.
        margin_s: a group has its own deadlines; this long after them, the group counts as lost.
        update: what the server's pushes are.
        frozen: patterns of tensors that pushes never change.

    Attributes:
        changes: what the pushes have changed.
        doing: the command that runs, or empty for none.
        expected_version: the gate stays closed until a push of this version or a newer one.
    """

    def __init__(
        self,
        name: str,
        budgets: LifecycleConfig,
        registry: GroupRegistry,
        gate: GateControl,
        recovery: RecoveryMonitor,
        timeline: Timeline,
        store: WeightStore | None = None,
        journal: ServerJournal | None = None,
        *,
        adapters: AdapterVersions,
        margin_s: float,
        update: WeightUpdate = WeightUpdate.FULL,
        frozen: Sequence[str] = (),
    ) -> None:
        self.changes = PushChanges(frozen)
        self.doing = ""
        self.expected_version = 0
        self._next_adapter: WeightPush | None = None
        self._adapters = adapters
        self._unfinished: dict[str, Command] = {}
        self._update = update
        self._margin_s = margin_s
        self._journal = journal
        self._timeline = timeline
        self._name = name
        self._budgets = budgets
        self._registry = registry
        self._gate = gate
        self._recovery = recovery
        self._store = store
        self._last_push = LastPush()
        self._pushed: WeightPush | None = None
        self._order = 0
        self._has_failed = False

    @property
    def weight_version(self) -> int:
        """The version published last."""
        return self._last_push.version

    @property
    def base_version(self) -> int:
        """The version of the base, which engines report; without adapters, of all weights."""
        return self._last_push.base_version

    @property
    def why_expecting(self) -> str:
        """Why the published weights must not serve."""
        expected, following = self.expected_version, self._next_adapter
        if max(self.weight_version, following.version if following else 0) >= expected:
            return ""
        held = self.weight_version
        or_else = f", or launch with expect_version={held} if these are right" if held else ""
        return (
            f"this launch expects weight version {expected} or a newer one, and the engines hold "
            f"{held}; push it: push(weights, version={expected}){or_else}"
        )

    @property
    def needs_push(self) -> int | None:
        """The weight version of the push that alone can open the gate.

        None in the middle of a step: there a push may be under way behind a closed gate.
        """
        is_between_steps = set(self._registry.phases.values()) == {Phase.SERVING}
        return self.expected_version if is_between_steps and self.why_expecting else None

    def expect(self, version: int) -> None:
        """Keep the gate closed until a push of this version or a newer one."""
        self.expected_version = version

    def unfinished(self, group: str) -> Command | None:
        """The command that a group may have begun and not ended."""
        return self._unfinished.get(group)

    def note_replaced(self, group: str) -> None:
        """Another group is in its place, which has begun nothing."""
        self._unfinished.pop(group, None)

    def start_at(self, version: int) -> None:
        """The engines hold this version from the start."""
        self._last_push = LastPush(version, base_version=version)

    def continue_at(self, record: JournalRecord) -> None:
        """Continue where a lost server of the same run was.

        The contents of its last push are unknown, so none counts as equal to them.
        """
        self._last_push = LastPush(
            record.weight_version,
            Manifest({}) if record.has_pushed else None,
            record.has_served,
            base_version=record.base_version,
        )
        self.expected_version = record.expected_version

    @property
    def has_pushed(self) -> bool:
        """Whether the engines were given a push; before, they hold what they loaded."""
        return self._last_push.manifest is not None

    # -- several commands -------------------------------------------------------------------

    async def serve_adapter(self, push: WeightPush, *commands: Command) -> StepReport:
        """Run the commands; as soon as the engines generate, stage an adapter and publish it.

        After a failure it is forgotten.
        """
        self._next_adapter = push
        try:
            return await self.advance(*commands)
        except BaseException:
            self._next_adapter = None
            raise

    async def advance(self, *commands: Command, push: WeightPush | None = None) -> StepReport:
        """Run the commands in order, each on the groups that still need it.

        Args:
            push: the new weights, for ``update_weights``; without it, groups whose weights a
                release discarded get the published ones from a weight source.
        """
        await self._refresh_phases()
        lifecycle.check_started(self._registry.phases)
        if Command.PAUSE_GENERATION in commands:
            await self._restart_if_short()
        report = self._report()
        for command in commands:
            if command is Command.RELEASE_MEMORY_OCCUPATION and (
                late := self._registry.may_continue_late()
            ):
                # Repeated, it does nothing, but a group refuses older commands after it.
                report = report.merged(await self.run(Command.VERIFY, late))
            names = self._registry.that_need(command)
            if command is Command.UPDATE_WEIGHTS and push is not None:
                report = report.merged(await self.update_weights(push))
            elif names or command is Command.CONTINUE_GENERATION:  # which opens the gate too
                report = report.merged(await self.run(command, names))
        return report

    async def check_can_restore(self) -> None:
        """Refuse to serve without a push where a release discarded the weights, and no source has
        them.

        A write of the store that is under way is awaited, as long as a push may take.
        """
        await self._refresh_phases()
        registry, version = self._registry, self.base_version
        names = registry.that_need(Command.UPDATE_WEIGHTS)
        note = ""
        if names and self._store is not None:
            note = await self._store.why_not_kept(version, self._budgets.update_timeout_s)
        why_not = await barrier(
            {name: registry.groups[name].why_cannot_restore(version) for name in names},
            operation="serve",
            budget_s=self._budgets.command_timeout_s + self._margin_s,
        )
        if note:
            why_not = {name: why and f"{why} ({note})" for name, why in why_not.items()}
        lifecycle.check_restorable(registry.phases, registry.traits, why_not)

    async def _restart_if_short(self) -> None:
        """Restart dead engines where too few are left to go on.

        Not where the trainer uses the memory: there ``onload_weights`` restarts them.
        """
        phases = self._registry.phases
        names = [name for name, phase in phases.items() if phase is not Phase.OFFLOADED]
        await self._recovery.restart_if_short(names)

    async def update_weights(self, push: WeightPush) -> StepReport:
        """Push new weights to all groups, or to none if one cannot take them.

        An adapter waits until the engines generate.
        """
        await self._refresh_phases()
        if push.adapter:
            self._next_adapter = push
            return self._report()
        # If only some groups took the push, they would hold weights that are never published.
        for name, phase in self._registry.phases.items():
            lifecycle.next_phase(phase, Command.UPDATE_WEIGHTS, self._registry.traits[name])
        read = push.read_by(len(self._registry.groups))
        return await self.run(
            Command.UPDATE_WEIGHTS,
            self._registry.groups,
            read,
            note=partial(self._note_pushed, push),
        )

    async def _note_pushed(self, push: WeightPush) -> None:
        contents = push.contents_under(self._update)
        self._last_push = self._last_push.then(push.version, push.manifest, contents, push.adapter)
        self._pushed = push
        await self._read_fingerprints()
        self._note_changes()

    def _note_changes(self, adapter: str = "") -> None:
        """Note what the last push has changed, and log once what it should have changed."""
        last = self._last_push
        assert last.manifest is not None
        for found in self.changes.note(last.version, last.manifest, adapter):
            logger.warning(
                "server %s: %s. Likely: %s. %s",
                self._name,
                found.what,
                "; or ".join(found.causes),
                "; ".join(found.advice),
            )
            self._timeline.event("unchanged", found.what)

    def _report(self) -> StepReport:
        """The report of no command."""
        return StepReport(weight_version=self.weight_version, unchanged=self.changes.findings)

    async def why_not_newer(self, push: WeightPush) -> str:
        """Why this push cannot have its version."""
        if push.version < self.expected_version:
            return f"weight version {push.version} is too old: {self.why_expecting}"
        if push.version == self.weight_version:
            await self._read_fingerprints()
        return why_not_newer(push.version, push.manifest, self._last_push)

    async def _read_fingerprints(self) -> None:
        """Complete the record of the last push: those of a stream came with its buckets."""
        last = self._last_push
        if last.manifest is None or last.manifest.fingerprints:
            return
        fingerprints = await self._registry.pushed_fingerprints()
        self._last_push = replace(last, manifest=Manifest(last.manifest.tensors, fingerprints))

    async def _refresh_phases(self) -> None:
        """After a failure, read the phases: a late command may have changed a group, or lost it."""
        if self._has_failed:
            await self._registry.refresh_phases()
            await self._recovery.replace_lost_groups()

    # -- one command ------------------------------------------------------------------------

    async def run(
        self,
        command: Command,
        names: Iterable[str],
        push: WeightPush | None = None,
        *,
        note: Callable[[], Awaitable[None]] | None = None,
    ) -> StepReport:
        """Run one command on these groups; returns when each has replied or is late.

        Args:
            push: the new weights, for ``update_weights``.
            note: records what the groups have done.
        """
        names = list(names)
        try:
            await self._prepare(command, names, is_restore=push is None)
            return await run_to_completion(self._run(command, names, push, note))
        except BaseException as error:
            await run_to_completion(self._after_failure(command, error))
            raise

    async def _run(
        self,
        command: Command,
        names: Sequence[str],
        push: WeightPush | None,
        note: Callable[[], Awaitable[None]] | None,
    ) -> StepReport:
        self._order += 1
        for name in names:
            before = self._unfinished.get(name)
            self._unfinished[name] = lifecycle.least_known(before, command)
        self.doing = command.value
        started = asyncio.get_running_loop().time()
        reports = await self._run_on_groups(command, names, push)
        if note is not None:
            await note()
        if any(report.failures for report in reports):
            await self._gate.publish_members()
            self._recovery.probe_soon()
        if command is Command.CONTINUE_GENERATION:
            await self._open_gate(_of_drafts(reports))
        self.doing = ""
        await self.write_journal(durable=False)
        return StepReport(
            phase_s={command.value: asyncio.get_running_loop().time() - started}
            | {report.command: report.elapsed_s for report in reports if report.command == STAGE},
            freed_bytes=sum(report.freed_bytes for report in reports),
            weight_version=self.weight_version,
            reports=tuple(reports),
            paused_s=self._gate.paused_s if command is Command.CONTINUE_GENERATION else 0.0,
            unchanged=self.changes.findings,
        )

    async def _stage_next(self) -> Sequence[PhaseReport]:
        """Stage the adapter that waits, if one does.

        Whatever fails, what is published stays on the engines.
        """
        push, self._next_adapter = self._next_adapter, None
        if push is None:
            return ()
        with self._timeline.span(Kind.PHASE, STAGE) as span:
            span.weight_version = push.version
            reports = await self._adapters.stage(push, is_open=self._gate.state == "open")
        contents = push.contents_under(self._update)
        self._last_push = self._last_push.then(push.version, push.manifest, contents, push.adapter)
        self._note_changes(push.adapter)
        return reports

    async def _run_on_groups(
        self, command: Command, names: Sequence[str], push: WeightPush | None
    ) -> list[PhaseReport]:
        version = self.base_version if push is None else push.version
        is_path_check = push is not None and push.checks_path
        budget_s = lifecycle.budget_s(command, self._budgets, is_path_check=is_path_check)
        await self.write_journal(durable=False)
        with self._timeline.span(Kind.PHASE, command.value, budget_s=budget_s) as span:
            span.weight_version = version
            if command is Command.CONTINUE_GENERATION:
                await self._check_can_serve()
            calls = {
                name: self._registry.groups[name].run(
                    command, self._order, push=push, version=version, budget_s=budget_s
                )
                for name in names
            }
            reports = await barrier(
                calls, operation=command.value, budget_s=budget_s + self._margin_s
            )
            for name, report in reports.items():
                self._registry.phases[name] = Phase(report.phase)
                self._unfinished.pop(name, None)
            staged = await self._stage_next() if command is Command.CONTINUE_GENERATION else ()
        return [*reports.values(), *staged]

    async def _check_can_serve(self) -> None:
        """Before engines continue: one of them must hold the published weights, which may serve."""
        if why := self.why_expecting:
            raise PhaseFailed(f"cannot continue: {why}", phase=Command.CONTINUE_GENERATION.value)
        if await self._gate.why_none_serves(self.base_version):
            await self._recovery.replace_lost_groups()
            await self._recovery.readmit_stale(self.base_version)
        if why := await self._gate.why_none_serves(self.base_version):
            raise PhaseFailed(f"cannot continue: {why}", phase=Command.CONTINUE_GENERATION.value)

    async def _prepare(self, command: Command, names: Sequence[str], *, is_restore: bool) -> None:
        """Do what must precede the command on the groups."""
        if command is Command.PAUSE_GENERATION:
            await self._gate.shut(
                "holding", "the engines are paused for an offload or a push", "pause_generation"
            )
            if self._budgets.drain is Drain.FINISH:
                late = await self._gate.drain(self._budgets.drain_timeout_s)
                if late:
                    logger.warning("server %s: %s; these requests are aborted", self._name, late)
        elif command is Command.RELEASE_MEMORY_OCCUPATION:
            # An engine that has booted releases with the others; one that still boots is ended.
            await self._recovery.actions.admit(names)
        elif command is Command.ONLOAD_WEIGHTS or (
            command is Command.UPDATE_WEIGHTS and is_restore
        ):
            # While offloaded no engine could restart: the trainer used the memory.
            await self._recovery.restart_if_short(names)

    async def open_gate(self) -> None:
        """Open the gate after all engines can serve."""
        await run_to_completion(self._open_gate())

    async def _open_gate(self, of_drafts: Mapping[str, float] = MappingProxyType({})) -> None:
        before = self._last_push
        self._last_push = replace(before, has_served=True)
        # First: a server that continues this one has to know that the version may have served.
        await self.write_journal(durable=False)
        try:
            await self._gate.open(self._last_push, {**self.changes.metrics(), **of_drafts})
        except PhaseFailed:  # after any other error, the router may have opened it
            self._last_push = before
            raise
        self._adapters.has_published(self._last_push.adapters)
        self._has_failed = False
        await self.write_journal()
        pushed, self._pushed = self._pushed, None
        if self._store is not None and pushed is not None:
            # The weights are verified and serve, so the store keeps them, in the background.
            self._store.offer(pushed)

    async def write_journal(self, *, durable: bool = True) -> None:
        """Write the current state to the journal, if there is one.

        Args:
            durable: flush to disk, to survive a power failure.
        """
        if self._journal is not None:
            await self._journal.write(
                durable=durable,
                phases={name: phase.value for name, phase in self._registry.phases.items()},
                doing=self.doing,
                gate=self._gate.state,
                unfinished={name: command.value for name, command in self._unfinished.items()},
                weight_version=self.weight_version,
                has_pushed=self.has_pushed,
                has_served=self._last_push.has_served,
                has_adapters=bool(self._last_push.adapters),
                base_version=self._last_push.base_version,
                expected_version=self.expected_version,
                router_url=self._gate.router_url,
                engines=entries_of(self._registry.all_last_known()),
            )

    async def close_gate(self, operation: str, why: str) -> None:
        """Refuse the requests that an unfinished transaction holds."""
        if self._gate.state == "holding":
            await self._gate.shut("closed", why, operation, needs_push=self.needs_push)
            await self.write_journal()

    async def _after_failure(self, command: Command, error: BaseException) -> None:
        """Close the gate after a failed phase; groups keep the phase they reached.

        It holds if an actor was lost that comes back: the caller repeats the command.  A refused
        command leaves the gate as it is, but other groups may have run it.
        """
        cancelled = isinstance(error, asyncio.CancelledError)
        reason = f"{command} was cancelled" if cancelled else describe(error)
        before = self._registry.fenced()
        self._has_failed = True
        reactions: list[Callable[[], Awaitable[object]]] = [self._gate.publish_members]
        if self._gate.state != "open" and not isinstance(error, LifecycleError):
            is_repeated = isinstance(error, ActorLost) and self._recovery.is_on
            state = "holding" if is_repeated else "closed"
            needs_push = None if is_repeated else self.needs_push
            reactions.insert(
                0, lambda: self._gate.shut(state, reason, command.value, needs_push=needs_push)
            )
        for react in reactions:
            try:
                await react()
            except Exception as more:  # must not hide the first failure
                logger.error(
                    "server %s: after a failed %s: %s", self._name, command, describe(more)
                )
        self._registry.use_last_known_phases()
        self.doing = ""
        await self.write_journal()
        # The error of one group does not name engines that another group fenced.
        for engine_id, fence_reason in self._registry.fenced().items():
            if engine_id not in before and fence_reason not in str(error):
                error.add_note(f"also fenced: {fence_reason}")
        self._recovery.probe_soon()


def _of_drafts(reports: Iterable[PhaseReport]) -> dict[str, float]:
    """The share of drafted tokens that were right before this step, for trackers, or empty if it is
    not known."""
    engines = (engine.drafts for report in reports for engine in report.engines)
    shares = [drafts.share for drafts in engines if drafts is not None and drafts.share is not None]
    return {"server/draft_accepted_ratio": sum(shares) / len(shares)} if shares else {}
