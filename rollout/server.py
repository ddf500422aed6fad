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
from collections.abc import Awaitable, Mapping
from typing import Any

from engines.protocol import Endpoint
from rollout.config import ServerConfig
from rollout.errors import WeightMismatch
from rollout.fanout import barrier, describe
from rollout.gatekeeper import Gatekeeper
from rollout.group_settings import fewest_engines
from rollout.group_view import GroupView
from rollout.health_record import recovery_terms
from rollout.journal import Journal, entries_of
from rollout.lifecycle import OFFLOAD, SERVE, Command, Phase, server_phase
from rollout.lock import CommandLock
from rollout.observation import Observation
from rollout.places import Places
from rollout.ports import GroupPort, PagePort, Remaker, RouterPort
from rollout.recovery import Recovery
from rollout.reviving import revive_group
from rollout.router_link import RouterLink
from rollout.steps import Steps
from rollout.timeline.recorder import Timeline
from rollout.types import EngineReport, EngineStatus, GroupStatus, ServerStatus, StepReport
from rollout.weights.fitting import check_fits
from rollout.weights.manifest import Manifest, read_checkpoint_manifest
from rollout.weights.push import WeightPush
from rollout.weights.store.store import WeightStore
from rollout.window import Window

logger = logging.getLogger(__name__)


class RolloutServer:
    """The lifecycle of one model's engines, over all its groups."""

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        groups: Mapping[str, GroupPort],
        router: RouterPort,
        *,
        store: WeightStore | None = None,
        timeline: Timeline | None = None,
        page: PagePort | None = None,
        remaker: Remaker | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Nothing is started.

        Args:
            remaker: makes lost parts again; None where none can be lost alone.
        """
        self.name = name
        self._page = page
        self.timeline = timeline or Timeline(name)
        self._config = config
        self._store = store
        self._remaker = remaker
        remake = None if remaker is None else remaker.router
        router = self._router = RouterLink(name, router, config.router.control_timeout_s, remake)
        self._lock = CommandLock(config.lifecycle.lock_timeout_s)
        view = self._view = GroupView(name, config, groups)
        terms = {group: recovery_terms(config, group) for group in view.groups}
        has_store = store is not None
        recovery = self._recovery = Recovery(
            name, config.health, view.groups, terms, self, router, self._lock, has_sources=has_store
        )
        gate = self._gate = Gatekeeper(
            router,
            view.look,
            self._fewest_engines,
            recovery.out_of_routing,
            recovery.has_published,
            self.timeline,
        )
        self._steps = Steps(
            name, config.lifecycle, view, gate, recovery, self.timeline, store, self._note
        )
        self._journal = journal
        self._window = Window(self.status, self.timeline, view.groups, router)
        self._places = Places(name, config, view, gate, recovery)
        self._expected: Manifest | None = None
        self._endpoint: Endpoint | None = None

    def _fewest_engines(self, group: str, num: int) -> int:
        return fewest_engines(self._config.groups[group], self._config.lifecycle, num)

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> ServerStatus:
        """Start engines and router; the gate opens when all engines are ready.

        If anything fails, what was started is stopped before the error goes on.
        """
        async with self._lock.held("start"):
            try:
                await self._note()
                if self._page is not None:
                    await self._page.start(self)
                # The router first: a port that is taken is known before engines are loaded.
                self._endpoint = await self._router.start()
                self._expected = await asyncio.to_thread(
                    read_checkpoint_manifest, self._config.model_path
                )
                statuses = await barrier(
                    {name: group.start() for name, group in self._view.groups.items()}
                )
                self._check_start_versions(statuses)
                if self._store is not None:
                    await self._store.start()
                await self._steps.open_gate()
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
        self._gate.state = "closed"
        await self._recovery.stop()
        budget_s = self._config.lifecycle.stop_timeout_s
        parts: dict[str, Awaitable[Any]] = {}
        if self._endpoint is not None:
            parts["router"] = self._router.stop(budget_s)
            self._endpoint = None
        if self._store is not None:
            parts["store"] = self._store.stop()
        parts |= {name: group.stop() for name, group in self._view.groups.items()}
        try:
            await barrier(parts)
        except Exception as error:  # who stops wants an end, not an error
            logger.error("server %s: while stopping: %s", self.name, describe(error))
            return  # the journal keeps what may be left
        finally:
            await self.timeline.aclose()
            if self._page is not None:
                await self._page.stop()
        if self._journal is not None:
            await self._journal.write(is_ended=True)

    def _check_start_versions(self, statuses: Mapping[str, GroupStatus]) -> None:
        for status in statuses.values():
            for engine in status.engines:
                if engine.weight_version != self.weight_version:
                    raise WeightMismatch(
                        f"engine {engine.engine_id} starts at weight version "
                        f"{engine.weight_version}, not {self.weight_version}",
                        engine_id=engine.engine_id,
                    )

    # -- the lifecycle, in the order of a step ----------------------------------------------

    async def offload(self) -> StepReport:
        """Give the engines' memory to the trainer: pause, flush, release, each a barrier.

        Returns only after the memory is released; ``freed_bytes`` says how much came free.
        Repeated, or after a failure, it goes on from where each group is.
        """
        async with self._lock.held("offload"):
            return await self._steps.advance(*OFFLOAD)

    async def onload(self, push: WeightPush | None = None) -> StepReport:
        """Take the memory back and serve: weights, update, verify, KV cache, continue, gate.

        Repeated, or after a failure, it goes on from where each group is.

        Args:
            push: new weights; None where all weights survive the release (a frozen model), or
                where they were already updated.
        """
        async with self._lock.held("onload"):
            report = StepReport(weight_version=self.weight_version)
            if push is not None:
                self._check_push(push)
                report = await self._steps.catch_up()
            report = report.merged(await self._steps.advance(Command.RESUME_WEIGHTS))
            if push is not None:
                report = report.merged(await self._update_weights(push))
            return report.merged(await self._steps.advance(*SERVE))

    async def update_and_continue(self, push: WeightPush) -> StepReport:
        """New weights for engines that are not offloaded: pause, flush, update, verify, go on."""
        async with self._lock.held("update_and_continue"):
            self._check_push(push)
            report = await self._steps.advance(Command.PAUSE, Command.FLUSH)
            report = report.merged(await self._update_weights(push))
            return report.merged(await self._steps.advance(*SERVE))

    async def advance(self, command: Command) -> StepReport:
        """One command for the groups that still have it before them, and for no others.

        This is how a transaction over several servers goes on from where each group is.
        """
        async with self._lock.held(command.value):
            return await self._steps.advance(command)

    async def catch_up(self) -> StepReport:
        """Pause and flush groups that a failed offload left behind; nothing if the gate is open."""
        async with self._lock.held("catch_up"):
            return await self._steps.catch_up()

    async def pause_generation(self) -> StepReport:
        """Shut the gate and stop generation on every group."""
        async with self._lock.held("pause_generation"):
            return await self._steps.pause(self._view.groups)

    async def flush_cache(self) -> StepReport:
        """Wait until no engine has anything in flight, and drop the prefix caches."""
        async with self._lock.held("flush_cache"):
            return await self._steps.flush(self._view.groups)

    async def release_memory_occupation(self) -> StepReport:
        """Release the memory of the groups that offload."""
        async with self._lock.held("release_memory_occupation"):
            return await self._steps.release(self._view.offloading())

    async def onload_weights(self) -> StepReport:
        """Take the memory of the weights back; nothing serves yet."""
        async with self._lock.held("onload_weights"):
            return await self._steps.resume_weights(self._view.offloading())

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
            return await self._steps.verify(self._view.before(Command.VERIFY))

    async def onload_kv(self) -> StepReport:
        """Take the memory of KV caches and CUDA graphs back."""
        async with self._lock.held("onload_kv"):
            return await self._steps.resume_kv(self._view.offloading())

    async def continue_generation(self) -> StepReport:
        """Let the engines generate and open the gate."""
        async with self._lock.held("continue_generation"):
            return await self._steps.continue_generation(self._view.groups)

    # -- engines that leave and come back ---------------------------------------------------

    async def remove_engine(self, engine_id: str, keep_process: bool = False) -> EngineReport:
        """Take an engine out while the others go on, and give its place away.

        It gets no new requests, has ``drain_timeout_s`` to finish those it has, and gives its
        memory back; that is measured.

        Args:
            keep_process: it only sleeps, and ``add_engine`` wakes it; left out, its process ends.

        Raises:
            LifecycleError: there is no such engine, or too few would be left.
            EngineFailure: its memory did not come free; it is fenced.
        """
        async with self._lock.held("remove_engine"):
            return await self._places.remove(engine_id, keep_process)

    async def add_engine(self, engine_id: str) -> EngineStatus:
        """Take the place of a removed engine back: it is started, or woken.

        It is led to the phase of its group, and to its weights where they can be had; it gets
        requests when it is proved to hold them, at the latest after the next full push.

        Raises:
            LifecycleError: no such place is free, or its memory is the trainer's now.
            EngineFailure: it did not start or wake; its place is free.
        """
        async with self._lock.held("add_engine"):
            return await self._places.add(engine_id, self.weight_version)

    # -- looking ----------------------------------------------------------------------------

    async def status(self) -> ServerStatus:
        """Where everything is.  Answers also while a command runs."""
        groups = await self._view.look()
        phase = server_phase(self._view.phases.values())
        return ServerStatus(
            name=self.name,
            phase=phase.value if phase else "mixed",
            weight_version=self.weight_version,
            router_url=self._endpoint.url if self._endpoint else "",
            gate=self._gate.state,
            lock_owner=self._lock.owner,
            groups=tuple(groups.values()),
            store=await self._store.status() if self._store is not None else None,
        )

    async def observe(self, cursors: Mapping[str, int]) -> Observation:
        """Status, router, and what has happened since these cursors, by source."""
        return await self._window.observe(cursors)

    async def log_tail(self, engine_id: str) -> str:
        """The end of an engine's log."""
        return await self._view.groups[self._view.group_of(engine_id)].log_tail(engine_id)

    async def fence(self, engine_id: str, reason: str) -> None:
        """Take an engine out of everything and end its process; recovery may bring it back.

        Works while a command hangs on it.
        """
        await self._view.groups[self._view.group_of(engine_id)].fence(engine_id, reason)
        await self.publish_members()
        self._recovery.look_soon()

    @property
    def weight_version(self) -> int:
        """The version published last."""
        return self._steps.weight_version

    def phases(self) -> Mapping[str, Phase]:
        """Where each group is."""
        return self._view.phases

    async def publish_members(self) -> None:
        """Tell the router who serves, as it is now."""
        await self._gate.publish_members()
        await self._note()

    async def _note(self, durable: bool = True) -> None:
        """Write down where things are."""
        if self._journal is not None:
            await self._journal.write(
                durable=durable,
                phases={name: phase.value for name, phase in self._view.phases.items()},
                doing=self._steps.doing,
                gate=self._gate.state,
                weight_version=self.weight_version,
                router_url=self._endpoint.url if self._endpoint else "",
                engines=entries_of(self._view.all_last_known()),
            )

    async def revive_group(self, name: str) -> None:
        """Put another in the place of a group whose actor is lost; for a holder of the lock.

        If nothing was under way, its engines are taken over as they are; else they are ended, and
        recovery starts them again.

        Raises:
            ActorLost: nobody can make another.
        """
        # Only then has every engine done what it was told last.
        is_at_rest = self._gate.state == "open"
        version = self.weight_version if is_at_rest else None
        await revive_group(name, self._view, self._remaker, version)
        await self.publish_members()

    async def expected_manifest(self) -> Manifest | None:
        """What a full push must contain; None if the checkpoint does not say."""
        return self._expected

    async def _update_weights(self, push: WeightPush) -> StepReport:
        self._check_push(push)
        return await self._steps.update_weights(push)

    def _check_push(self, push: WeightPush) -> None:
        update = self._config.weights.update
        check_fits(push, self.name, update, self.weight_version, self._expected)
