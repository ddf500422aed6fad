"""What the router of a server is told: whether requests come in, and which engines get them.

Always true: an older view of the members never replaces a newer one; the gate is known here only
after the router has confirmed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from engines.protocol import WorkerType
from rollout.errors import PhaseFailed, PhaseTimeout
from rollout.health import Verdict
from rollout.ports import RouterPort
from rollout.routing import Member, MemberState
from rollout.timeline.recorder import Timeline
from rollout.types import EngineStatus, GroupStatus

Out = Mapping[str, tuple[Verdict, str]]
"""Engines that get no requests whatever their group says, and why."""


class Gatekeeper:
    """The server's end of its router.

    Args:
        look: how the groups are now.
        fewest: how many engines a group must have, by its name and how many it has in all.
        out_of_routing: whom recovery keeps out.
        has_published: told after the router knows of them.
        timeline: where each change of the gate is recorded.

    Attributes:
        state: open, holding or closed.
        leaving: engines that are about to be removed: they finish what they have.
    """

    def __init__(
        self,
        router: RouterPort,
        look: Callable[[], Awaitable[Mapping[str, GroupStatus]]],
        fewest: Callable[[str, int], int],
        out_of_routing: Callable[[], Out],
        has_published: Callable[[Out], None],
        timeline: Timeline,
    ) -> None:
        self.state = "closed"
        self.leaving: set[str] = set()
        self._router = router
        self._look = look
        self._fewest = fewest
        self._out_of_routing = out_of_routing
        self._has_published = has_published
        self._timeline = timeline
        self._publishing = asyncio.Lock()
        self._epoch = 0

    async def open(self, weight_version: int) -> None:
        """Let requests in, to whoever serves now.

        Raises:
            PhaseFailed: a group has too few engines; the gate stays as it is.
        """
        for name, group in (await self.publish_members()).items():
            left = sum(not engine.fenced_because for engine in group.engines)
            fewest = self._fewest(name, len(group.engines))
            if left < fewest:
                fenced = "; ".join(
                    one.fenced_because for one in group.engines if one.fenced_because
                )
                raise PhaseFailed(
                    f"group {name}: {left} of {len(group.engines)} engines left, {fewest} needed; "
                    f"the gate stays {self.state}: {fenced}",
                    phase="continue",
                )
        await self._router.set_gate("open", weight_version=weight_version)
        self.state = "open"
        self._timeline.event("gate", f"open at weight version {weight_version}")

    async def shut(self, state: str, reason: str, phase: str) -> None:
        """Hold requests, or turn them away, and say why."""
        await self._router.set_gate(state, reason=reason, phase=phase)
        self.state = state
        self._timeline.event("gate", f"{state}: {reason}")

    async def drain(self, timeout_s: float, engine_id: str = "") -> str:
        """Wait until requests in flight, or those of one engine, have ended by themselves.

        Returns:
            Who still has some after ``timeout_s``; empty if nobody.
        """
        try:
            await self._router.drained(timeout_s, engine_id)
        except PhaseTimeout as error:
            return str(error)
        return ""

    async def publish_members(self) -> Mapping[str, GroupStatus]:
        """Tell the router who serves, as it is now; how the groups are."""
        async with self._publishing:  # or an older view could get a newer epoch
            statuses = await self._look()
            out = self._out_of_routing()
            self._epoch += 1
            await self._router.set_members(
                self._epoch,
                [
                    self._member(status.worker_type, engine, out)
                    for status in statuses.values()
                    for engine in status.engines
                ],
            )
            self._has_published(out)
            return statuses

    def _member(self, worker_type: WorkerType, engine: EngineStatus, out: Out) -> Member:
        made = member(worker_type, engine, out)
        if engine.engine_id in self.leaving and made.state is MemberState.SERVING:
            return replace(made, state=MemberState.DRAINING, because="it is being removed")
        return made


def member(worker_type: WorkerType, engine: EngineStatus, out: Out) -> Member:
    """An engine as the router should treat it."""
    state, because = MemberState.SERVING, ""
    if engine.fenced_because:
        state, because = MemberState.FENCED, engine.fenced_because
    elif engine.is_stale:
        state, because = MemberState.FENCED, "started again, it lacks the published weights"
    elif engine.engine_id in out:
        verdict, because = out[engine.engine_id]
        state = MemberState.DEAD if verdict is Verdict.DEAD else MemberState.DRAINING
    return Member(engine.engine_id, engine.endpoint, state, worker_type, because=because)
