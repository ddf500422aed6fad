"""The actions of recovery: fence dead engines, boot new ones, admit and readmit them.

Always true: each action on one engine has a deadline, and its failure does not stop the actions on
others.  The caller holds the server's command lock; a boot goes on when it no longer does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from engines.process.background import start_task
from engines.protocol.plain_text import describe
from rollout.config import HealthConfig
from rollout.control.group.server_group import ServerGroup
from rollout.control.recovery.health_tracker import HealthTracker
from rollout.core.fanout import wait_all
from rollout.rules.health import (
    EngineHealth,
    RecoveryState,
    Restart,
    engines_in,
    stale_engines,
    unfenced_dead,
)

logger = logging.getLogger(__name__)


class RecoveryActions:
    """Runs the actions that the tracker's state requires, and records their results there.

    Args:
        more_work: called when an engine died again during recovery.
    """

    def __init__(
        self,
        name: str,
        config: HealthConfig,
        groups: Mapping[str, ServerGroup],
        tracker: HealthTracker,
        more_work: Callable[[], None],
    ) -> None:
        self._name = name
        self._config = config
        self._groups = groups
        self._tracker = tracker
        self._more_work = more_work
        self._boots: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def fence_dead(self) -> None:
        """Fence dead engines now, also those that must not restart yet."""
        dead = unfenced_dead(self._tracker.groups())
        await self._run_all(self._fence(*engine) for engine in dead)

    async def _fence(self, group: str, engine_id: str) -> None:
        reason = self._tracker.why_dead(group, engine_id)
        async with asyncio.timeout(self._tracker.terms[group].margin_s):
            await self._groups[group].fence(engine_id, reason)
        self._tracker.change(group, engine_id, lambda health, _: replace(health, is_fenced=True))

    def boot(self, plan: Iterable[Restart], *, memory_is_free: bool = False) -> None:
        """Start new engines for these, in the background, each on its slot.

        Args:
            memory_is_free: as in ``ServerGroup.boot``.
        """
        for engine in plan:
            key = engine.group, engine.engine_id
            self._tracker.change(*key, EngineHealth.booting)
            boot = start_task(self._boot(*key, memory_is_free), f"boot:{key[1]}")
            self._boots[key] = boot
            boot.add_done_callback(partial(self._has_ended, key))

    def _has_ended(self, key: tuple[str, str], boot: asyncio.Task[None]) -> None:
        if self._boots.get(key) is boot:
            del self._boots[key]
        if boot.cancelled() or (error := boot.exception()) is None:
            return
        logger.error("server %s: recovery: %s", self._name, describe(error))

    async def _boot(self, group: str, engine_id: str, memory_is_free: bool) -> None:
        terms = self._tracker.terms[group]
        if terms.has_processes:
            budget_s = terms.start_timeout_s + 2 * terms.margin_s
        else:  # an attached engine replies or not
            budget_s = 2 * self._config.probe_timeout_s
        try:
            async with asyncio.timeout(budget_s):
                has_booted = await self._groups[group].boot(
                    engine_id, memory_is_free=memory_is_free
                )
        except BaseException as error:  # also when cancelled, else it would be "booting" for ever
            self._mark_dead(group, engine_id, "could not be restarted", error)
            if not isinstance(error, Exception):
                raise
            return
        if has_booted:
            elapsed_s = self._tracker.mark_booted(group, engine_id)
            logger.info("engine %s booted in %.1f s", engine_id, elapsed_s)
            self._more_work()
        else:  # the next probe tries again: the group may refuse boots for long
            self._mark_interrupted(group, engine_id)

    async def wait_for_boots(self, groups: Collection[str]) -> None:
        """Wait until no engine of these groups boots."""
        boots = [boot for (group, _), boot in self._boots.items() if group in groups]
        if boots:
            await asyncio.wait(boots)

    async def stop(self) -> None:
        """End the boots under way."""
        boots = list(self._boots.values())
        for boot in boots:
            boot.cancel()
        await wait_all(boots)

    async def admit(self, groups: Collection[str]) -> None:
        """Let the engines of these groups that have booted join them."""
        booted = engines_in(RecoveryState.BOOTED, self._tracker.groups())
        await self._run_all(self._admit(*engine) for engine in booted if engine[0] in groups)

    async def _admit(self, group: str, engine_id: str) -> None:
        try:
            async with asyncio.timeout(self._tracker.terms[group].admit_timeout_s):
                has_joined = await self._groups[group].admit(engine_id)
        except Exception as error:
            self._mark_dead(group, engine_id, "could not join its group", error)
            return
        if has_joined:
            self._tracker.change(group, engine_id, EngineHealth.admitted)
        else:
            self._mark_interrupted(group, engine_id)

    def _mark_interrupted(self, group: str, engine_id: str) -> None:
        self._tracker.mark_interrupted(group, engine_id)
        logger.warning("engine %s: its boot was ended, and begins again later", engine_id)

    async def readmit_stale(self, version: int) -> None:
        """Let stale engines serve that hold ``version`` or can restore it."""
        stale = stale_engines(self._tracker.groups())
        await self._run_all(self._readmit(*engine, version) for engine in stale)

    async def _readmit(self, group: str, engine_id: str, version: int) -> None:
        try:
            async with asyncio.timeout(self._tracker.terms[group].readmit_timeout_s):
                serves = await self._groups[group].readmit(engine_id, version)
        except Exception as error:
            what = f"could not restore weight version {version}"
            self._mark_dead(group, engine_id, what, error)
            return
        if serves:
            self._tracker.mark_verified(group, engine_id)
            logger.info("engine %s serves again at weight version %d", engine_id, version)
        else:
            self._tracker.change(group, engine_id, lambda health, _: health.not_readmitted())

    def _mark_dead(self, group: str, engine_id: str, what: str, error: BaseException) -> None:
        self._tracker.mark_dead(group, engine_id, what, error)
        self._more_work()

    async def _run_all(self, acts: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run all at the same time; the failure of one is logged and does not stop the others."""

        async def log_failure(act: Coroutine[Any, Any, None]) -> None:
            try:
                await act
            except Exception as error:
                logger.error("server %s: recovery: %s", self._name, describe(error))

        # A cancel cancels them all, and ends the engines that they were starting.
        async with asyncio.TaskGroup() as tasks:
            for act in acts:
                tasks.create_task(log_failure(act))
