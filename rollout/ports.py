"""What a server asks of its groups and of its router: plain objects here, or handles of actors.

Always true: every method starts its work at once and returns something to await, so that all
groups are asked before any is waited for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from engines.protocol import Endpoint
from rollout.routing import Member
from rollout.timeline.span import Excerpt
from rollout.types import EngineReport, EngineStatus, GroupStatus, PhaseReport
from rollout.watching import GroupProbe
from rollout.weights.push import WeightPush

GROUP_MARGIN_S = 30.0
"""A group bounds its calls of engines itself; past this much more, the group itself is lost."""


class RecoverableGroup(Protocol):
    """What recovery asks of a group."""

    def probe(self, budget_s: float, distrusted: Sequence[str] = ()) -> Awaitable[GroupProbe]: ...
    def fence(self, engine_id: str, reason: str) -> Awaitable[None]: ...
    def restart(self, engine_id: str) -> Awaitable[None]: ...
    def adopt(self, engine_id: str, version: int) -> Awaitable[bool]: ...


class GroupPort(RecoverableGroup, Protocol):
    """A ``ServerGroup``."""

    def start(self) -> Awaitable[GroupStatus]: ...
    def stop(self) -> Awaitable[None]: ...
    def pause(self, order: int) -> Awaitable[PhaseReport]: ...
    def flush(self, order: int) -> Awaitable[PhaseReport]: ...
    def release(self, order: int) -> Awaitable[PhaseReport]: ...
    def resume_weights(self, order: int) -> Awaitable[PhaseReport]: ...
    def update_weights(self, push: WeightPush, order: int) -> Awaitable[PhaseReport]: ...
    def verify(self, version: int, order: int) -> Awaitable[PhaseReport]: ...
    def resume_kv(self, order: int) -> Awaitable[PhaseReport]: ...
    def continue_generation(self, order: int) -> Awaitable[PhaseReport]: ...
    def remove(self, engine_id: str, keep_process: bool) -> Awaitable[EngineReport]: ...
    def add(self, engine_id: str, version: int) -> Awaitable[EngineStatus]: ...
    def status(self) -> Awaitable[GroupStatus]: ...
    def recorded(self, cursor: int) -> Awaitable[Excerpt]: ...
    def log_tail(self, engine_id: str) -> Awaitable[str]: ...


class FailureSource(Protocol):
    """Who sees requests fail: the router."""

    def failures(self, timeout_s: float) -> Awaitable[list[tuple[str, str]]]:
        """Engines that were taken out of routing since the last call, and why.

        Returns when there is one, or empty after ``timeout_s``.
        """
        ...


class PagePort(Protocol):
    """A ``PageHost``: what people look at."""

    def start(self, server: Any) -> Awaitable[str]: ...
    def stop(self) -> Awaitable[None]: ...


class RouterPort(FailureSource, Protocol):
    """A ``RouterHost``."""

    def start(self) -> Awaitable[Endpoint]: ...
    def stop(self, budget_s: float) -> Awaitable[None]: ...
    def set_gate(
        self,
        state: str,
        *,
        reason: str = "",
        phase: str = "",
        weight_version: int | None = None,
    ) -> Awaitable[Any]: ...
    def set_members(self, epoch: int, members: list[Member]) -> Awaitable[Any]: ...
    def drained(self, timeout_s: float, engine_id: str = "") -> Awaitable[None]:
        """Wait until no engine has a request of the router, or until this one has none.

        Raises:
            PhaseTimeout: naming who still has some.
        """
        ...

    def stats(self) -> Awaitable[dict[str, Any]]: ...


class Remaker(Protocol):
    """Who can make a part of the server again that was lost with its actor."""

    def router(self, endpoint: Endpoint) -> Awaitable[RouterPort]:
        """A router that will listen there; the lost one is ended for certain."""
        ...

    def group(self, name: str, known: GroupStatus, version: int | None) -> Awaitable[GroupPort]:
        """A group in the place of a lost one, with its engines as they were last known.

        Args:
            version: the weight version they must hold to be taken over as they are; None ends
                them all, to be started again.
        """
        ...
