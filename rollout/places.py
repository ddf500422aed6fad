"""Engines leave a server and come back while it runs.

Always true: an engine that leaves gets no new request before it is asked anything, and those it
has end by themselves if they can within ``drain_timeout_s``; one that comes is in routing only
after its group has proved it.  The caller holds the server's command lock.
"""

from __future__ import annotations

import asyncio
import logging

from rollout.config import ServerConfig
from rollout.errors import EngineFailure, LifecycleError
from rollout.gatekeeper import Gatekeeper
from rollout.group_view import GroupView
from rollout.lending import check_can_leave
from rollout.ports import GROUP_MARGIN_S
from rollout.recovery import Recovery
from rollout.types import EngineReport, EngineStatus

logger = logging.getLogger(__name__)


class Places:
    """Who has which place of a server."""

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        view: GroupView,
        gate: Gatekeeper,
        recovery: Recovery,
    ) -> None:
        self._name = name
        self._config = config
        self._view = view
        self._gate = gate
        self._recovery = recovery

    async def remove(self, engine_id: str, keep_process: bool) -> EngineReport:
        """Out of routing, drained, its memory measured free; then its place is free.

        Raises:
            LifecycleError: there is no such engine, or too few would be left.
            EngineFailure: its memory did not come free; it is fenced.
        """
        statuses = await self._view.look()
        group = next(
            (
                name
                for name, status in statuses.items()
                if any(one.engine_id == engine_id for one in status.engines)
            ),
            None,
        )
        if group is None:
            known = [one.engine_id for status in statuses.values() for one in status.engines]
            raise LifecycleError(
                f"server {self._name} has no engine {engine_id} to remove; known: "
                f"{', '.join(known)}",
                command="remove_engine",
            )
        check_can_leave(engine_id, statuses[group], self._config.groups[group].min_engines)
        budgets = self._config.lifecycle
        self._gate.leaving.add(engine_id)
        try:
            await self._gate.publish_members()
            late = await self._gate.drain(budgets.drain_timeout_s, engine_id)
            if late:
                logger.warning("server %s: %s; they are aborted", self._name, late)
            async with asyncio.timeout(
                budgets.pause_timeout_s
                + budgets.flush_timeout_s
                + budgets.release_timeout_s
                + budgets.stop_timeout_s
                + 2 * GROUP_MARGIN_S
            ):
                report = await self._view.groups[group].remove(engine_id, keep_process)
            self._recovery.has_left(group, engine_id)
        except TimeoutError:
            raise _late(engine_id, "remove") from None
        finally:
            # Whatever became of it, its group knows: it is gone, fenced, or serves as before.
            self._gate.leaving.discard(engine_id)
            await self._gate.publish_members()
            self._recovery.look_soon()
        return report

    async def add(self, engine_id: str, version: int) -> EngineStatus:
        """Take a free place back; the engine serves at once if it holds ``version`` for certain.

        Raises:
            LifecycleError: no such place is free, or its memory is the trainer's now.
            EngineFailure: it did not start or wake, and its place is free; or it does not hold
                the weights that it says it holds, and it is fenced.
        """
        statuses = await self._view.look()
        group = next((name for name, one in statuses.items() if engine_id in one.lent), None)
        if group is None:
            free = [one for status in statuses.values() for one in status.lent]
            raise LifecycleError(
                f"server {self._name} has no free place {engine_id}; free: "
                f"{', '.join(free) or 'none'}",
                command="add_engine",
            )
        budgets = self._config.lifecycle
        try:
            async with asyncio.timeout(
                self._config.groups[group].engine.start_timeout_s
                + 2 * budgets.resume_timeout_s
                + budgets.update_timeout_s
                + 2 * GROUP_MARGIN_S
            ):
                status = await self._view.groups[group].add(engine_id, version)
            self._recovery.has_joined(group, engine_id, is_stale=status.is_stale)
        except TimeoutError:
            raise _late(engine_id, "add") from None
        finally:
            await self._gate.publish_members()
            self._recovery.look_soon()
        return status


def _late(engine_id: str, operation: str) -> EngineFailure:
    return EngineFailure(
        f"engine {engine_id}: {operation} did not end in time; its status says how far it came",
        engine_id=engine_id,
        operation=operation,
    )
