"""Removes engines from a running server, and adds them again.

Always true: a leaving engine is first taken out of routing, and its requests get
``drain_timeout_s`` to finish.  An added engine is in routing only after its group verified it.
What is done to an engine is recorded and published, also if the call is cancelled.  The caller
holds the server's command lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollout.config import ServerConfig
from rollout.control.engine.start import start_deadline_s
from rollout.control.group.scaling import check_can_leave
from rollout.control.recovery.monitor import RecoveryMonitor
from rollout.control.server.gate_control import GateControl
from rollout.control.server.group_registry import GroupRegistry
from rollout.core.errors import EngineFailure, LifecycleError
from rollout.core.fanout import run_to_completion
from rollout.core.types import EngineReport, EngineStatus
from rollout.rules.deadlines import STOP_TIMEOUT_S, group_margin_s, leave_timeout_s

logger = logging.getLogger(__name__)


class ElasticSlots:
    """The slots of a server whose engines come and go.

    Args:
        publish: sends the router the members, and writes them to the journal.
    """

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        registry: GroupRegistry,
        gate: GateControl,
        recovery: RecoveryMonitor,
        publish: Callable[[], Awaitable[object]],
    ) -> None:
        self._publish = publish
        self._name = name
        self._config = config
        self._registry = registry
        self._gate = gate
        self._recovery = recovery

    async def remove(self, engine_id: str) -> EngineReport:
        """See ``RolloutServer.remove_engine``."""
        statuses = await self._registry.statuses()
        group = next(
            (
                name
                for name, status in statuses.items()
                if any(engine.engine_id == engine_id for engine in status.engines)
            ),
            None,
        )
        if group is None:
            known = [engine.engine_id for status in statuses.values() for engine in status.engines]
            raise LifecycleError(
                f"server {self._name} has no engine {engine_id} to remove; known: "
                f"{', '.join(known)}",
                command="engines.remove",
            )
        check_can_leave(engine_id, statuses[group], self._config.groups[group].min_engines)
        self._gate.leaving.add(engine_id)
        try:
            await self._gate.publish_members()
            late = await self._gate.drain(self._config.lifecycle.drain_timeout_s, engine_id)
            if late:
                logger.warning("server %s: %s; these requests are aborted", self._name, late)
            report = await run_to_completion(self._remove(group, engine_id))
        finally:
            # Its group knows the result: it is removed, fenced, or serves as before.
            self._gate.leaving.discard(engine_id)
            await run_to_completion(self._publish_change())
        return report

    async def _remove(self, group: str, engine_id: str) -> EngineReport:
        margin_s = 2 * group_margin_s(self._config.groups[group].engine)
        budget_s = leave_timeout_s(self._config.lifecycle) + STOP_TIMEOUT_S + margin_s
        try:
            async with asyncio.timeout(budget_s):
                report = await self._registry.groups[group].remove(engine_id)
        except TimeoutError:
            raise _late(engine_id, "remove") from None
        self._recovery.tracker.remove(group, engine_id)
        return report

    async def _publish_change(self) -> None:
        self._recovery.probe_soon()
        await self._publish()

    async def boot(self, engine_id: str) -> None:
        """Start the engine of a vacant slot where none sleeps; the caller does not hold the lock.

        Raises:
            LifecycleError: the slot is not vacant.
            EngineFailure: it did not start.
        """
        group = await self._group_with_vacancy(engine_id)
        engine = self._config.groups[group].engine
        budget_s = start_deadline_s(self._config.model_path, engine) + 2 * group_margin_s(engine)
        try:
            async with asyncio.timeout(budget_s):
                await self._registry.groups[group].boot(engine_id)
        except TimeoutError:
            raise _late(engine_id, "add") from None

    async def end_boot(self, engine_id: str) -> None:
        """End the engine of a vacant slot that has booted and will not join: it has memory, and
        only its group knows of it."""
        group = await self._group_with_vacancy(engine_id)
        async with asyncio.timeout(2 * group_margin_s(self._config.groups[group].engine)):
            await self._registry.groups[group].end_boot(engine_id)

    async def add(self, engine_id: str, version: int) -> EngineStatus:
        """Let the engine of a vacant slot join, which has booted or sleeps there.

        It serves immediately if ``version`` is verified on it.
        """
        group = await self._group_with_vacancy(engine_id)
        return await run_to_completion(self._add(group, engine_id, version))

    async def _add(self, group: str, engine_id: str, version: int) -> EngineStatus:
        budgets, engine = self._config.lifecycle, self._config.groups[group].engine
        try:
            async with asyncio.timeout(
                2 * budgets.memory_timeout_s + budgets.update_timeout_s + 2 * group_margin_s(engine)
            ):
                status = await self._registry.groups[group].add(engine_id, version)
            self._recovery.tracker.add(group, engine_id, is_stale=status.is_stale)
        except TimeoutError:
            raise _late(engine_id, "add") from None
        finally:
            await self._publish_change()
        return status

    async def _group_with_vacancy(self, engine_id: str) -> str:
        statuses = await self._registry.statuses()
        for name, status in statuses.items():
            if engine_id in status.vacant_slots:
                return name
        vacant = [slot for status in statuses.values() for slot in status.vacant_slots]
        raise LifecycleError(
            f"server {self._name} has no vacant slot {engine_id}; vacant: "
            f"{', '.join(vacant) or 'none'}",
            command="engines.add",
        )


def _late(engine_id: str, operation: str) -> EngineFailure:
    return EngineFailure(
        f"engine {engine_id}: {operation} did not end in time; see its status for how far it got",
        engine_id=engine_id,
        operation=operation,
    )
