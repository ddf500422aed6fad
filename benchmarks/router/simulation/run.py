"""A run of sessions over simulated engines, with the router's own count of live requests."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.router.simulation.engine import Costs, Engine, Turn
from benchmarks.router.simulation.traces import Session
from engines.protocol import Endpoint
from rollout.rules.routing import Backend, Candidates, InFlight

_ARRIVAL, _ENGINE, _OUTAGE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Outage:
    """One engine is lost for a while and returns with an empty cache."""

    engine: int
    begins_s: float
    ends_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run gave.

    Attributes:
        hits: share of the prompt tokens that were cached.
        moves: turns that went to another engine than the turn before.
        ends_s: of each engine, when its last request ended.
    """

    makespan_s: float
    hits: float
    moves: int
    ends_s: tuple[float, ...]


class Fleet:
    """Engines as a policy sees them, and as they are.

    Attributes:
        candidates: what the router knows: live requests by engine.
        engines: what an engine knows, for policies that have its events or metrics.
        now_s: virtual time.
    """

    def __init__(self, num_engines: int, costs: Costs) -> None:
        self.engines = [Engine(costs) for _ in range(num_engines)]
        self.in_flight: InFlight[tuple[int, int]] = InFlight()
        self.members = [
            Backend(str(n), Endpoint("127.0.0.1", 9000 + n)) for n in range(num_engines)
        ]
        self.now_s = 0.0
        self.candidates: Candidates
        self.offer(range(num_engines))

    def offer(self, numbers: Sequence[int]) -> None:
        (self.candidates,) = self.in_flight.offer([self.members[number] for number in numbers])

    def load(self, number: int) -> int:
        return self.in_flight.num(str(number))

    @property
    def numbers(self) -> list[int]:
        """The engines that serve."""
        return [int(member.engine_id) for member in self.candidates.members]


Policy = Callable[[Fleet, Turn], int]
"""The engine for a turn."""


def simulate(
    sessions: Sequence[Session],
    policy: Policy,
    *,
    num_engines: int,
    costs: Costs,
    most_at_once: int,
    outage: Outage | None = None,
) -> Figures:
    """Run all sessions.

    Args:
        most_at_once: sessions under way; the next begins when one ends.
    """
    fleet = Fleet(num_engines, costs)
    events: list[tuple[float, int, int, int]] = []
    scheduled: list[float | None] = [None] * num_engines
    order = deque(range(len(sessions)))
    arrived_s = [0.0] * len(sessions)
    last_engine: dict[int, int] = {}
    ends_s = [0.0] * num_engines
    moves = prompts = hits = serial = 0

    def push(at_s: float, kind: int, value: int) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(events, (at_s, kind, serial, value))

    turns_at = [0] * len(sessions)
    for _ in range(min(most_at_once, len(order))):
        number = order.popleft()
        push(sessions[number].begins_s, _ARRIVAL, number)
    if outage is not None:
        push(outage.begins_s, _OUTAGE, 0)
        push(outage.ends_s, _OUTAGE, 1)

    def schedule(number: int) -> None:
        if (at_s := fleet.engines[number].ends_s()) is not None and scheduled[number] != at_s:
            scheduled[number] = at_s
            push(at_s, _ENGINE, number)

    def send(turn: Turn) -> None:
        nonlocal moves
        number = policy(fleet, turn)
        before = last_engine.get(turn.session, number)
        moves += before != number
        last_engine[turn.session] = number
        fleet.in_flight.add(str(number), (turn.session, turn.number))
        fleet.engines[number].add(turn, fleet.now_s)
        schedule(number)

    while events:
        at_s, kind, _, value = heapq.heappop(events)
        if kind == _ENGINE and scheduled[value] != at_s:
            continue  # an arrival has cut the action short
        fleet.now_s = at_s
        if kind == _ARRIVAL:
            session = sessions[value]
            arrived_s[value] = at_s
            send(session.turn(value, turns_at[value]))
        elif kind == _OUTAGE:
            assert outage is not None
            lost = [] if value else fleet.engines[outage.engine].lose()
            scheduled[outage.engine] = None
            away = {outage.engine} if value == 0 else set()
            for turn in lost:
                fleet.in_flight.discard(str(outage.engine), (turn.session, turn.number))
            fleet.offer([number for number in range(num_engines) if number not in away])
            for turn in lost:
                send(turn)
        else:
            scheduled[value] = None
            finished = fleet.engines[value].at(at_s)
            schedule(value)
            for turn in finished:
                ends_s[value] = at_s
                fleet.in_flight.discard(str(value), (turn.session, turn.number))
                prompts += turn.prompt
                hits += turn.cached
                session = sessions[turn.session]
                turns_at[turn.session] += 1
                if turns_at[turn.session] < len(session.turns):
                    wait = session.turns[turns_at[turn.session]].wait
                    push(wait.next_s(arrived_s[turn.session], at_s), _ARRIVAL, turn.session)
                elif order:
                    number = order.popleft()
                    push(max(at_s, sessions[number].begins_s), _ARRIVAL, number)
    return Figures(max(ends_s), hits / prompts, moves, tuple(ends_s))
