import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.protocol import Endpoint, WorkerType
from rollout.routing import (
    Hint,
    InFlight,
    LeastInFlight,
    Member,
    MemberState,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
    Sessions,
    least_in_flight,
    policy_of,
)


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


# -- the other policies ---------------------------------------------------------------------


def policies():
    return [
        LeastInFlight(),
        PowerOfTwo(Random(1)),
        RoundRobin(),
        Sessions(at_least=1),
        PrefixAffinity(at_least=1, block_bytes=4),
    ]


@pytest.mark.parametrize("number", range(5))
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.sets(st.sampled_from("abcde"), min_size=1),
            st.sampled_from(["", "s1", "s2", "s3"]),
            st.binary(max_size=24),
        ),
        max_size=80,
    )
)
def test_every_policy_chooses_a_candidate_and_counts_return_to_zero(number, events):
    policy, in_flight = policies()[number], InFlight[int]()
    live: dict[int, str] = {}
    for request, (ending, ids, session, prompt) in enumerate(events):
        candidates = members(*sorted(ids))
        hint = Hint(session, prompt, float(request))
        chosen = policy.choose(candidates, in_flight.num, hint)
        assert chosen in candidates
        in_flight.add(chosen.engine_id, request)
        live[request] = chosen.engine_id
        if ending in live:
            assert in_flight.discard(live.pop(ending), ending)
    for request, engine_id in live.items():
        in_flight.discard(engine_id, request)
    assert in_flight.by_engine() == {}


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(["s", "t", "u"]), st.binary(max_size=12)), max_size=200),
    st.booleans(),
)
def test_a_preference_never_takes_an_engine_over_its_share(num_engines, requests, is_session):
    policy = (
        Sessions(at_least=1, slack=1.25)
        if is_session
        else PrefixAffinity(at_least=1, slack=1.25, block_bytes=4)
    )
    engines, in_flight = members(*"abcdefgh"[:num_engines]), InFlight[int]()
    for number, (session, prompt) in enumerate(requests):
        chosen = policy.choose(engines, in_flight.num, Hint(session, prompt))
        in_flight.add(chosen.engine_id, number)
        fair = (number + 1) / num_engines
        assert in_flight.num(chosen.engine_id) <= math.ceil(1.25 * fair)


def none(engine_id):
    return 0


@given(st.text(min_size=1, max_size=8), st.integers(1, 8))
def test_a_session_sticks(session, num_engines):
    policy, engines = Sessions(), members(*"abcdefgh"[:num_engines])
    chosen = {policy.choose(engines, none, Hint(session)).engine_id for _ in range(5)}
    assert len(chosen) == 1


@given(st.text(min_size=1, max_size=8))
def test_a_session_fails_over_to_one_engine_and_comes_back(session):
    policy, engines = Sessions(), members(*"abcd")
    home = policy.choose(engines, none, Hint(session))
    rest = [member for member in engines if member != home]
    away = {policy.choose(rest, none, Hint(session)).engine_id for _ in range(5)}
    assert len(away) == 1
    assert policy.choose(engines, none, Hint(session)) == home


def test_a_session_stays_where_it_is_when_engines_are_added():
    policy = Sessions()
    few, many = members(*"ab"), members(*"abcdefgh")
    homes = {n: policy.choose(few, none, Hint(f"s{n}")) for n in range(50)}
    assert {n: policy.choose(many, none, Hint(f"s{n}")) for n in range(50)} == homes


def test_sessions_spread_over_the_engines():
    policy, engines = Sessions(), members(*"abcd")
    chosen = Counter(policy.choose(engines, none, Hint(f"s{n}")).engine_id for n in range(400))
    assert len(chosen) == 4
    assert max(chosen.values()) < 200


def test_sessions_are_forgotten_past_their_time_and_beyond_the_cap():
    policy, engines = Sessions(ttl_s=10, max_sessions=3), members(*"ab")
    for n in range(5):
        policy.choose(engines, none, Hint(f"s{n}", now_s=n))
    assert policy.num_sessions <= 4
    policy.choose(engines, none, Hint("late", now_s=100))
    assert policy.num_sessions == 1


def test_a_prompt_goes_where_its_beginning_went():
    policy, engines = PrefixAffinity(block_bytes=4), members(*"abcd")
    first = policy.choose(engines, none, Hint(prompt=b"system prompt one, question one"))
    policy.choose(engines, none, Hint(prompt=b"something else altogether, long"))
    again = policy.choose(engines, none, Hint(prompt=b"system prompt one, question two!"))
    assert again == first


def test_prefix_affinity_reuses_more_than_least_in_flight_on_shared_prefixes():
    def blocks_found(policy):
        cached: dict[str, set[bytes]] = {engine_id: set() for engine_id in "abcd"}
        found = 0
        rng = Random(3)
        for number in range(400):
            prompt = b"%03d" % rng.randrange(12) * 40 + b"%08d" % number
            blocks = [prompt[: end + 8] for end in range(0, len(prompt) - 8, 8)]
            chosen = policy.choose(members(*"abcd"), none, Hint(prompt=prompt)).engine_id
            found += sum(block in cached[chosen] for block in blocks)
            cached[chosen].update(blocks)
        return found

    assert blocks_found(PrefixAffinity(block_bytes=8)) > blocks_found(LeastInFlight())


def test_the_memory_of_prefixes_is_bounded():
    policy = PrefixAffinity(block_bytes=4, max_blocks=10)
    for number in range(100):
        policy.choose(members("a"), none, Hint(prompt=b"%016d" % number))
    assert len(policy._engines) == 10


@pytest.mark.parametrize(
    "name", ["least_in_flight", "power_of_two", "round_robin", "session", "prefix"]
)
def test_every_policy_of_the_configuration_exists(name):
    policy = policy_of(name, session_ttl_s=1, max_sessions=1)
    assert policy.choose(members("a"), none).engine_id == "a"


def test_round_robin_takes_turns_whatever_the_load():
    policy = RoundRobin()
    load = {"a": 9, "b": 0, "c": 5}
    chosen = [policy.choose(members(*"abc"), load.__getitem__).engine_id for _ in range(6)]
    assert chosen == [*"abcabc"]


def test_power_of_two_takes_the_less_loaded_of_its_two():
    policy, load = PowerOfTwo(Random(2)), {"a": 9, "b": 0}
    chosen = {policy.choose(members(*"ab"), load.__getitem__).engine_id for _ in range(20)}
    assert chosen == {"b"}
