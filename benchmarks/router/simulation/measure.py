"""Hits and makespans of policies, beside a schedule that knows the future; medians of seeds.

``agents``: 1600 trajectories of an airline's agent begin at once on four engines.  ``tight``: the
same with half the KV.  ``chats``: 364 conversations of an hour, in three minutes, on eight.
``lost``: as ``agents``, and one engine is gone from 30 to 60 s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.router.simulation.engine import DEFAULT_COSTS, Costs
from benchmarks.router.simulation.policies import POLICIES, clairvoyant
from benchmarks.router.simulation.run import Figures, Outage, Policy, simulate
from benchmarks.router.simulation.traces import Session, kimi_conversations, tau_airline


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sessions by seed, and what serves them."""

    sessions: Callable[[int], list[Session]]
    num_engines: int
    costs: Costs = DEFAULT_COSTS
    outage: Outage | None = None

    def run(self, sessions: list[Session], policy: Policy) -> Figures:
        return simulate(
            sessions,
            policy,
            num_engines=self.num_engines,
            costs=self.costs,
            most_at_once=len(sessions),
            outage=self.outage,
        )


SCENARIOS = {
    "agents": Scenario(lambda seed: tau_airline(seed, 8), 4),
    "tight": Scenario(lambda seed: tau_airline(seed, 8), 4, Costs(kv_tokens=200_000)),
    "chats": Scenario(lambda seed: kimi_conversations(seed, 20.0, 2), 8),
    "lost": Scenario(lambda seed: tau_airline(seed, 8), 4, outage=Outage(0, 30.0, 60.0)),
}
SMALL = {"agents": Scenario(lambda seed: tau_airline(seed, 1), 4, Costs(kv_tokens=60_000))}


def measure_agents_cache(
    num_seeds: int, scenarios: dict[str, Scenario], policies: Iterable[str] = tuple(POLICIES)
) -> dict[str, dict[str, dict[str, float]]]:
    """By scenario and policy: share of cached prompt tokens, and both as ratios to the schedule.

    The schedule is the one of ``clairvoyant`` that ends first, of those that stay and move.
    """
    return {name: _measured(one, num_seeds, policies) for name, one in scenarios.items()}


def _measured(
    scenario: Scenario, num_seeds: int, policies: Iterable[str]
) -> dict[str, dict[str, float]]:
    runs: dict[str, list[tuple[Figures, Figures]]] = {}
    for seed in range(num_seeds):
        sessions = scenario.sessions(seed)
        knowing = (
            scenario.run(sessions, clairvoyant(sessions, scenario.costs, moves=moves))
            for moves in (False, True)
        )
        best = min(knowing, key=lambda figures: figures.makespan_s)
        runs.setdefault("clairvoyant", []).append((best, best))
        for name in policies:
            runs.setdefault(name, []).append((scenario.run(sessions, POLICIES[name]()), best))
    return {name: _medians(pairs) for name, pairs in runs.items()}


def _medians(pairs: list[tuple[Figures, Figures]]) -> dict[str, float]:
    median = statistics.median
    return {
        "cached": round(median(run.hits for run, _ in pairs), 3),
        "cached_ratio": round(median(run.hits / best.hits for run, best in pairs), 3),
        "makespan_s": round(median(run.makespan_s for run, _ in pairs), 1),
        "makespan_ratio": round(median(run.makespan_s / best.makespan_s for run, best in pairs), 3),
    }
