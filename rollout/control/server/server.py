"""RolloutServer: one model, its groups behind one router, one method per lifecycle command.

Always true:
- a phase begins only after the one before it has ended on every group that takes part;
- the gate is closed before the first engine is paused, and opens only after every group serves
  again at the published weight version.  After a failed command it stays closed: requests get 503
  with the reason.  No ``finally`` opens it;
- one command runs at a time; a repeated command does nothing twice.

Groups and the router are plain objects in this process, or handles of Ray actors.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from engines.protocol import Endpoint
from engines.protocol.plain_text import describe
from rollout.config import ServerConfig, WeightUpdate
from rollout.control.group.server_group import ServerGroup
from rollout.control.recovery.health_tracker import recovery_terms
from rollout.control.recovery.monitor import RecoveryMonitor
from rollout.control.server.adapter_versions import AdapterVersions
from rollout.control.server.agents_client import AgentsClient
from rollout.control.server.elastic import ElasticSlots
from rollout.control.server.gate_control import RESTARTS, GateControl
from rollout.control.server.group_registry import ActorFactory, GroupRegistry
from rollout.control.server.journal import JournalRecord, ServerJournal
from rollout.control.server.phase_runner import PhaseRunner
from rollout.control.server.router_client import RouterClient
from rollout.control.server.snapshot import take_snapshot
from rollout.core.command_lock import CommandLock
from rollout.core.errors import (
    ConfigError,
    LifecycleError,
    PhaseFailed,
    RolloutError,
    WeightMismatch,
)
from rollout.core.fanout import barrier, run_to_completion, whole_or_none
from rollout.core.types import EngineReport, EngineStatus, GroupStatus, ServerStatus, StepReport
from rollout.observability.server_snapshot import ServerSnapshot
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import Cursor, Span
from rollout.router.host import RouterHost
from rollout.rules.deadlines import STOP_TIMEOUT_S, group_margin_s, lock_timeout_s
from rollout.rules.lifecycle import (
    MAKE_IDLE,
    OFFLOAD,
    PUSH,
    SERVE,
    SERVE_UPDATED,
    Command,
    Phase,
    hold_loaded_weights,
    server_phase,
    up_to,
)
from rollout.weights.format.manifest import Manifest, read_checkpoint_manifest
from rollout.weights.push.push_version import why_no_path_check
from rollout.weights.push.weight_push import WeightPush, check_fits
from rollout.weights.store.store import WeightStore

logger = logging.getLogger(__name__)

_NOT_CHECKED = (
    "weights.check_first_push is true, and released weights cannot be compared: before the first "
    "offload, call checks.push_path or push with the weights of model_path, or set it to "
    "false"
)


_AFTER_PATH_CHECK = (
    "Correct the tensors or the name map and repeat the call: the engines restart with their "
    "checkpoint. When they have, serve() serves it"
)
_WITHOUT_RECOVERY = "health.recover is false, so nothing restarts the engines: launch again"
# Command -> its name in the public API, and whether only groups that offload take part.
_OFFLOADING_ONLY = {
    Command.RELEASE_MEMORY_OCCUPATION,
    Command.ONLOAD_WEIGHTS,
    Command.ONLOAD_KV,
}


class PageApi(Protocol):
    """A ``PageHost``: the live page."""

    def start(self, server: Any) -> Awaitable[str]: ...
    def keep_figures(self) -> Awaitable[None]: ...
    def stop(self) -> Awaitable[None]: ...


class RolloutServer:
    """The lifecycle of one model's engines, over all its groups."""

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        groups: Mapping[str, ServerGroup],
        router: RouterHost,
        *,
        store: WeightStore | None = None,
        timeline: Timeline | None = None,
        page: PageApi | None = None,
        agents: AgentsClient | None = None,
        actor_factory: ActorFactory | None = None,
        journal: ServerJournal | None = None,
    ) -> None:
        """Nothing is started.

        Args:
            router: see ``RouterClient``.
            agents: its workers, or None for none.
            actor_factory: replaces lost actors, or None without actors.
        """
        self.name = name
        self._page = page
        self._agents = agents or AgentsClient(name, (), Path())
        self.timeline = timeline or Timeline(name)
        self._config = config
        self._store = store
        self._actor_factory = actor_factory
        end_router = actor_factory.end_router if actor_factory is not None else None
        client = self._router = RouterClient(name, router, end_router)
        self._lock = CommandLock(lock_timeout_s(config.lifecycle))
        registry = self._registry = GroupRegistry(name, config, groups)
        terms = {group: recovery_terms(config, group) for group in registry.groups}
        recovery = self._recovery = RecoveryMonitor(
            name,
            config,
            registry,
            terms,
            self,
            client.failures,
            self._lock,
        )
        margin_s = max(group_margin_s(group.engine) for group in config.groups.values())
        self._adapters = AdapterVersions(config, registry, client, margin_s)
        gate = self._gate = GateControl(client, registry, recovery, config, self.timeline, self)
        self._phase_runner = PhaseRunner(
            name,
            config.lifecycle,
            registry,
            gate,
            recovery,
            self.timeline,
            store,
            journal,
            adapters=self._adapters,
            margin_s=margin_s,
            update=config.weights.update,
            frozen=config.weights.frozen,
        )
        self._journal = journal
        self._elastic = ElasticSlots(name, config, registry, gate, recovery, self.publish_members)
        self._expected: Manifest | None = None

    # -- start and stop ---------------------------------------------------------------------

    async def start(self, expect_version: int = 0) -> ServerStatus:
        """Start engines and router; the gate opens when all engines are ready.

        If anything fails, everything that was started is stopped before the error is raised.

        Args:
            expect_version: the gate stays closed until a push of this version or a newer one, and
                of a newer one if attached engines begin at a version that is neither this one nor
                0.  A frozen server, which gets no push, serves at once.
        """
        async with self._lock.held("start"):
            try:
                await self._phase_runner.write_journal()
                await self._start_page()
                await self._phase_runner.write_journal(durable=False)
                # The router first: an occupied port is found before engines load.
                await self._router.start()
                await whole_or_none([self._start_agents(), self._start_engines()])
                await self._open_or_expect(expect_version)
                started = await self.status()
            except BaseException:
                await self.stop()
                raise
        return replace(started, lock_owner="")

    async def continue_lost(self, record: JournalRecord) -> None:
        """Continue in the place of a lost server of the same run.

        Its groups take over the engines that confirm their state.  The gate opens if it was open
        and no command was under way; otherwise a command leads on.  No command runs meanwhile.

        Args:
            record: the last one of the lost server.
        """
        try:
            self._phase_runner.continue_at(record)
            await self._start_page()
            await self._rejoin_router(record.router_url)
            self._agents.rejoin(record.agents_urls)
            self._keep_agents()
            await self._start_parts(record)
            await self._recovery.probe_once()  # engines that were not reused are dead
            await self._gate.publish_members()
            if record.gate == "open" and not record.unfinished:
                await self._phase_runner.open_gate()
            else:
                why = "the process of the server was lost, and another one continues"
                # What was under way is called again, and requests wait for it.
                state = "closed" if record.gate == "closed" else "holding"
                await self._gate.shut(state, why, "continue_generation")
        except PhaseFailed as error:
            await self._gate.shut("closed", str(error), "continue_generation")
        except BaseException:
            await self.stop()
            raise
        await self._phase_runner.write_journal()

    async def _start_page(self) -> None:
        if self._page is not None:
            page = await self._page.start(self)
            if self._journal is not None:
                self._journal.keep(page=page, page_needs_key=bool(self._config.page.key))

    async def _rejoin_router(self, url: str) -> None:
        self._gate.epoch = await self._router.rejoin(Endpoint.of_url(url))
        num_restarts = self._router.metrics.get(RESTARTS, 0.0)
        self._recovery.tracker.num_restarts = int(num_restarts)  # of all engines, as before

    async def _start_agents(self) -> None:
        await self._agents.start(self._router.url)
        self._keep_agents()

    def _keep_agents(self) -> None:
        if self._journal is not None:
            self._journal.keep(agents_urls=self._agents.urls)

    async def _start_engines(self) -> None:
        self._adopt_start_version(await self._start_parts())

    async def _start_parts(self, lost: JournalRecord | None = None) -> Mapping[str, GroupStatus]:
        self._expected = await asyncio.to_thread(read_checkpoint_manifest, self._config.model_path)
        statuses = await self._registry.start(lost, self._actor_factory)
        if self._store is not None:
            await self._store.start()
        self._recovery.start(
            {
                name: [engine.engine_id for engine in status.engines]
                for name, status in statuses.items()
            }
        )
        return statuses

    async def _open_or_expect(self, version: int) -> None:
        runner, held = self._phase_runner, self.weight_version
        update = self._config.weights.update
        if held not in (0, version):
            logger.warning(
                "server %s: its engines report weight version %d, and this launch expects %d; what "
                "weights these are is not known, so %s",
                *(self.name, held, version),
                f"only a push opens the gate, or expect_version={held} at the launch"
                if update is WeightUpdate.FULL
                else "check that they are right: weights.update does not replace them",
            )
            if update is WeightUpdate.FULL:
                version = max(version, held + 1)
        if update is not WeightUpdate.FROZEN:
            runner.expect(version)
        if why := runner.why_expecting:
            await self._gate.publish_members()
            await self._gate.shut("closed", why, "start", needs_push=runner.needs_push)
            await runner.write_journal()
        else:
            await runner.open_gate()

    async def stop(self) -> None:
        """Stop router and engines within ``STOP_TIMEOUT_S``, then kill the rest.

        Works also while a command hangs: it does not wait for the lock.
        """
        self._lock.why_ended = (
            f"server {self.name} was stopped, by its script or by rollout stop; launch it again"
        )
        if self._page is not None:
            await self._page.keep_figures()
        self._gate.state = "closed"
        await self._recovery.stop()
        await self._adapters.stop()
        parts: dict[str, Awaitable[Any]] = {}
        parts["agents and router"] = self._stop_entrances()
        if self._store is not None:
            parts["store"] = self._store.stop()
        parts |= {name: group.stop() for name, group in self._registry.groups.items()}
        is_stopped = True
        try:
            await barrier(parts)
        except Exception as error:  # a stop must not fail
            logger.error("server %s: while stopping: %s", self.name, describe(error))
            is_stopped = False
        finally:
            await self.timeline.aclose()
            if self._page is not None:
                await self._page.stop()
        if self._journal is not None and is_stopped:
            await self._journal.end()
        elif self._journal is not None:
            self._journal.keep(page="")
            await self._phase_runner.write_journal()  # it lists possible leftovers

    async def _stop_entrances(self) -> None:
        """The agents first, whose turns the router has."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + STOP_TIMEOUT_S
        try:
            await self._agents.stop(STOP_TIMEOUT_S / 2)
        finally:
            if self._router.url:
                await self._router.stop(max(0.0, until_s - clock()))

    def _adopt_start_version(self, statuses: Mapping[str, GroupStatus]) -> None:
        """Begin at the version that all engines have: attached ones may have served before."""
        engines = [engine for status in statuses.values() for engine in status.engines]
        versions = {engine.weight_version for engine in engines}
        if len(versions) == 1 and (version := versions.pop()) is not None:
            self._phase_runner.start_at(version)
            return
        for engine in engines:
            if engine.weight_version is None:
                raise WeightMismatch(
                    f"engine {engine.engine_id} at {engine.endpoint.url} starts at weight version "
                    f"None, not {self.weight_version}: it reports no number.  With unverified-N, a "
                    "push into it ended early, and its weights may be of two versions: restart it "
                    "with its checkpoint, or let its trainer push all weights first.  If somebody "
                    f"has named its weights, and they are those of model_path, send POST "
                    f'/update_weight_version {{"new_version": "0"}} there',
                    engine_id=engine.engine_id,
                )
            if engine.weight_version != self.weight_version:
                raise WeightMismatch(
                    f"engine {engine.engine_id} starts at weight version "
                    f"{engine.weight_version}, not {self.weight_version}, as others do; if it "
                    f"holds the same weights, send POST {engine.endpoint.url}"
                    f'/update_weight_version {{"new_version": "{self.weight_version}"}}',
                    engine_id=engine.engine_id,
                )

    # -- the lifecycle, in the order of a step ----------------------------------------------

    async def offload(self) -> StepReport:
        """Free the engines' memory for the trainer, in whatever phase the groups are.

        Returns only after the memory is free; ``freed_bytes`` is its size.  A repeated call, also
        after a failure, continues from the phase of each group.
        """
        async with self._lock.held("offload"):
            self._refuse_unchecked()
            return await self._phase_runner.advance(*OFFLOAD)

    async def push(
        self, push: WeightPush, until: Command = Command.CONTINUE_GENERATION
    ) -> StepReport:
        """Serve new weights, in whatever phase the groups are.

        Groups that serve are paused and flushed, released memory is resumed; then come update,
        verify, KV cache, continue and the gate.  A repeated call, also after a failure, continues
        from the phase of each group.

        An adapter pauses no engine: it is staged on all beside what they serve, verified, and
        published in one step.

        Args:
            until: the last command; ``serve`` does the rest.  After ``verify`` the trainer may
                free the memory that the KV cache needs.
        """
        async with self._lock.held("push"):
            must_check = self._must_check_path and hold_loaded_weights(
                self._registry.phases.values()
            )
            if must_check or push.checks_path:
                return await self._check_path(push)
            await self._check_push(push)
            if push.adapter:
                await self._phase_runner.check_can_restore()
                return await self._phase_runner.serve_adapter(push, *up_to(until, SERVE))
            return await self._phase_runner.advance(*up_to(until, PUSH), push=push)

    async def serve(self, until: Command = Command.CONTINUE_GENERATION) -> StepReport:
        """Serve the published weights, in whatever phase the groups are.

        The engines hold them, or a weight source gives them back where a release discarded them.
        A repeated call, also after a failure, continues from the phase of each group.

        Args:
            until: see ``push``.
        """
        async with self._lock.held("serve"):
            await self._phase_runner.check_can_restore()
            return await self._phase_runner.advance(*up_to(until, SERVE))

    async def check_can_restore(self) -> None:
        """Check that the engines could serve without a push.

        Raises:
            LifecycleError: a release discarded the weights, and no source has them; nothing was
                changed.
        """
        async with self._lock.held("serve"):
            await self._phase_runner.check_can_restore()

    async def check_push_path(self, push: WeightPush) -> StepReport:
        """Check that a push gives the engines the weights that they loaded from the checkpoint.

        They copy their weights, overwrite them with noise, get the push, and compare.  Before the
        comparison has passed they do not serve; an engine whose weights differ is fenced.

        Args:
            push: the same weights as the checkpoint's, under a newer version.

        Raises:
            LifecycleError: an engine cannot; nothing was changed, and the engines serve if they
                did before.
            PhaseFailed: weights differ; the message names them.
        """
        async with self._lock.held("checks.push_path"):
            return await self._check_path(push)

    async def advance(self, command: Command) -> StepReport:
        """Run one command on the groups that still need it.

        A transaction over several servers calls this, to continue from the phase of each group.
        """
        async with self._lock.held(command.value):
            if command is OFFLOAD[0]:
                self._refuse_unchecked()
            return await self._phase_runner.advance(command)

    async def end_transaction(self, operation: str, why: str, *, is_lost: bool) -> None:
        """A transaction over several servers has failed: close a gate that holds requests for it.

        A command that runs meanwhile decides about the gate itself.

        Args:
            why: for the requests.
            is_lost: an actor was; where recovery brings it back, the gate goes on holding, because
                the caller repeats the transaction.
        """
        if self._lock.owner or (is_lost and self._recovery.is_on):
            return
        async with self._lock.held("end_transaction"):
            await run_to_completion(self._phase_runner.close_gate(operation, why))

    async def make_idle(self) -> StepReport:
        """Pause and flush the groups that serve, so that all can take new weights."""
        async with self._lock.held("make_idle"):
            return await self._phase_runner.advance(*MAKE_IDLE)

    async def run(self, command: Command) -> StepReport:
        """Run this command alone, on the groups that take part in it.

        Raises:
            LifecycleError: it is not legal in the phase of a group.
        """
        async with self._lock.held(command.value):
            registry = self._registry
            names = registry.offloading() if command in _OFFLOADING_ONLY else list(registry.groups)
            if command is Command.VERIFY:
                names = registry.that_need(command)
            return await self._phase_runner.run(command, names)

    async def update_weights(self, push: WeightPush) -> StepReport:
        """Push new weights to every group that is not frozen.

        Raises:
            WeightMismatch: the push does not fit the model; nothing was sent.
        """
        async with self._lock.held("update_weights"):
            return await self._update_weights(push)

    # -- remove and add engines -------------------------------------------------------------

    async def remove_engine(self, engine_id: str) -> EngineReport:
        """Remove an engine while the others serve, and vacate its slot.

        It gets no new requests and has ``drain_timeout_s`` to finish its requests.  Then its
        memory is freed and measured, and its process ended; an attached engine sleeps.

        Raises:
            LifecycleError: there is no such engine, or too few would remain.
            EngineFailure: its memory is not free; it is fenced.
        """
        async with self._lock.held("engines.remove"):
            return await self._elastic.remove(engine_id)

    async def add_engine(self, engine_id: str) -> EngineStatus:
        """Start or wake an engine in the vacant slot of a removed one.

        It boots beside the commands of a step.  Then it is brought to the phase of its group, and
        restores the weights if a source has them.
        It gets requests after they are verified, at the latest after the next full push.

        Raises:
            LifecycleError: the slot is not vacant, or the trainer uses its memory now; an offload
                ends a boot that is under way.
            EngineFailure: it did not start or wake, and the slot stays vacant; or it does not
                hold the weights that it reports, and it is fenced.
        """
        await self._elastic.boot(engine_id)
        try:
            async with self._lock.held("engines.add"):
                return await self._elastic.add(engine_id, self.base_version)
        except BaseException:
            with suppress(RolloutError, TimeoutError):  # it has joined, or its group has stopped
                await run_to_completion(self._elastic.end_boot(engine_id))
            raise

    # -- status -----------------------------------------------------------------------------

    async def status(self) -> ServerStatus:
        """Status of the server, its groups and engines.  Works also while a command runs."""
        groups = await self._registry.statuses()
        phase = server_phase(self._registry.phases.values())
        return ServerStatus(
            name=self.name,
            phase=phase.value if phase else "mixed",
            weight_version=self.weight_version,
            base_version=self.base_version,
            router_url=self._router.url,
            agents_urls=self._agents.urls,
            gate=self._gate.shown_state,
            lock_owner=self._lock.owner,
            groups=tuple(groups.values()),
            store=await self._store.status() if self._store is not None else None,
            unchanged=self._phase_runner.changes.findings,
        )

    async def observe(self, cursors: Mapping[str, Cursor]) -> ServerSnapshot:
        """Status, router, and the timelines since these cursors, by source."""
        return await take_snapshot(
            self.status(), self.timeline, self._registry.groups, self._router, cursors
        )

    async def record_push(self, spans: Sequence[Span]) -> None:
        """Add to the timeline what the ranks of the trainer have measured in a push."""
        self.timeline.add(spans)

    async def log_tail(self, engine_id: str, num_lines: int = 20) -> str:
        """The last lines of an engine's log."""
        group = self._registry.groups[self._registry.group_of(engine_id)]
        return await group.log_tail(engine_id, num_lines)

    async def fence(self, engine_id: str, reason: str) -> None:
        """Fence an engine and end its process; recovery may restart it.

        Works also while a command hangs on it.
        """
        group = self._registry.groups[self._registry.group_of(engine_id)]

        async def fence() -> None:
            await group.fence(engine_id, reason)
            self._recovery.probe_soon()
            await self.publish_members()

        await run_to_completion(fence())

    @property
    def weight_version(self) -> int:
        """The version published last."""
        return self._phase_runner.weight_version

    @property
    def base_version(self) -> int:
        """The version that engines report: of the base under adapters."""
        return self._phase_runner.base_version

    def phases(self) -> Mapping[str, Phase]:
        """The phase of each group."""
        return self._registry.phases

    async def publish_members(self) -> None:
        """Send the router the current members."""
        await self._gate.publish_members()
        await self._phase_runner.write_journal()

    async def note_standbys(self) -> None:
        """Record which standbys are ready, for the case that their group is lost."""
        await self._registry.statuses()
        await self._phase_runner.write_journal(durable=False)

    async def replace_lost_group(self, name: str) -> None:
        """Create another group in the place of one whose actor is lost; the caller holds the lock.

        Its engines are reused that confirm their state.  The others are ended, and recovery
        restarts them.

        Raises:
            ActorLost: there is no actor factory.
        """
        unfinished = self._phase_runner.unfinished(name)
        await self._registry.replace_lost(name, self._actor_factory, unfinished, self.base_version)
        self._phase_runner.note_replaced(name)
        await self._registry.groups[name].know_adapters(list(self._adapters.pushes.values()))
        await self.publish_members()

    async def config(self) -> ServerConfig:
        """Its part of the run's configuration."""
        return self._config

    async def expected_manifest(self) -> Manifest | None:
        """The tensors a full push must contain, or None if the checkpoint has no list."""
        return self._expected

    async def fingerprint_methods(self) -> frozenset[str]:
        """The methods of the engines' fingerprints, as last known; calls no engine."""
        statuses = self._registry.all_last_known()
        return frozenset(engine.fingerprints for status in statuses for engine in status.engines)

    async def router_serves(self) -> tuple[int, Any, str, dict[str, Any]]:
        """The router was lost and begins again; see ``RouterClient.serves``."""
        return self._router.serves()

    # -- store ------------------------------------------------------------------------------

    async def make_way_in_store(self, folder: str) -> int | None:
        """A push begins whose copies will lie in this folder, for the store.

        The copies of an earlier push that wait for the store are not read any more.  Returns the
        version whose copies the store reads at this moment, if any.

        Raises:
            ConfigError: this process does not see the folder.
        """
        if self._store is None:
            return None
        if not await asyncio.to_thread(os.path.isdir, folder):
            raise ConfigError(
                f"weights.store: the process of server {self.name} does not see {folder}, where "
                "rank 0 of the trainer keeps copies for the store: it runs on another host; run "
                "rank 0 on its host, or leave weights.store out",
                setting="weights.store",
            )
        return self._store.make_way()

    async def offer_to_store(self, push: WeightPush) -> None:
        """Copies of the weights that were published last; others are ignored."""
        if self._store is not None and push.version == self.weight_version:
            self._store.offer(push)

    async def _update_weights(self, push: WeightPush) -> StepReport:
        await self._check_push(push)
        return await self._phase_runner.update_weights(push)

    async def _check_path(self, push: WeightPush) -> StepReport:
        push = replace(push, checks_path=True)
        await self._check_push(push)
        if why := why_no_path_check(self._config.weights, self._last_pushed_version()):
            raise LifecycleError(f"cannot check the push path: {why}", command="checks.push_path")
        runner, was_open = self._phase_runner, self._gate.state == "open"
        report = await runner.advance(*MAKE_IDLE)
        # After a failed check they have just restarted.
        await self._recovery.readmit_stale(self.base_version)
        try:
            report = report.merged(await runner.run(Command.SNAPSHOT, self._registry.groups))
        except LifecycleError:  # nothing was changed
            if was_open:
                await runner.advance(Command.CONTINUE_GENERATION)
            raise
        try:
            report = report.merged(await runner.update_weights(push))
        except PhaseFailed as error:
            way_out = _AFTER_PATH_CHECK if self._config.health.recover else _WITHOUT_RECOVERY
            raise PhaseFailed(
                f"{error}. {way_out}", phase=error.phase, failures=error.failures
            ) from error
        return report.merged(await runner.advance(*SERVE_UPDATED))

    def _last_pushed_version(self) -> int | None:
        return self.weight_version if self._phase_runner.has_pushed else None

    @property
    def _must_check_path(self) -> bool:
        return self._config.weights.check_first_push and not self._phase_runner.has_pushed

    def _refuse_unchecked(self) -> None:
        """Refuse an offload after which the first push would be refused."""
        if self._must_check_path:
            raise LifecycleError(_NOT_CHECKED, command="offload")

    async def _check_push(self, push: WeightPush) -> None:
        if self._must_check_path and not push.checks_path:
            raise WeightMismatch(_NOT_CHECKED)
        why_not_newer = await self._phase_runner.why_not_newer(push)
        check_fits(push, self.name, self._config.weights, why_not_newer, self._expected)
