"""The actions of recovery: fence dead engines, restart them, readmit them.

Always true: each action on one engine has a deadline, and its failure does not stop the actions on
others.  The caller holds the server's command lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from engines.protocol.plain_text import describe
from rollout.config import HealthConfig
from rollout.control.group.server_group import ServerGroup
from rollout.control.recovery.health_tracker import HealthTracker
from rollout.rules.health import Restart

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

    async def fence_dead(self) -> None:
        """Fence dead engines now, also those that must not restart yet."""
        await self._run_all(self._fence(*engine) for engine in self._tracker.unfenced_dead())

    async def _fence(self, group: str, engine_id: str) -> None:
        reason = self._tracker.why_dead(group, engine_id)
        async with asyncio.timeout(self._tracker.terms[group].margin_s):
            await self._groups[group].fence(engine_id, reason)
        self._tracker.mark_fenced(group, engine_id)

    async def restart(self, plan: Iterable[Restart]) -> None:
        """Restart these engines, each on its slot."""
        await self._run_all(self._restart(engine.group, engine.engine_id) for engine in plan)

    async def _restart(self, group: str, engine_id: str) -> None:
        terms = self._tracker.terms[group]
        if terms.has_processes:
            budget_s = terms.start_timeout_s + 2 * terms.margin_s
        else:  # an attached engine replies or not: do not hold the lock for long
            budget_s = 2 * self._config.probe_timeout_s
        self._tracker.mark_restarting(group, engine_id)
        try:
            async with asyncio.timeout(budget_s):
                await self._groups[group].restart(engine_id)
        except (
            BaseException
        ) as error:  # also when cancelled, else it would stay "restarting" for ever
            self._mark_dead(group, engine_id, "could not be restarted", error)
            if not isinstance(error, Exception):
                raise
            return
        elapsed_s = self._tracker.mark_started(group, engine_id)
        logger.info("engine %s restarted in %.1f s", engine_id, elapsed_s)

    async def readmit_stale(self, version: int) -> None:
        """Let stale engines serve that hold ``version`` or can restore it."""
        await self._run_all(self._readmit(*engine, version) for engine in self._tracker.stale())

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
            self._tracker.mark_not_readmitted(group, engine_id)

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
