"""The health of each engine of a server, by group.

Always true: nothing here awaits, so each call is atomic.  A probe that began before an engine died
never marks that engine as healthy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from engines.protocol.plain_text import describe
from rollout.config import HealthConfig, ServerConfig
from rollout.control.engine.start import start_deadline_s
from rollout.control.group.health_probe import GroupProbe
from rollout.rules.deadlines import group_margin_s, leave_timeout_s
from rollout.rules.health import (
    EngineHealth,
    GroupHealth,
    Liveness,
    ProbeResult,
    RecoveryState,
    has_enough_without,
    liveness,
    may_return,
    out_of_routing,
)
from rollout.rules.lifecycle import Phase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """The settings of a group that recovery needs.

    Attributes:
        min_engines: least number of engines it needs to continue; None: all.
        has_processes: we launched its engines, and may kill them.
        start_timeout_s: deadline for one engine to start.
        admit_timeout_s: deadline for the calls that bring a new engine to the phase of its group.
        margin_s: the group may take this long to end an engine.
    """

    needs_offload: bool
    min_engines: int | None
    has_processes: bool = True
    start_timeout_s: float = 300.0
    admit_timeout_s: float = 180.0
    margin_s: float = 40.0
    readmit_timeout_s: float = 600.0


def recovery_terms(config: ServerConfig, name: str) -> GroupTerms:
    """The recovery settings of one group of a server."""
    group = config.groups[name]
    budgets = config.lifecycle
    fewest = None if budgets.on_failure == "raise" else 1
    return GroupTerms(
        needs_offload=group.needs_offload,
        min_engines=fewest if group.min_engines is None else group.min_engines,
        has_processes=not group.engine.is_attached,
        start_timeout_s=start_deadline_s(config.model_path, group.engine),
        admit_timeout_s=max(
            leave_timeout_s(budgets),
            2 * budgets.memory_timeout_s + budgets.command_timeout_s,  # of one that sleeps
        ),
        margin_s=group_margin_s(group.engine),
        readmit_timeout_s=budgets.update_timeout_s,
    )


class HealthTracker:
    """The health of all engines.

    Args:
        phases, clock: return the phase of each group, and the time in seconds.

    Attributes:
        has_sources: published weights can be restored, from a weight store or a folder.
        num_restarts: of all engines so far.
        standbys: by group, the slots on which an engine sleeps, at the last probe.
    """

    def __init__(
        self,
        config: HealthConfig,
        terms: Mapping[str, GroupTerms],
        phases: Callable[[], Mapping[str, Phase]],
        clock: Callable[[], float],
        *,
        has_sources: bool = False,
    ) -> None:
        self.terms = dict(terms)
        self.has_sources = has_sources
        self.num_restarts = 0
        self._config = config
        self._phases = phases
        self._clock = clock
        self._engines: dict[str, dict[str, EngineHealth]] = {group: {} for group in terms}
        self.standbys: dict[str, frozenset[str]] = dict.fromkeys(terms, frozenset())

    # -- reports ----------------------------------------------------------------------------

    def add_all(self, engines: Mapping[str, Iterable[str]]) -> None:
        """Track engines that have just started."""
        for group, ids in engines.items():
            self._engines[group] = {
                engine_id: EngineHealth(since_s=self._clock()) for engine_id in ids
            }

    def add(self, group: str, engine_id: str, *, is_stale: bool) -> None:
        """Track an engine that was added to a running group."""
        state = RecoveryState.STALE if is_stale else RecoveryState.SERVING
        self._engines[group][engine_id] = EngineHealth(state, since_s=self._clock())

    def remove(self, group: str, engine_id: str) -> None:
        """Stop tracking a removed engine."""
        self._engines[group].pop(engine_id, None)

    def snapshot(self) -> dict[str, dict[str, EngineHealth]]:
        """The current health of all engines."""
        return {group: dict(engines) for group, engines in self._engines.items()}

    def apply_probe(
        self, group: str, probe: GroupProbe, before: Mapping[str, EngineHealth]
    ) -> None:
        """Apply the results of a probe.

        Args:
            before: health of the engines when the probe began.
        """
        engines = self._engines[group]
        self.standbys[group] = probe.standbys
        now_s = self._clock()
        is_there = {found.engine_id for found in probe.engines}
        for engine_id in before.keys() - is_there:
            if engine_id in engines and engines[engine_id].is_same_life(before[engine_id]):
                del engines[engine_id]  # it was removed, and the call that did it was late
        for found in probe.engines:
            if found.engine_id in before and found.engine_id not in engines:
                continue  # it was removed meanwhile
            health = engines.setdefault(found.engine_id, EngineHealth(since_s=now_s))
            if found.engine_id in before and not health.is_same_life(before[found.engine_id]):
                continue  # it was replaced meanwhile: the result is about the old engine
            result = found.result
            if result in (ProbeResult.FAILED, ProbeResult.CHANGED) and not probe.is_steady:
                result = ProbeResult.ASLEEP  # a command was running: it may be late, or changed it
            health = health.after(result, self._config)
            if (
                health.state is RecoveryState.STALE
                and not found.is_stale
                and result is not ProbeResult.FENCED
            ):
                logger.info("engine %s has the published weights again", found.engine_id)
                health = health.verified(now_s)
            elif health.state is RecoveryState.SERVING and found.is_stale:
                health = health.stale(now_s)
            engines[found.engine_id] = health
            self._update_liveness(group, found.engine_id, found.reason)

    def apply_router_report(self, engine_id: str, reason: str) -> None:
        """The router lost a request to this engine."""
        for group, engines in self._engines.items():
            if engine_id in engines:
                engines[engine_id] = engines[engine_id].after(ProbeResult.REPORTED, self._config)
                self._update_liveness(group, engine_id, reason)

    def _update_liveness(self, group: str, engine_id: str, reason: str) -> None:
        health = self._engines[group][engine_id]
        if health.is_out or liveness(health.streaks, self._config) is not Liveness.DEAD:
            return  # Others of the group count only here: a round of probes stays linear in them.
        can_spare = has_enough_without(engine_id, self._engines[group], self._min_engines(group))
        if liveness(health.streaks, self._config, can_spare=can_spare) is Liveness.DEAD:
            reason = f"engine {engine_id} is dead: {reason or 'the router lost it too often'}"
            logger.error("%s", reason, extra={"engine_id": engine_id})
            self._engines[group][engine_id] = health.died(reason, self._clock(), self._config)

    # -- results of actions -----------------------------------------------------------------

    def change(
        self, group: str, engine_id: str, change: Callable[[EngineHealth, float], EngineHealth]
    ) -> None:
        """An action on an engine has changed its health; ``change`` gets that, and the time."""
        engines = self._engines[group]
        engines[engine_id] = change(engines[engine_id], self._clock())

    def mark_booted(self, group: str, engine_id: str) -> float:
        """Record the end of a boot; returns its duration in seconds."""
        self.num_restarts += 1
        since_s = self._engines[group][engine_id].since_s
        self.change(group, engine_id, EngineHealth.booted)
        return self._engines[group][engine_id].since_s - since_s

    def mark_interrupted(self, group: str, engine_id: str) -> None:
        """A boot was ended, unless its engine was removed meanwhile."""
        if engine_id in self._engines[group]:
            self.change(group, engine_id, EngineHealth.interrupted)

    def mark_verified(self, group: str, engine_id: str) -> None:
        """It serves again, unless a probe has seen that, or its death, meanwhile."""
        if self._engines[group][engine_id].state is RecoveryState.STALE:
            self.change(group, engine_id, EngineHealth.verified)

    def mark_dead(self, group: str, engine_id: str, what: str, error: BaseException) -> None:
        """An action on it has failed, unless a probe has seen its death meanwhile."""
        if self._engines[group][engine_id].state is RecoveryState.DEAD:
            return
        reason = f"engine {engine_id} {what}: {describe(error)}"
        logger.error("%s", reason, extra={"engine_id": engine_id})
        self.change(
            group, engine_id, lambda health, now_s: health.died(reason, now_s, self._config)
        )

    # -- decisions --------------------------------------------------------------------------

    def distrusted(self, group: str) -> list[str]:
        """Engines that the router lost: a probe must also check their weight version."""
        engines = self._engines[group]
        return [engine_id for engine_id, health in engines.items() if health.streaks.reports]

    def why_dead(self, group: str, engine_id: str) -> str:
        """Why an engine died, and whether recovery has given up on it."""
        health = self._engines[group][engine_id]
        if not health.is_given_up(self._max_restarts(group)):
            return health.reason
        return f"{health.reason} (given up after {health.num_restarts} restarts)"

    def out_of_routing(self) -> dict[str, tuple[Liveness, str]]:
        """Engines without requests, also if their group reports them as serving, and why."""
        out: dict[str, tuple[Liveness, str]] = {}
        for group in self.groups():
            out |= out_of_routing(group, self._config)
        return out

    def may_return(self, *, is_checkpoint: bool) -> set[str]:
        """Engines that recovery may make serve again without a command: dead ones with restarts
        left, while the published weights can be restored; for the others, the next probe decides.

        Args:
            is_checkpoint: the published weights are those that engines start with.
        """
        return {
            engine_id
            for group, engines in self._engines.items()
            for engine_id, health in engines.items()
            if may_return(
                health,
                self._max_restarts(group),
                can_restart=self.has_sources or is_checkpoint,
                can_restore=self.has_sources,
            )
        }

    def groups(self) -> list[GroupHealth]:
        """The health of each group in its phase, for the decisions of ``rules.health``."""
        phases = self._phases()
        return [
            GroupHealth(
                name=name,
                phase=phases[name],
                needs_offload=self.terms[name].needs_offload,
                min_engines=self._min_engines(name),
                max_restarts=self._max_restarts(name),
                engines=engines,
                standbys=self.standbys[name],
            )
            for name, engines in self._engines.items()
        ]

    def _min_engines(self, group: str) -> int:
        fewest = self.terms[group].min_engines
        return len(self._engines[group]) if fewest is None else fewest

    def _max_restarts(self, group: str) -> float:
        """Unlimited for attached engines: their owner may restart them at any time."""
        return self._config.max_restarts if self.terms[group].has_processes else math.inf
