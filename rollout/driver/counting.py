"""Seconds and replies of one batch, from what the slots and the scope have counted."""

from __future__ import annotations

import asyncio

from rollout.driver.completing import Scope
from rollout.driver.limiter import Limiter
from rollout.driver.metrics import StepStats


class Counting:
    """Between ``begin`` and ``end`` of each batch of one stream."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._began_s = self._used_s = 0.0
        self._idle_at_end_s: float | None = None

    def begin(self, scope: Scope) -> StepStats:
        """What the batch that begins now is counted in."""
        self._used_s, idle_s = self._limiter.seconds()
        self._began_s = asyncio.get_running_loop().time()
        scope.num_lost = scope.num_cut = 0
        boundary_s = 0.0 if self._idle_at_end_s is None else idle_s - self._idle_at_end_s
        return StepStats(boundary_s=boundary_s)

    def end(self, stats: StepStats, scope: Scope) -> None:
        """The batch is full."""
        used_s, self._idle_at_end_s = self._limiter.seconds()
        stats.elapsed_s = asyncio.get_running_loop().time() - self._began_s
        stats.slot_s = used_s - self._used_s
        stats.num_slots = self._limiter.limit
        stats.num_lost, stats.num_cut = scope.num_lost, scope.num_cut
