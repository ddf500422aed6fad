from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Endpoint, WorkerType
from rollout.routing import InFlight, LeastInFlight, Member, MemberState, least_in_flight


def members(*engine_ids: str) -> list[Member]:
    return [
        Member(engine_id, Endpoint("127.0.0.1", 9000 + index))
        for index, engine_id in enumerate(engine_ids)
    ]


@pytest.mark.parametrize(
    ("loads", "start", "chosen"),
    [
        ((0, 0, 0), 0, "a"),
        ((0, 0, 0), 1, "b"),
        ((0, 0, 0), 3, "a"),
        ((3, 1, 2), 0, "b"),
        ((3, 1, 1), 2, "c"),
        ((1, 1, 0), 0, "c"),
        ((5, 5, 5), 2, "c"),
        ((0, 1, 0), 1, "c"),
    ],
)
def test_the_least_loaded_is_chosen_and_of_equals_the_next_in_turn(loads, start, chosen):
    load = dict(zip("abc", loads, strict=True))
    assert least_in_flight(members("a", "b", "c"), load.__getitem__, start).engine_id == chosen


def test_idle_engines_share_the_requests_of_a_quiet_hour():
    policy = LeastInFlight()
    chosen = Counter(
        policy.choose(members("a", "b", "c"), lambda engine_id: 0).engine_id for _ in range(9)
    )
    assert chosen == {"a": 3, "b": 3, "c": 3}


def test_the_turn_survives_the_engine_that_had_it_last():
    policy = LeastInFlight()
    policy.choose(members("a", "b"), lambda engine_id: 0)
    assert policy.choose(members("b", "c"), lambda engine_id: 0).engine_id == "b"


@pytest.mark.parametrize(
    ("state", "worker_type", "is_choosable"),
    [
        (MemberState.SERVING, WorkerType.REGULAR, True),
        (MemberState.SERVING, WorkerType.PREFILL, False),
        (MemberState.SERVING, WorkerType.DECODE, False),
        (MemberState.SERVING, WorkerType.PLACEHOLDER, False),
        (MemberState.DRAINING, WorkerType.REGULAR, False),
        (MemberState.ASLEEP, WorkerType.REGULAR, False),
        (MemberState.FENCED, WorkerType.REGULAR, False),
        (MemberState.DEAD, WorkerType.REGULAR, False),
    ],
)
def test_only_a_serving_regular_engine_can_be_chosen(state, worker_type, is_choosable):
    member = Member("a", Endpoint("127.0.0.1", 9000), state, worker_type)
    assert member.is_choosable is is_choosable


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.sampled_from(["+", "-"]))))
def test_load_is_the_number_of_live_requests_whatever_is_ended_twice(events):
    in_flight: InFlight[int] = InFlight()
    live: set[tuple[str, int]] = set()
    for engine_id, request, event in events:
        if event == "+":
            in_flight.add(engine_id, request)
            live.add((engine_id, request))
        else:
            assert in_flight.discard(engine_id, request) is ((engine_id, request) in live)
            live.discard((engine_id, request))
        for other in "abc":
            assert in_flight.num(other) == sum(1 for where, _ in live if where == other)
        assert len(in_flight) == len(live)
        assert bool(in_flight) is bool(live)
        assert sorted(in_flight) == sorted(request for _, request in live)


@given(st.lists(st.integers(0, 99), max_size=200), st.integers(1, 5))
def test_loads_stay_within_one_of_each_other_while_nothing_ends(requests, num_engines):
    policy, in_flight = LeastInFlight(), InFlight[int]()
    engines = members(*"abcde"[:num_engines])
    for number, _ in enumerate(requests):
        in_flight.add(policy.choose(engines, in_flight.num).engine_id, number)
    loads = [in_flight.num(member.engine_id) for member in engines]
    assert max(loads) - min(loads) <= 1
