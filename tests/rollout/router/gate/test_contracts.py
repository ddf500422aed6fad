"""Requests that want a weight version, at the gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Endpoint
from engines.protocol.logprob_kind import LogprobRule
from rollout.router.gate.aborts import AbortOrder
from rollout.router.gate.gate import Admission, Gate, GateState, Refusal, Waiter
from rollout.rules.contract import NO_CONTRACT, Contract
from rollout.rules.routing import Backend, BackendState

OPEN, HOLDING, CLOSED = GateState.OPEN, GateState.HOLDING, GateState.CLOSED


class World:
    """A gate with one engine at version 7, and what it has decided."""

    def __init__(self, state: GateState = OPEN, **options: Any) -> None:
        self.now_s = 100.0
        self.gate = Gate(clock=lambda: self.now_s, **options)
        self.epoch = 0
        self.set_members("a")
        self.gate.set_state(state, weight_version=7)
        self.decided: list[tuple[str, Admission | Refusal]] = []

    def set_members(self, *engine_ids: str, state: BackendState = BackendState.SERVING) -> None:
        self.epoch += 1
        members = [Backend(name, Endpoint("127.0.0.1", 9000), state) for name in engine_ids]
        self.gate.set_members(self.epoch, members)

    def enter(self, rid: str = "r", *, num_bytes: int = 0, **fields: Any) -> Any:
        found = self.gate.enter(rid=rid, num_bytes=num_bytes, contract=Contract(**fields))
        if isinstance(found, Waiter):
            found.on_decision = lambda decision: self.decided.append((rid, decision))
        return found

    def admitted(self) -> list[tuple[str, int | None]]:
        return [(r, d.weight_version) for r, d in self.decided if isinstance(d, Admission)]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, Admission),
        ({"min_weight_version": 7}, Admission),
        ({"min_weight_version": 8}, Waiter),
        ({"weight_version": 7}, Admission),
        ({"weight_version": 6}, Refusal),
        ({"weight_version": 8}, Waiter),
        ({"max_version_lag": 0}, Admission),
        ({"min_weight_version": 7, "weight_version": 8}, Waiter),
    ],
)
def test_an_open_gate_admits_holds_or_refuses_by_the_version(
    fields: dict[str, Any], kind: type
) -> None:
    world = World()
    found = world.enter(**fields)
    assert isinstance(found, kind)
    if isinstance(found, Refusal):
        assert (found.unmet, found.weight_version) == ("past", 7)
        assert "weight_version 6 is past: weight version 7 is served" in found.message


@pytest.mark.parametrize("state", [OPEN, HOLDING])
def test_what_is_past_is_refused_at_once(state: GateState) -> None:
    found = World(state).enter(weight_version=6)
    assert isinstance(found, Refusal)
    assert found.unmet


def test_a_closed_gate_refuses_as_without_a_contract() -> None:
    wishes: list[dict[str, Any]] = [{"weight_version": 6}, {"min_weight_version": 8}, {}]
    for fields in wishes:
        found = World(CLOSED).enter(**fields)
        assert isinstance(found, Refusal)
        assert not found.unmet


def test_no_request_waits_behind_one_for_a_later_version() -> None:
    world = World()
    world.enter("later", min_weight_version=9)
    assert isinstance(world.enter("now"), Admission)
    assert isinstance(world.enter("newer", weight_version=7), Admission)
    assert world.gate.num_held == 1


def test_the_push_releases_those_that_it_fits_in_order_of_arrival() -> None:
    world = World()
    world.enter("first", min_weight_version=8)
    world.enter("second", min_weight_version=9)
    world.enter("third", weight_version=8)
    world.gate.set_state(HOLDING)
    world.enter("fourth")
    world.enter("fifth", min_weight_version=8)
    world.gate.set_state(OPEN, weight_version=8)
    assert world.admitted() == [(rid, 8) for rid in ("first", "third", "fourth", "fifth")]
    world.gate.set_state(OPEN, weight_version=9)
    assert world.admitted()[4:] == [("second", 9)]
    assert world.gate.num_held == 0


def test_a_push_past_an_exact_version_refuses_it() -> None:
    world = World()
    world.enter(weight_version=8)
    world.gate.set_state(OPEN, weight_version=9)
    ((_, refusal),) = world.decided
    assert isinstance(refusal, Refusal)
    assert (refusal.unmet, refusal.weight_version) == ("past", 9)


def test_its_deadline_ends_with_the_version_that_it_could_get() -> None:
    world = World()
    waiter = world.enter(min_weight_version=9)
    world.now_s += 30
    world.gate.expire(waiter)
    ((_, refusal),) = world.decided
    assert isinstance(refusal, Refusal)
    assert (refusal.unmet, refusal.weight_version) == ("late", 7)
    expected = "min_weight_version 9 was not served within 30 s: weight version 7 is served"
    assert refusal.message == expected
    held = World(HOLDING)
    held.gate.expire(held.enter(min_weight_version=7))  # its version is there, and the gate holds
    ((_, refusal),) = held.decided
    assert isinstance(refusal, Refusal)
    assert not refusal.unmet


def test_bounds_count_those_that_wait_for_a_version() -> None:
    world = World(max_held=2, max_held_bytes=100)
    assert isinstance(world.enter(num_bytes=60, min_weight_version=8), Waiter)
    assert isinstance(world.enter(num_bytes=60, min_weight_version=8), Refusal)
    assert isinstance(world.enter(num_bytes=40, min_weight_version=8), Waiter)
    assert isinstance(world.enter(min_weight_version=8), Refusal)
    assert isinstance(world.enter(), Admission)
    world.gate.set_state(HOLDING)
    refusal = world.gate.would_refuse()
    assert refusal is not None
    assert "2 requests are already held" in refusal.message
    world.gate.set_state(OPEN, weight_version=8)
    assert world.gate.stats()["gate"]["held_bytes"] == world.gate.num_held == 0


def test_closing_and_the_loss_of_all_engines_refuse_them() -> None:
    for is_closed in (True, False):
        world = World()
        world.enter(min_weight_version=8)
        if is_closed:
            world.gate.set_state(CLOSED, reason="failed")
        else:
            world.set_members("a", state=BackendState.FENCED)
        ((_, refusal),) = world.decided
        assert isinstance(refusal, Refusal)
        assert not refusal.unmet


def test_they_are_aborted_and_leave_as_other_held_requests_do() -> None:
    world = World()
    world.enter("mine", min_weight_version=8)
    other = world.enter("other", min_weight_version=8)
    assert world.gate.abort(AbortOrder(frozenset({"mine"}))).num_held == 1
    world.gate.leave(other)
    assert world.gate.num_held == 0
    world.gate.set_state(OPEN, weight_version=8)
    assert [rid for rid, _ in world.decided] == ["mine"]


def test_an_adapter_counts_with_its_own_version() -> None:
    world = World()
    table = {"policy": "policy@9", "": "policy@9", "old": "old@8"}
    world.gate.set_state(OPEN, weight_version=9, base_version=7, adapters=table)
    contract = Contract(weight_version=8)
    admitted = world.gate.enter(names=("old",), contract=contract)
    assert isinstance(admitted, Admission)
    assert admitted.weight_version == 8
    assert isinstance(world.gate.enter(contract=contract), Refusal)


def test_only_engines_that_it_requires_are_chosen() -> None:
    world = World()
    asked: list[str] = []
    members = [Backend(f"a-{number}", Endpoint("127.0.0.1", 9000)) for number in range(20)]
    members.append(replace(members[0], engine_id="b", logprobs=LogprobRule(has_cuts=True)))
    world.epoch += 1
    world.gate.set_members(world.epoch, members)

    def is_b(member: Backend) -> bool:
        asked.append(member.engine_id)
        return member.logprobs.has_cuts

    def is_any(member: Backend) -> bool:
        asked.append(member.engine_id)
        return True

    assert isinstance(world.gate.enter(requires=is_any), Admission)
    assert len(asked) == 2  # one for each rule
    for _ in range(3):
        admission = world.gate.enter(requires=is_b)
        assert isinstance(admission, Admission)
        assert admission.member.engine_id == "b"
    refusal = world.gate.enter(requires=is_b, excluded_engine="b")
    assert isinstance(refusal, Refusal)
    assert [one.engine_id for one in refusal.unfit] == [f"a-{number}" for number in range(20)]
    world.set_members("a", state=BackendState.FENCED)
    refusal = world.gate.enter(requires=is_b)
    assert isinstance(refusal, Refusal)
    assert not refusal.unfit


WISHES: list[dict[str, int]] = [
    {},
    *(
        {field: version}
        for field in ("min_weight_version", "weight_version")
        for version in (1, 2, 3, 4)
    ),
]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from(WISHES)),
        st.tuples(st.just("push"), st.integers(0, 2)),
        st.tuples(st.just("hold"), st.none()),
        st.tuples(st.just("open"), st.none()),
        st.tuples(st.just("expire"), st.integers(0, 5)),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_the_gate_keeps_contracts_order_and_moves_on(
    steps: list[tuple[str, Any]],
) -> None:
    gate, served = Gate(), 1
    gate.set_members(1, [Backend("a", Endpoint("127.0.0.1", 9000))])
    gate.set_state(OPEN, weight_version=served)
    held: dict[Waiter, int] = {}
    wanted: dict[str, Contract] = {}

    def decided(waiter: Waiter, found: Admission | Refusal) -> None:
        held.pop(waiter, None)
        if isinstance(found, Admission):
            assert found.weight_version == served
            assert waiter.contract.why_broken(served, served, served) == ""
            ahead = [one for one in held if one.number < waiter.number]
            assert all(one.contract.fit(served) != "now" for one in ahead)
        else:
            assert found.unmet

    for number, (step, value) in enumerate(steps):
        if step == "enter":
            contract = Contract(**value) if value else NO_CONTRACT
            wanted[str(number)] = contract
            found = gate.enter(rid=str(number), contract=contract)
            if isinstance(found, Waiter):
                held[found] = number
                found.on_decision = lambda decision, waiter=found: decided(waiter, decision)
            elif isinstance(found, Admission):
                assert contract.fit(served) == "now"
                assert gate.state is OPEN
            else:
                assert contract.fit(served) == "never"
        elif step == "push":
            gate.set_state(HOLDING)
            served += value
            gate.set_state(OPEN, weight_version=served)
        elif step == "hold":
            gate.set_state(HOLDING)
        elif step == "open":
            gate.set_state(OPEN)
        elif held:
            waiter = list(held)[value % len(held)]
            if waiter.contract.fit(served) == "later":
                gate.expire(waiter)
                assert waiter not in held
        assert gate.num_held == len(held)
        if gate.state is OPEN:
            assert all(one.contract.fit(served) == "later" for one in held)
