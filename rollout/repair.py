"""End dead engines, start them again, let them serve: what recovery does to the groups.

Always true: whatever is done to one engine has a deadline, and its failure hinders no other; the
caller holds the server's command lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from rollout.config import HealthConfig
from rollout.fanout import describe
from rollout.health import Restart
from rollout.health_record import HealthRecord
from rollout.ports import GROUP_MARGIN_S, RecoverableGroup

logger = logging.getLogger(__name__)

_KILL_TIMEOUT_S = 40.0


class Repair:
    """Acts on what the record says, and writes down what came of it.

    Args:
        more_work: called when an engine that was being brought back has died again.
    """

    def __init__(
        self,
        name: str,
        config: HealthConfig,
        groups: Mapping[str, RecoverableGroup],
        record: HealthRecord,
        more_work: Callable[[], None],
    ) -> None:
        self._name = name
        self._config = config
        self._groups = groups
        self._record = record
        self._more_work = more_work

    async def fence_dead(self) -> None:
        """End dead engines now, whether or not they may be started again yet."""
        await self._at_once(self._fence(*one) for one in self._record.unfenced_dead())

    async def _fence(self, group: str, engine_id: str) -> None:
        because = self._record.why_dead(group, engine_id)
        async with asyncio.timeout(_KILL_TIMEOUT_S):
            await self._groups[group].fence(engine_id, because)
        self._record.is_fenced(group, engine_id)

    async def restart(self, plan: Iterable[Restart]) -> None:
        """Start these again, each in its place."""
        await self._at_once(self._start_again(one.group, one.engine_id) for one in plan)

    async def _start_again(self, group: str, engine_id: str) -> None:
        terms = self._record.terms[group]
        if terms.has_processes:
            budget_s = terms.start_timeout_s + 2 * GROUP_MARGIN_S
        else:  # it is there or it is not: nothing is worth holding the lock for
            budget_s = 2 * self._config.probe_timeout_s
        self._record.is_restarting(group, engine_id)
        try:
            async with asyncio.timeout(budget_s):
                await self._groups[group].restart(engine_id)
        except BaseException as error:  # cancelled, it would be on its way for ever
            self._has_died(group, engine_id, "could not be started again", error)
            if not isinstance(error, Exception):
                raise
            return
        elapsed_s = self._record.has_started(group, engine_id)
        logger.info("engine %s was started again in %.1f s", engine_id, elapsed_s)

    async def adopt_stale(self, version: int) -> None:
        """Let stale engines serve that hold ``version`` or can be given it."""
        await self._at_once(self._adopt(*one, version) for one in self._record.stale())

    async def _adopt(self, group: str, engine_id: str, version: int) -> None:
        try:
            async with asyncio.timeout(self._record.terms[group].adopt_timeout_s):
                serves = await self._groups[group].adopt(engine_id, version)
        except Exception as error:
            what = f"could not be given weight version {version}"
            self._has_died(group, engine_id, what, error)
            return
        if serves:
            self._record.is_proved(group, engine_id)
            logger.info("engine %s serves again at weight version %d", engine_id, version)

    def _has_died(self, group: str, engine_id: str, what: str, error: BaseException) -> None:
        self._record.has_died(group, engine_id, what, error)
        self._more_work()

    async def _at_once(self, acts: Iterable[Coroutine[Any, Any, None]]) -> None:
        """All at the same time; one that fails is told and hinders no other."""

        async def tell(act: Coroutine[Any, Any, None]) -> None:
            try:
                await act
            except Exception as error:
                logger.error("server %s: recovery: %s", self._name, describe(error))

        # Cancelled, it cancels them all: what they were starting is ended.
        async with asyncio.TaskGroup() as tasks:
            for act in acts:
                tasks.create_task(tell(act))
