"""Decides whether an engine is alive, and when a dead engine is restarted.

Always true:
- one failed probe never kills an engine: only several in a row, or several requests that the router
  lost, count it as dead, and an engine that its group needs gets more time;
- certain signs (its process has exited, its group has fenced it, its weights are others) count at
  once;
- an engine goes dead -> booting -> booted -> stale -> serving.  It boots beside the commands of its
  group, is no part of the group until it is admitted, and is stale, without requests, until it is
  verified to hold the published weights;
- a boot never takes memory that the trainer uses, and the number of restarts is limited.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rollout.config import HealthConfig
from rollout.core.errors import LifecycleError
from rollout.rules.lifecycle import Phase


class Liveness(StrEnum):
    """Whether an engine is believed to be alive."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class ProbeResult(StrEnum):
    """The result of one probe, or another sign of an engine's health."""

    ANSWERED = "answered"
    """It replied as an engine in its phase should."""
    FAILED = "failed"
    """It was late, refused the connection, or is not ready although it should be serving."""
    ASLEEP = "asleep"
    """It was not queried, because it need not reply in its phase; its process runs."""
    EXITED = "exited"
    """Its process has ended."""
    FENCED = "fenced"
    """Its group has fenced it, because it failed a command."""
    CHANGED = "changed"
    """It is another process than before, or has other weights than were verified."""
    REPORTED = "reported"
    """The router lost a request to it and took it out of routing."""


class ProbeKind(StrEnum):
    """What a probe requires of an engine."""

    READY = "ready"
    """It must report that it accepts requests."""
    ANSWER = "answer"
    """It must reply, but need not accept requests."""
    PROCESS = "process"
    """Its process must run; it is not queried."""


# Between two phases of an onload the engine is about to get a command with its own deadline.  While
# it is released, the trainer uses the machine, so a late reply would mean nothing.
PROBE_KINDS: Mapping[Phase, ProbeKind] = {
    Phase.STARTING: ProbeKind.PROCESS,
    Phase.SERVING: ProbeKind.READY,
    Phase.PAUSED: ProbeKind.ANSWER,
    Phase.FLUSHED: ProbeKind.ANSWER,
    Phase.OFFLOADED: ProbeKind.PROCESS,
    Phase.WEIGHTS_ONLOADED: ProbeKind.PROCESS,
    Phase.WEIGHTS_UPDATED: ProbeKind.PROCESS,
    Phase.VERIFIED: ProbeKind.PROCESS,
    Phase.KV_ONLOADED: ProbeKind.PROCESS,
}


PROBES_TO_SUSPECT = 2
"""Failed probes in a row after which an engine gets no new requests, if others are healthy."""
PATIENCE = 3
"""Factor on ``probes_to_dead`` for an engine without which its group has too few engines."""
REPORTS_TO_DEAD = 3
"""Failures that the router reports of an engine that answers probes, before it is replaced."""
PROBES_TO_TRUST = 12
"""Answered probes in a row after which earlier reports of the router no longer count."""
FORGET_AFTER_S = 600.0
"""After serving this long, an engine's earlier restarts no longer count."""
_CHECK_SHARE = 100.0
MAX_PARALLEL_RESTARTS = 4
"""Engines of one server that restart at the same time; loading many slows the others."""


# -- liveness ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Streaks:
    """The counts from which the liveness of an engine follows.

    Attributes:
        failed_probes: probes that failed in a row.
        reports: times the router lost the engine; 0 again after ``PROBES_TO_TRUST`` good probes.
        calm: probes answered in a row since the last report.
        is_certain: the engine is known to be dead.
    """

    failed_probes: int = 0
    reports: int = 0
    calm: int = 0
    is_certain: bool = False


def observe(streaks: Streaks, result: ProbeResult, config: HealthConfig) -> Streaks:
    """The streaks after one more probe result."""
    if result is ProbeResult.ANSWERED:
        calm = streaks.calm + 1
        reports = 0 if calm >= PROBES_TO_TRUST else streaks.reports
        return replace(streaks, failed_probes=0, calm=calm, reports=reports)
    if result is ProbeResult.FAILED:
        return replace(streaks, failed_probes=streaks.failed_probes + 1, calm=0)
    if result is ProbeResult.REPORTED:
        return replace(streaks, reports=streaks.reports + 1, calm=0)
    if result is ProbeResult.ASLEEP:
        return streaks
    return replace(streaks, is_certain=True)


def liveness(streaks: Streaks, config: HealthConfig, *, can_spare: bool = True) -> Liveness:
    """Whether an engine with these streaks is alive.

    Args:
        can_spare: enough other engines of its group are healthy.  If not, the fault may lie with
            the prober itself, so more failed probes are needed.
    """
    patience = 1 if can_spare else PATIENCE
    if (
        streaks.is_certain
        or streaks.failed_probes >= config.probes_to_dead * patience
        or streaks.reports >= REPORTS_TO_DEAD
    ):
        return Liveness.DEAD
    has_not_answered_since_report = streaks.reports > 0 and streaks.calm == 0
    if streaks.failed_probes >= PROBES_TO_SUSPECT or has_not_answered_since_report:
        return Liveness.SUSPECT
    return Liveness.ALIVE


# -- another process, or other weights, behind our back ---------------------------------------


def why_other_version(known: int | None, held: str) -> str:
    """Why an engine has not the weights that its group has recorded.

    Args:
        known: the recorded version, or None while it has no whole one.
        held: the version that it reports.
    """
    if known is None or held == str(known):
        return ""
    return (
        f"it reports weight version {held!r}, not '{known}': it has restarted, or another program "
        "has changed its weights"
    )


def why_other_process(known: str, found: str) -> str:
    """Why an engine is not the one that was attached.

    Args:
        known, found: its ``ServerInfo.start``, then and now.
    """
    if not known or not found or known == found:
        return ""
    return (
        f"another process is in its place: {found}, and not {known}; its weights are unknown, "
        "whatever version it reports"
    )


def check_again_s(ended_s: float, took_s: float) -> float:
    """The time of the next check of an engine's weights: checks take 1 % of the time at most."""
    return ended_s + _CHECK_SHARE * took_s


# -- recovery ---------------------------------------------------------------------------------


class RecoveryState(StrEnum):
    """The state of an engine in its recovery."""

    SERVING = "serving"
    DEAD = "dead"
    BOOTING = "booting"
    BOOTED = "booted"
    STALE = "stale"


class RecoveryEvent(StrEnum):
    """What moves an engine from one state to the next."""

    DIED = "died"
    BOOT = "boot"
    BOOTED = "booted"
    INTERRUPTED = "interrupted"
    """Its boot was ended, because its group needs the memory for the trainer."""
    ADMITTED = "admitted"
    VERIFIED = "verified"
    LAGGED = "lagged"
    """It serves by our record, and its group knows that it lacks the published weights."""


EDGES: Mapping[tuple[RecoveryState, RecoveryEvent], RecoveryState] = {
    (RecoveryState.SERVING, RecoveryEvent.DIED): RecoveryState.DEAD,
    (RecoveryState.BOOTING, RecoveryEvent.DIED): RecoveryState.DEAD,
    (RecoveryState.BOOTED, RecoveryEvent.DIED): RecoveryState.DEAD,
    (RecoveryState.STALE, RecoveryEvent.DIED): RecoveryState.DEAD,
    (RecoveryState.DEAD, RecoveryEvent.BOOT): RecoveryState.BOOTING,
    (RecoveryState.BOOTING, RecoveryEvent.BOOTED): RecoveryState.BOOTED,
    (RecoveryState.BOOTING, RecoveryEvent.INTERRUPTED): RecoveryState.DEAD,
    (RecoveryState.BOOTED, RecoveryEvent.INTERRUPTED): RecoveryState.DEAD,
    (RecoveryState.BOOTED, RecoveryEvent.ADMITTED): RecoveryState.STALE,
    (RecoveryState.STALE, RecoveryEvent.VERIFIED): RecoveryState.SERVING,
    (RecoveryState.SERVING, RecoveryEvent.LAGGED): RecoveryState.STALE,
}


_OUT = (RecoveryState.DEAD, RecoveryState.BOOTING, RecoveryState.BOOTED)


def next_state(state: RecoveryState, event: RecoveryEvent) -> RecoveryState:
    """The state after ``event``.

    Raises:
        LifecycleError: the event is not possible in this state.
    """
    try:
        return EDGES[state, event]
    except KeyError:
        legal = tuple(known.value for at, known in EDGES if at is state)
        raise LifecycleError(
            f"an engine that is {state} cannot have {event}; possible now: {', '.join(legal)}",
            command=event,
            phase=state,
            legal=legal,
        ) from None


def backoff_s(num: int, config: HealthConfig) -> float:
    """Seconds to wait after so many boots in a row."""
    return min(config.backoff_s * 2 ** (num - 1), config.max_backoff_s) if num else 0.0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The health of one engine, and its progress in a recovery.

    Attributes:
        reason: why it died, or empty while it lives.
        num_restarts: restarts since it last served for ``FORGET_AFTER_S``.
        retry_at_s: it is not restarted before this time.
        since_s: the time at which it entered its state.
        is_fenced: it was killed or disconnected, and its group sends it nothing.
        is_readmission_due: it was restarted, and recovery has not yet tried to readmit it.
    """

    state: RecoveryState = RecoveryState.SERVING
    streaks: Streaks = Streaks()
    reason: str = ""
    num_restarts: int = 0
    retry_at_s: float = 0.0
    since_s: float = 0.0
    is_fenced: bool = False
    is_readmission_due: bool = False

    def after(self, result: ProbeResult, config: HealthConfig) -> EngineHealth:
        """The health after one more result; a result changes nothing once the engine is dead."""
        if self.is_out:
            return self
        return replace(self, streaks=observe(self.streaks, result, config))

    def died(self, reason: str, now_s: float, config: HealthConfig) -> EngineHealth:
        """The health after a death; the wait for the restart doubles with each restart."""
        served_long = now_s - self.since_s >= FORGET_AFTER_S
        num = 0 if self.state is RecoveryState.SERVING and served_long else self.num_restarts
        return EngineHealth(
            state=next_state(self.state, RecoveryEvent.DIED),
            reason=reason,
            num_restarts=num,
            retry_at_s=now_s + backoff_s(num, config),
            since_s=now_s,
        )

    def booting(self, now_s: float) -> EngineHealth:
        moved = self._moved(RecoveryEvent.BOOT, now_s)
        return replace(moved, num_restarts=self.num_restarts + 1)

    def booted(self, now_s: float) -> EngineHealth:
        return self._moved(RecoveryEvent.BOOTED, now_s)

    def interrupted(self, now_s: float) -> EngineHealth:
        """The health after a boot that was ended for the trainer; it counts as no restart."""
        moved = self._moved(RecoveryEvent.INTERRUPTED, now_s)
        return replace(moved, num_restarts=self.num_restarts - 1)

    def admitted(self, now_s: float) -> EngineHealth:
        moved = self._moved(RecoveryEvent.ADMITTED, now_s)
        return replace(
            moved, streaks=Streaks(), reason="", is_fenced=False, is_readmission_due=True
        )

    def verified(self, now_s: float) -> EngineHealth:
        return replace(self._moved(RecoveryEvent.VERIFIED, now_s), is_readmission_due=False)

    def stale(self, now_s: float) -> EngineHealth:
        """The health of one that its group calls stale: what let it join was cut short."""
        return replace(self._moved(RecoveryEvent.LAGGED, now_s), is_readmission_due=True)

    def not_readmitted(self) -> EngineHealth:
        """The health after a readmission that found no source of the weights."""
        return replace(self, is_readmission_due=False)

    def _moved(self, event: RecoveryEvent, now_s: float) -> EngineHealth:
        return replace(self, state=next_state(self.state, event), since_s=now_s)

    @property
    def is_out(self) -> bool:
        """Whether it is no running engine of its group: dead, booting or booted."""
        return self.state in _OUT

    def is_same_life(self, other: EngineHealth) -> bool:
        """Whether it neither died nor was restarted between ``other`` and this."""
        mine = (self.state, self.num_restarts, self.since_s)
        return mine == (other.state, other.num_restarts, other.since_s)

    def is_given_up(self, max_restarts: float) -> bool:
        """Whether it is dead and has no restarts left."""
        return self.state is RecoveryState.DEAD and self.num_restarts >= max_restarts


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """The health of one group.

    Attributes:
        needs_offload: it shares its memory with the trainer.
        min_engines: fewest engines with which it continues.
        max_restarts: restarts that each of its engines gets.
        standbys: its slots on which an engine sleeps that can take the place of the other.
    """

    name: str
    phase: Phase
    needs_offload: bool
    min_engines: int
    max_restarts: float
    engines: Mapping[str, EngineHealth] = field(default_factory=dict)
    standbys: Set[str] = frozenset()

    @property
    def num_up(self) -> int:
        return sum(not engine.is_out for engine in self.engines.values())

    @property
    def is_short(self) -> bool:
        """Whether it has too few engines to continue."""
        return self.num_up < self.min_engines

    def restartable(self) -> dict[str, EngineHealth]:
        """Its dead engines that may be restarted once more."""
        return {
            engine_id: engine
            for engine_id, engine in self.engines.items()
            if engine.state is RecoveryState.DEAD and not engine.is_given_up(self.max_restarts)
        }


def has_enough_without(engine_id: str, engines: Mapping[str, EngineHealth], floor: int) -> bool:
    """Whether at least ``floor`` other engines of its group (at least one) are healthy."""
    num_healthy = sum(
        engine.state is RecoveryState.SERVING and not engine.streaks.failed_probes
        for name, engine in engines.items()
        if name != engine_id
    )
    return num_healthy >= max(1, floor)


@dataclass(frozen=True, slots=True)
class Restart:
    """One engine to restart."""

    group: str
    engine_id: str


def may_use_memory(group: GroupHealth) -> bool:
    """Whether an engine can start now without taking memory that the trainer uses."""
    return not (group.needs_offload and group.phase is Phase.OFFLOADED)


def plan_recovery(groups: Collection[GroupHealth], now_s: float) -> list[Restart]:
    """The engines to restart now.

    A group in the middle of a transition gets none, unless it has too few engines to continue.  (A
    group that keeps its GPUs stays flushed while the others are offloaded, so it may get some.)
    While the trainer has the memory, engines that sleep take the place of those that died.
    """
    plan = [
        Restart(group.name, engine_id)
        for group in groups
        for engine_id in due_restarts(group, now_s)
        if _may_boot(group) or (not may_use_memory(group) and engine_id in group.standbys)
    ]
    num_booting = len(engines_in(RecoveryState.BOOTING, groups))
    return plan[: max(MAX_PARALLEL_RESTARTS - num_booting, 0)]


def _may_boot(group: GroupHealth) -> bool:
    is_still = group.phase is Phase.SERVING or not group.needs_offload
    return may_use_memory(group) and (is_still or group.is_short)


def plan_for_short(groups: Iterable[GroupHealth], names: Collection[str]) -> list[Restart]:
    """The engines to restart so that these groups can continue; ignores backoffs."""
    return [
        Restart(group.name, engine_id)
        for group in groups
        if group.name in names and group.is_short
        for engine_id in due_restarts(group, math.inf)[:MAX_PARALLEL_RESTARTS]
    ]


def engines_in(state: RecoveryState, groups: Iterable[GroupHealth]) -> list[tuple[str, str]]:
    """Group and id of each engine that is in this state."""
    return [
        (group.name, engine_id)
        for group in groups
        for engine_id, health in group.engines.items()
        if health.state is state
    ]


def unfenced_dead(groups: Iterable[GroupHealth]) -> list[tuple[str, str]]:
    """Group and id of each engine that is dead and not yet ended."""
    return [
        (group.name, engine_id)
        for group in groups
        for engine_id, health in group.engines.items()
        if health.state is RecoveryState.DEAD and not health.is_fenced
    ]


def stale_engines(groups: Iterable[GroupHealth]) -> list[tuple[str, str]]:
    """Group and id of each stale engine that may restore its weights now."""
    return engines_in(RecoveryState.STALE, filter(may_use_memory, groups))


def is_any_readmission_due(groups: Iterable[GroupHealth], *, can_restore: bool) -> bool:
    """Whether recovery has to try to readmit a stale engine.

    Args:
        can_restore: a source has the published weights, and is tried again and again.
    """
    return any(
        engine.state is RecoveryState.STALE and (can_restore or engine.is_readmission_due)
        for group in filter(may_use_memory, groups)
        for engine in group.engines.values()
    )


def due_restarts(group: GroupHealth, now_s: float) -> list[str]:
    """Dead engines whose wait is over and that may be restarted once more."""
    restartable = group.restartable().items()
    return [engine_id for engine_id, engine in restartable if engine.retry_at_s <= now_s]


def next_retry_s(groups: Iterable[GroupHealth]) -> float | None:
    """The time of the next possible restart, or None if there is none."""
    engines = [engine for group in groups for engine in group.restartable().values()]
    return min((engine.retry_at_s for engine in engines), default=None)


def may_return(
    engine: EngineHealth, max_restarts: float, *, can_restart: bool, can_restore: bool
) -> bool:
    """Whether recovery may make this engine serve (again) without a command.

    Args:
        can_restart: a restarted engine can get the published weights.
        can_restore: a source has the published weights, and is tried again and again.
    """
    if engine.state is RecoveryState.SERVING:
        return True  # recovery finds out soon what it is
    if engine.state is RecoveryState.STALE:
        # Its weights may be the published ones already, as those of the checkpoint are at first.
        return can_restore or (can_restart and engine.is_readmission_due)
    return can_restart and not engine.is_given_up(max_restarts)


# -- routing ----------------------------------------------------------------------------------


def out_of_routing(group: GroupHealth, config: HealthConfig) -> dict[str, tuple[Liveness, str]]:
    """Engines that get no requests, each with its liveness and the reason.

    A suspect gets none only while another engine of its group is healthy: a slow engine is better
    than no engine.  An engine that the router lost gets none until it has answered a probe.
    """
    out: dict[str, tuple[Liveness, str]] = {}
    for engine_id, engine in group.engines.items():
        if engine.is_out:
            out[engine_id] = Liveness.DEAD, engine.reason
        elif engine.streaks.reports and not engine.streaks.calm:
            out[engine_id] = Liveness.SUSPECT, "the router lost a request to it"
        elif liveness(engine.streaks, config) is not Liveness.ALIVE and has_enough_without(
            engine_id, group.engines, 1
        ):
            reason = f"{engine.streaks.failed_probes} probes failed in a row"
            out[engine_id] = Liveness.SUSPECT, reason
    return out
