"""Engines that leave and join a server while the others serve."""

from __future__ import annotations

from rollout.control.server.server import RolloutServer
from rollout.core.arguments import checked
from rollout.core.pending import Pending
from rollout.core.types import EngineReport, EngineStatus
from rollout.runtime.calls.caller import Caller


class ServerEngines:
    """``policy.engines``: removes and adds single engines.  ``policy.status()`` lists them."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    @checked
    def remove(self, engine_id: str) -> Pending[EngineReport]:
        """Remove an engine while the others serve: drain, free and measure its memory, end it.

        Args:
            engine_id: as in ``ServerHandle.status``.

        Raises:
            LifecycleError: from ``result()`` or ``await``: there is no such engine, or too few
                would remain.
        """
        return self._caller.call(RolloutServer.remove_engine, engine_id)

    def add(self, engine_id: str) -> Pending[EngineStatus]:
        """Start or wake a removed engine; it serves after its weights are verified.

        Args:
            engine_id: one of the group's ``vacant_slots`` in ``ServerHandle.status``.

        Raises:
            LifecycleError: from ``result()`` or ``await``: no engine of that id was removed.
        """
        return self._caller.call(RolloutServer.add_engine, engine_id)
