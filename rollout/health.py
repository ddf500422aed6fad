"""Is an engine well, and when is a dead one started again?  Plain functions over values.

Always true:
- one bad sign never kills: a verdict comes from streaks, one of failed probes and one of requests
  that the router lost, and an engine that its group cannot spare is given more time;
- what is known for certain (its process has exited, its group has fenced it) is believed at once;
- an engine goes dead -> restarting -> stale -> serving and no other way; it is stale, and out of
  routing, until its weights are proved to be the published ones;
- a restart never takes memory that the trainer is using, and there is an end to restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rollout.config import HealthConfig
from rollout.errors import LifecycleError
from rollout.lifecycle import Phase


class Verdict(StrEnum):
    """What is thought of an engine."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class Finding(StrEnum):
    """What one look at an engine brought to light."""

    ANSWERED = "answered"
    """It answered as an engine in its phase should."""
    FAILED = "failed"
    """It was late, refused the connection, or is not ready although it should be serving."""
    ASLEEP = "asleep"
    """It was not asked, for it need not answer now; its process runs."""
    EXITED = "exited"
    """Its process has ended."""
    FENCED = "fenced"
    """Its group has taken it out: it failed a command."""
    REPORTED = "reported"
    """The router lost a request to it and took it out of routing."""


class Look(StrEnum):
    """How an engine is looked at."""

    READY = "ready"
    """It must answer that it takes requests."""
    ANSWER = "answer"
    """It must answer; that it takes no requests is right."""
    PROCESS = "process"
    """Only whether its process runs."""


# Between two phases of an onload the engine is about to be asked something with a deadline of its
# own; released, it is asleep, and the machine is the trainer's: late answers would mean nothing.
LOOKS: Mapping[Phase, Look] = {
    Phase.SERVING: Look.READY,
    Phase.PAUSED: Look.ANSWER,
    Phase.FLUSHED: Look.ANSWER,
    Phase.OFFLOADED: Look.PROCESS,
    Phase.WEIGHTS_ONLOADED: Look.PROCESS,
    Phase.WEIGHTS_UPDATED: Look.PROCESS,
    Phase.VERIFIED: Look.PROCESS,
    Phase.KV_ONLOADED: Look.PROCESS,
}


def seen_within_s(config: HealthConfig, *, can_spare: bool = True) -> float:
    """How long an engine that has fallen silent may stay in its group, at the most.

    Never longer than this, mostly shorter: what the router loses, and a process or a node that is
    known to have ended, is acted on at once.  An engine its group cannot spare is given more time.
    """
    patience = 1 if can_spare else config.patience
    return config.probes_to_dead * patience * (config.probe_interval_s + config.probe_timeout_s)


# -- the verdict ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Streaks:
    """What the verdict is made from.

    Attributes:
        failed_probes: probes that failed in a row.
        reports: times the router lost the engine, forgotten only after some calm.
        calm: probes answered in a row since the last report.
        is_certain: it is known to be gone.
    """

    failed_probes: int = 0
    reports: int = 0
    calm: int = 0
    is_certain: bool = False


def observe(streaks: Streaks, finding: Finding, config: HealthConfig) -> Streaks:
    """The streaks after one more finding."""
    if finding is Finding.ANSWERED:
        calm = streaks.calm + 1
        reports = 0 if calm >= config.probes_to_trust else streaks.reports
        return replace(streaks, failed_probes=0, calm=calm, reports=reports)
    if finding is Finding.FAILED:
        return replace(streaks, failed_probes=streaks.failed_probes + 1, calm=0)
    if finding is Finding.REPORTED:
        return replace(streaks, reports=streaks.reports + 1, calm=0)
    if finding is Finding.ASLEEP:
        return streaks
    return replace(streaks, is_certain=True)


def verdict(streaks: Streaks, config: HealthConfig, *, can_spare: bool = True) -> Verdict:
    """What to think of an engine with these streaks.

    Args:
        can_spare: enough others of its group are well.  If not, the trouble may lie with whoever
            probes, and more failed probes are waited for.
    """
    patience = 1 if can_spare else config.patience
    if (
        streaks.is_certain
        or streaks.failed_probes >= config.probes_to_dead * patience
        or streaks.reports >= config.reports_to_dead
    ):
        return Verdict.DEAD
    has_not_answered_since_report = streaks.reports > 0 and streaks.calm == 0
    if streaks.failed_probes >= config.probes_to_suspect or has_not_answered_since_report:
        return Verdict.SUSPECT
    return Verdict.ALIVE


# -- the way back -----------------------------------------------------------------------------


class State(StrEnum):
    """Where an engine is on its way back."""

    SERVING = "serving"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"


class Event(StrEnum):
    """What moves it."""

    DIED = "died"
    RESTART = "restart"
    STARTED = "started"
    PROVED = "proved"


EDGES: Mapping[tuple[State, Event], State] = {
    (State.SERVING, Event.DIED): State.DEAD,
    (State.RESTARTING, Event.DIED): State.DEAD,
    (State.STALE, Event.DIED): State.DEAD,
    (State.DEAD, Event.RESTART): State.RESTARTING,
    (State.RESTARTING, Event.STARTED): State.STALE,
    (State.STALE, Event.PROVED): State.SERVING,
}


def next_state(state: State, event: Event) -> State:
    """Where ``event`` leads.

    Raises:
        LifecycleError: there is no such edge.
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


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """One engine, well or on its way back.

    Attributes:
        because: why it died; empty while it lives.
        num_restarts: restarts that were tried since it last served for long.
        retry_at_s: it is not restarted before this time.
        since_s: when it came into its state.
        is_fenced: it was killed, or disconnected, and its group sends it nothing.
    """

    state: State = State.SERVING
    streaks: Streaks = Streaks()
    because: str = ""
    num_restarts: int = 0
    retry_at_s: float = 0.0
    since_s: float = 0.0
    is_fenced: bool = False

    def after(self, finding: Finding, config: HealthConfig) -> EngineHealth:
        """With one more finding; one about an engine that is out already changes nothing."""
        if self.is_out:
            return self
        return replace(self, streaks=observe(self.streaks, finding, config))

    def died(self, because: str, now_s: float, config: HealthConfig) -> EngineHealth:
        """Dead, and due for a restart after a backoff that doubles with each try."""
        served_long = now_s - self.since_s >= config.forget_after_s
        num = 0 if self.state is State.SERVING and served_long else self.num_restarts
        wait_s = min(config.backoff_s * 2 ** (num - 1), config.max_backoff_s) if num else 0.0
        return EngineHealth(
            state=next_state(self.state, Event.DIED),
            because=because,
            num_restarts=num,
            retry_at_s=now_s + wait_s,
            since_s=now_s,
        )

    def restarting(self, now_s: float) -> EngineHealth:
        state = next_state(self.state, Event.RESTART)
        return replace(self, state=state, num_restarts=self.num_restarts + 1, since_s=now_s)

    def started(self, now_s: float) -> EngineHealth:
        state = next_state(self.state, Event.STARTED)
        return replace(
            self, state=state, streaks=Streaks(), because="", since_s=now_s, is_fenced=False
        )

    def proved(self, now_s: float) -> EngineHealth:
        return replace(self, state=next_state(self.state, Event.PROVED), since_s=now_s)

    @property
    def is_out(self) -> bool:
        """It is known to be dead, and may be on its way back."""
        return self.state in (State.DEAD, State.RESTARTING)

    def is_same_life(self, other: EngineHealth) -> bool:
        """Nothing has happened to it between ``other`` and this."""
        mine = (self.state, self.num_restarts, self.since_s)
        return mine == (other.state, other.num_restarts, other.since_s)

    def is_given_up(self, max_restarts: float) -> bool:
        """It has had all the restarts it gets."""
        return self.state is State.DEAD and self.num_restarts >= max_restarts


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """What recovery has to know of one group.

    Attributes:
        needs_offload: it shares its memory with the trainer.
        min_engines: fewest engines with which it may go on.
        max_restarts: restarts that each of its engines gets.
    """

    name: str
    phase: Phase
    needs_offload: bool
    min_engines: int
    max_restarts: float
    engines: Mapping[str, EngineHealth] = field(default_factory=dict)

    @property
    def num_up(self) -> int:
        return sum(not one.is_out for one in self.engines.values())


def spared(engine_id: str, engines: Mapping[str, EngineHealth], floor: int) -> bool:
    """Whether its group could go on without it: at least ``floor`` others are well."""
    well = [
        name
        for name, one in engines.items()
        if name != engine_id and one.state is State.SERVING and not one.streaks.failed_probes
    ]
    return len(well) >= max(1, floor)


@dataclass(frozen=True, slots=True)
class Restart:
    """One engine to be started again."""

    group: str
    engine_id: str


def memory_is_ours(group: GroupHealth) -> bool:
    """Whether an engine may be started there now without taking what the trainer uses."""
    return not (group.needs_offload and group.phase is Phase.OFFLOADED)


def plan_recovery(
    groups: Iterable[GroupHealth], now_s: float, config: HealthConfig
) -> list[Restart]:
    """Whom to start again now.

    A group that is on its way through a transition is left alone, unless it has too few engines
    to ever get on.  (A group that keeps its GPUs stands still, flushed, while the others are
    offloaded: it is no hindrance there.)
    """
    plan: list[Restart] = []
    for group in groups:
        may_start = memory_is_ours(group) and (
            group.phase is Phase.SERVING
            or not group.needs_offload
            or group.num_up < group.min_engines
        )
        if may_start:
            plan += [Restart(group.name, engine_id) for engine_id in due(group, now_s)]
    return plan[: config.max_parallel_restarts]


def due(group: GroupHealth, now_s: float) -> list[str]:
    """Dead engines whose backoff is over and who have a restart left."""
    return [
        engine_id
        for engine_id, one in group.engines.items()
        if one.state is State.DEAD
        and not one.is_given_up(group.max_restarts)
        and one.retry_at_s <= now_s
    ]


def next_retry_s(groups: Iterable[GroupHealth]) -> float | None:
    """When the next backoff ends; None if there is none."""
    times = [
        one.retry_at_s
        for group in groups
        for one in group.engines.values()
        if one.state is State.DEAD and not one.is_given_up(group.max_restarts)
    ]
    return min(times, default=None)


# -- routing ----------------------------------------------------------------------------------


def out_of_routing(group: GroupHealth, config: HealthConfig) -> dict[str, tuple[Verdict, str]]:
    """Engines that get no requests, each with its verdict and why.

    A suspect gets none as long as another engine of its group is well: a slow engine is better
    than none.  One that the router has lost stays out until it has answered a probe.
    """
    out: dict[str, tuple[Verdict, str]] = {}
    for engine_id, one in group.engines.items():
        if one.is_out:
            out[engine_id] = Verdict.DEAD, one.because
        elif one.streaks.reports and not one.streaks.calm:
            out[engine_id] = Verdict.SUSPECT, "the router lost a request to it"
        elif verdict(one.streaks, config) is not Verdict.ALIVE and spared(
            engine_id, group.engines, 1
        ):
            out[engine_id] = (
                Verdict.SUSPECT,
                f"{one.streaks.failed_probes} probes failed in a row",
            )
    return out
