"""The simulation behind the default policy: its engine, and the order that it shows."""

from __future__ import annotations

import pytest

from benchmarks.router.simulation.engine import Costs, Engine, Turn
from benchmarks.router.simulation.measure import SCENARIOS, measure_agents_cache
from benchmarks.router.simulation.policies import ours
from benchmarks.router.simulation.run import Outage, simulate
from benchmarks.router.simulation.traces import kimi_conversations, tau_airline

COSTS = Costs(kv_tokens=1000, prefill_s=0.001, step_s=0.01, sequence_s=0.0, kv_s=0.0)


def finished(engine: Engine) -> tuple[float, list[Turn]]:
    at_s = engine.ends_s()
    assert at_s is not None
    turns = engine.at(at_s)
    return (at_s, turns) if turns else finished(engine)


def test_a_turn_costs_what_is_not_cached_and_its_steps() -> None:
    engine = Engine(COSTS)
    engine.add(Turn(0, 0, prompt=300, root=100, output=11), 0.0)
    at_s, (first,) = finished(engine)
    assert first.cached == 0
    assert at_s == pytest.approx(0.01 + 0.3 + 10 * 0.01)
    engine.add(Turn(0, 1, prompt=400, root=100, output=1), at_s)
    then_s, (second,) = finished(engine)
    assert second.cached == 311
    assert then_s - at_s == pytest.approx(0.01 + 0.089)
    engine.add(Turn(1, 0, prompt=150, root=100, output=1), then_s)
    assert finished(engine)[1][0].cached == 100  # the root alone


def test_the_budget_holds_a_queue_back_and_evicts_the_oldest_prefix_from_its_end() -> None:
    engine = Engine(COSTS)
    for session in range(3):
        engine.add(Turn(session, 0, prompt=390, root=0, output=10), 0.0)
    assert len(engine.waiting) == 2  # the first began at once
    assert {turn.session for turn in finished(engine)[1]} == {0, 1}  # 400 + 400; no third
    assert (engine.cached, engine.kv_used) == ({0: 200, 1: 400}, 1000)


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="1001 tokens do not fit 1000"):
        Engine(COSTS).add(Turn(0, 0, prompt=1000, root=0, output=1), 0.0)


def test_a_lost_engine_loses_no_turn_and_its_cache() -> None:
    sessions = tau_airline(0)
    outages = [None, Outage(0, 20.0, 40.0)]
    calm, lost = (
        simulate(
            sessions,
            ours("affinity"),
            num_engines=4,
            costs=Costs(),
            most_at_once=len(sessions),
            outage=outage,
        )
        for outage in outages
    )
    assert lost.hits < calm.hits
    assert lost.moves > calm.moves
    assert lost.makespan_s < 1.1 * calm.makespan_s


def test_the_traces_are_those_that_their_origin_names() -> None:
    agents, chats = tau_airline(0), kimi_conversations(0, 1.0)
    assert (len(agents), sum(len(session.turns) for session in agents)) == (200, 2454)
    assert (len(chats), sum(len(session.turns) for session in chats)) == (182, 1333)
    assert tau_airline(3) == tau_airline(3) != tau_airline(4)


def test_ours_is_near_a_schedule_that_knows_the_future_and_before_the_others() -> None:
    others = ("least_in_flight", "sticky_hash", "bounded_hash")
    chats = {"chats": SCENARIOS["chats"]}
    figures = measure_agents_cache(2, chats, ("affinity", *others))["chats"]
    mine = figures["affinity"]
    assert mine["cached_ratio"] >= 0.95
    for other in others:
        assert mine["cached"] > figures[other]["cached"], other
        assert mine["makespan_s"] < figures[other]["makespan_s"], other
    assert measure_agents_cache(2, chats, ["affinity"])["chats"]["affinity"] == mine
