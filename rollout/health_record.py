"""What recovery knows of the engines of a server: one health per engine, by group.

Always true: nothing here awaits, so what is read and written in one call is of one moment; an
engine that died is never taken for well on the word of a probe that was under way before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from rollout.config import HealthConfig, ServerConfig
from rollout.fanout import describe
from rollout.health import (
    EngineHealth,
    Finding,
    GroupHealth,
    Restart,
    State,
    Verdict,
    due,
    memory_is_ours,
    next_retry_s,
    out_of_routing,
    plan_recovery,
    spared,
    verdict,
)
from rollout.lifecycle import Phase
from rollout.watching import GroupProbe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupTerms:
    """What of a group's configuration bears on recovery.

    Attributes:
        min_engines: fewest engines with which it may go on; None: all it has.
        has_processes: its engines are launched by us, and may be killed.
        start_timeout_s: what one of them gets to start.
    """

    needs_offload: bool
    min_engines: int | None
    has_processes: bool = True
    start_timeout_s: float = 300.0
    adopt_timeout_s: float = 600.0


def recovery_terms(config: ServerConfig, name: str) -> GroupTerms:
    """The terms of one group of a server."""
    group = config.groups[name]
    fewest = None if config.lifecycle.on_failure == "raise" else 1
    return GroupTerms(
        needs_offload=group.needs_offload,
        min_engines=fewest if group.min_engines is None else group.min_engines,
        has_processes=group.engine.kind != "attached",
        start_timeout_s=group.engine.start_timeout_s,
        adopt_timeout_s=config.lifecycle.update_timeout_s,
    )


class HealthRecord:
    """The healths of all engines.

    Args:
        phases: where each group is now.
        clock: the time, in seconds.
    """

    def __init__(
        self,
        config: HealthConfig,
        terms: Mapping[str, GroupTerms],
        phases: Callable[[], Mapping[str, Phase]],
        clock: Callable[[], float],
    ) -> None:
        self.terms = dict(terms)
        self._config = config
        self._phases = phases
        self._clock = clock
        self._engines: dict[str, dict[str, EngineHealth]] = {group: {} for group in terms}

    # -- what comes in ----------------------------------------------------------------------

    def started(self, engines: Mapping[str, Iterable[str]]) -> None:
        """All these have just been started."""
        for group, ids in engines.items():
            self._engines[group] = {one: EngineHealth(since_s=self._clock()) for one in ids}

    def joined(self, group: str, engine_id: str, *, is_stale: bool) -> None:
        """This one has come to a group that runs."""
        state = State.STALE if is_stale else State.SERVING
        self._engines[group][engine_id] = EngineHealth(state, since_s=self._clock())

    def left(self, group: str, engine_id: str) -> None:
        """This one has gone, and is missed by nobody."""
        self._engines[group].pop(engine_id, None)

    def snapshot(self) -> dict[str, dict[str, EngineHealth]]:
        """All healths as they are now."""
        return {group: dict(engines) for group, engines in self._engines.items()}

    def take_in(self, group: str, probe: GroupProbe, before: Mapping[str, EngineHealth]) -> None:
        """Findings of a probe.

        Args:
            before: healths when the probe began.
        """
        engines = self._engines[group]
        now_s = self._clock()
        for one in probe.engines:
            if one.engine_id in before and one.engine_id not in engines:
                continue  # it was removed meanwhile
            health = engines.setdefault(one.engine_id, EngineHealth(since_s=now_s))
            if one.engine_id in before and not health.is_same_life(before[one.engine_id]):
                continue  # it was replaced meanwhile: this is about the old one
            finding = one.finding
            if finding is Finding.FAILED and not probe.is_steady:
                finding = Finding.ASLEEP  # a command ran: it had better things to do
            health = health.after(finding, self._config)
            if health.state is State.STALE and not one.is_stale and finding is not Finding.FENCED:
                logger.info("engine %s has the published weights again", one.engine_id)
                health = health.proved(now_s)
            engines[one.engine_id] = health
            self._judge(group, one.engine_id, one.said)

    def reported(self, engine_id: str, because: str) -> None:
        """The router lost a request to this engine."""
        for group, engines in self._engines.items():
            if engine_id in engines:
                engines[engine_id] = engines[engine_id].after(Finding.REPORTED, self._config)
                self._judge(group, engine_id, because)

    def _judge(self, group: str, engine_id: str, said: str) -> None:
        health = self._engines[group][engine_id]
        can_spare = spared(engine_id, self._engines[group], self._min_engines(group))
        is_dead = verdict(health.streaks, self._config, can_spare=can_spare) is Verdict.DEAD
        if is_dead and not health.is_out:
            because = f"engine {engine_id} is dead: {said or 'the router lost it too often'}"
            logger.error("%s", because, extra={"engine_id": engine_id})
            self._engines[group][engine_id] = health.died(because, self._clock(), self._config)

    # -- what was done ----------------------------------------------------------------------

    def is_fenced(self, group: str, engine_id: str) -> None:
        engines = self._engines[group]
        engines[engine_id] = replace(engines[engine_id], is_fenced=True)

    def is_restarting(self, group: str, engine_id: str) -> None:
        engines = self._engines[group]
        engines[engine_id] = engines[engine_id].restarting(self._clock())

    def has_started(self, group: str, engine_id: str) -> float:
        """It has started again; the seconds that took."""
        engines = self._engines[group]
        elapsed_s = self._clock() - engines[engine_id].since_s
        engines[engine_id] = engines[engine_id].started(self._clock())
        return elapsed_s

    def is_proved(self, group: str, engine_id: str) -> None:
        engines = self._engines[group]
        engines[engine_id] = engines[engine_id].proved(self._clock())

    def has_died(self, group: str, engine_id: str, what: str, error: BaseException) -> None:
        because = f"engine {engine_id} {what}: {describe(error)}"
        logger.error("%s", because, extra={"engine_id": engine_id})
        engines = self._engines[group]
        engines[engine_id] = engines[engine_id].died(because, self._clock(), self._config)

    # -- what follows from it ---------------------------------------------------------------

    def distrusted(self, group: str) -> list[str]:
        """Engines that the router lost: a probe must also ask them for their version."""
        return [one for one, now in self._engines[group].items() if now.streaks.reports]

    def why_dead(self, group: str, engine_id: str) -> str:
        """Why an engine died, and whether it is given up."""
        health = self._engines[group][engine_id]
        if not health.is_given_up(self._max_restarts(group)):
            return health.because
        return f"{health.because} (given up after {health.num_restarts} restarts)"

    def out_of_routing(self) -> dict[str, tuple[Verdict, str]]:
        """Engines that get no requests whatever their group says, and why."""
        out: dict[str, tuple[Verdict, str]] = {}
        for group in self._looked_at():
            out |= out_of_routing(group, self._config)
        return out

    def unfenced_dead(self) -> list[tuple[str, str]]:
        """Group and id of each engine that is dead and not yet ended."""
        return [
            (group, engine_id)
            for group, engines in self._engines.items()
            for engine_id, one in engines.items()
            if one.state is State.DEAD and not one.is_fenced
        ]

    def stale(self) -> list[tuple[str, str]]:
        """Group and id of each stale engine that might be given its weights now."""
        return [
            (group.name, engine_id)
            for group in self._looked_at()
            if memory_is_ours(group)
            for engine_id, one in group.engines.items()
            if one.state is State.STALE
        ]

    def plan(self) -> list[Restart]:
        """Whom to start again now."""
        return plan_recovery(self._looked_at(), self._clock(), self._config)

    def plan_for_short(self, groups: Collection[str]) -> list[Restart]:
        """Whom to start again so that these groups can go on; backoffs do not count."""
        return [
            Restart(group.name, one)
            for group in self._looked_at()
            if group.name in groups and group.num_up < group.min_engines
            for one in due(group, math.inf)[: self._config.max_parallel_restarts]
        ]

    def are_short(self, groups: Collection[str]) -> bool:
        """Whether one of these groups has too few engines to go on."""
        return any(
            group.name in groups and group.num_up < group.min_engines for group in self._looked_at()
        )

    def next_retry_s(self) -> float | None:
        """When the next backoff ends; None if there is none."""
        return next_retry_s(self._looked_at())

    def _looked_at(self) -> list[GroupHealth]:
        phases = self._phases()
        return [
            GroupHealth(
                name=name,
                phase=phases[name],
                needs_offload=self.terms[name].needs_offload,
                min_engines=self._min_engines(name),
                max_restarts=self._max_restarts(name),
                engines=engines,
            )
            for name, engines in self._engines.items()
        ]

    def _min_engines(self, group: str) -> int:
        fewest = self.terms[group].min_engines
        return len(self._engines[group]) if fewest is None else fewest

    def _max_restarts(self, group: str) -> float:
        """Whoever launched an attached engine may bring it back at any time."""
        return self._config.max_restarts if self.terms[group].has_processes else math.inf
