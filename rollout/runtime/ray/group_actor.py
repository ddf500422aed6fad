"""The actor of a group: the plain class, with the differences for an actor.

It is an async actor.  A process that starts for it imports only this module: it is waited for when
a group comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollout.control.engine.group_settings import GroupSettings
from rollout.control.group.engine_recovery import LostState
from rollout.control.group.server_group import ServerGroup
from rollout.core.types import EngineSlot, GroupStatus
from rollout.observability.timeline.span_file import create_timeline
from rollout.rules.deadlines import kill_timeout_s
from rollout.runtime.ray.engine_launcher import EnginePlacement, RayLauncher
from rollout.runtime.ray.remote_call import TracedActor
from rollout.runtime.worker_process import keep_what_is_loaded


class ServerGroupActor(TracedActor, ServerGroup):
    """A ``ServerGroup`` whose engines are owned by actors on their slots.

    Args:
        lost: the group whose engines this one takes over, or None for a new group.
    """

    def __init__(
        self,
        settings: GroupSettings,
        slots: Sequence[EngineSlot],
        placement: EnginePlacement,
        lost: LostState | None = None,
    ) -> None:
        self._launcher = RayLauncher(placement, slots)
        super().__init__(
            settings,
            slots,
            self._launcher,
            timeline=create_timeline(settings.log_dir, settings.source, otel=settings.otel),
        )
        self._lost = lost

    async def start(self) -> GroupStatus:
        keep_what_is_loaded()
        lost = self._lost
        if lost is None:
            return await super().start()
        known = (*lost.known.engines, *lost.known.asleep)
        names = [engine.process for engine in known]
        await self._launcher.end_others(names, kill_timeout_s(self._settings.group.engine))
        running = await asyncio.gather(
            *(
                self._launcher.find(
                    self._starter.spec(self._slots[engine.engine_id], engine.process_name),
                    engine,
                )
                for engine in known
            )
        )
        return await self.take_over(lost, dict(zip(names, running, strict=True)))
