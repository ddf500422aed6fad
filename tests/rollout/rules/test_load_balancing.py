import math
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Endpoint
from rollout.rules.load_balancing import (
    Affinity,
    LeastInFlight,
    PrefixAffinity,
    make_policy,
)
from rollout.rules.routing import Backend, Candidates, Hint, InFlight


def members(engine_ids: Iterable[str]) -> list[Backend]:
    return [
        Backend(engine_id, Endpoint("127.0.0.1", 9000 + index))
        for index, engine_id in enumerate(engine_ids)
    ]


def idle(engine_ids: str) -> Candidates:
    return Candidates(members(engine_ids), lambda engine_id: 0)


def policies():
    return [
        LeastInFlight(),
        Affinity(),
        PrefixAffinity(at_least=1, block_bytes=4),
    ]


@pytest.mark.parametrize("number", range(3))
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
    for request, (ending, ids, affinity, prompt) in enumerate(events):
        (candidates,) = in_flight.offer(members("".join(sorted(ids))))
        hint = Hint(affinity, prompt, float(request))
        chosen = policy.choose(candidates, hint)
        assert chosen in candidates.members
        in_flight.add(chosen.engine_id, request)
        live[request] = chosen.engine_id
        if ending in live:
            assert in_flight.discard(live.pop(ending), ending)
    for request, engine_id in live.items():
        in_flight.discard(engine_id, request)
    assert in_flight.by_engine() == {}


@given(st.integers(1, 8), st.lists(st.binary(max_size=12), max_size=200))
def test_a_prefix_never_takes_an_engine_over_its_share(num_engines, prompts):
    policy, in_flight = PrefixAffinity(at_least=1, block_bytes=4), InFlight[int]()
    (engines,) = in_flight.offer(members("abcdefgh"[:num_engines]))
    for number, prompt in enumerate(prompts):
        chosen = policy.choose(engines, Hint(prompt=prompt))
        in_flight.add(chosen.engine_id, number)
        fair = (number + 1) / num_engines
        assert in_flight.num(chosen.engine_id) <= math.ceil(1.25 * fair)


@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(st.sampled_from(["", "s", "t"]), st.integers(0, 1 << 20), st.integers(0, 300)),
        max_size=200,
    ),
)
def test_an_affinity_keeps_its_home_as_long_as_its_prompt_is_worth_the_wait(num_engines, events):
    """The rule as it is written down, at random loads."""
    policy, in_flight = Affinity(), InFlight[int]()
    (engines,) = in_flight.offer(members("abcdefgh"[:num_engines]))
    live: dict[int, str] = {}
    homes: dict[str, str] = {}
    for number, (affinity, num_bytes, ending) in enumerate(events):
        least, home = engines.least().engine_id, homes.get(affinity)
        chosen = policy.choose(engines, Hint(affinity, num_bytes=num_bytes)).engine_id
        expected = least
        if affinity and home is not None:
            more = in_flight.num(home) - in_flight.num(least)
            worth = min(2 + num_bytes / 256, 4 + len(in_flight) / num_engines / 2)
            expected = home if more <= max(2, worth) else least
        assert chosen == expected
        if affinity:
            homes[affinity] = chosen
        in_flight.add(chosen, number)
        live[number] = chosen
        if ending in live:
            in_flight.discard(live.pop(ending), ending)


@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 60)), max_size=120))
def test_without_an_affinity_it_is_least_in_flight(events):
    chosen = []
    for policy in (LeastInFlight(), Affinity()):
        in_flight = InFlight[int]()
        (engines,) = in_flight.offer(members("abcd"))
        at: dict[int, str] = {}
        for number, (num_bytes, ending) in enumerate(events):
            at[number] = policy.choose(engines, Hint(num_bytes=num_bytes)).engine_id
            in_flight.add(at[number], number)
            if ending in at:
                in_flight.discard(at[ending], ending)
        chosen.append(at)
    assert chosen[0] == chosen[1]


TURN = 20_000
"""Bytes of a turn of an agent with about 5000 tokens."""


@pytest.mark.parametrize(
    ("num_bytes", "at_home", "elsewhere", "stays"),
    [
        (0, 2, 0, True),  # a wait that no prompt is too short for
        (0, 3, 0, False),
        (255, 3, 0, False),
        (256, 3, 0, True),
        (TURN, 4, 0, True),
        (TURN, 5, 0, False),  # over four and half a share: 4 + 5 / 4 / 2
        (TURN, 51, 30, True),
        (TURN, 52, 30, False),  # 4 + 142 / 4 / 2 is less than 22
        (0, 33, 30, False),
    ],
)
def test_the_table_of_when_a_turn_leaves_its_home(num_bytes, at_home, elsewhere, stays):
    loads = dict.fromkeys("abcd", 0)
    engines, policy = Candidates(members("abcd"), loads.__getitem__), Affinity()
    home = policy.choose(engines, Hint("s", num_bytes=num_bytes)).engine_id
    loads |= dict.fromkeys("abcd", elsewhere) | {home: at_home}
    engines.changed |= dict.fromkeys("abcd")
    assert (policy.choose(engines, Hint("s", num_bytes=num_bytes)).engine_id == home) == stays


def test_a_turn_stays_where_it_has_moved_as_its_newest_prefix_is_there():
    loads = dict.fromkeys("abcd", 0)
    engines, policy = Candidates(members("abcd"), loads.__getitem__), Affinity()
    turn = Hint("s", num_bytes=TURN)
    home = policy.choose(engines, turn).engine_id
    loads[home] = 50
    engines.changed[home] = None
    second = policy.choose(engines, turn).engine_id
    assert second != home
    loads[home] = 0
    engines.changed[home] = None
    assert {policy.choose(engines, turn).engine_id for _ in range(5)} == {second}


def test_sessions_of_a_lost_engine_spread_and_come_back_only_to_balance_the_load():
    policy, in_flight = Affinity(), InFlight[str]()
    sessions = [f"s{number}" for number in range(40)]

    def turn_of_all(ids: str) -> dict[str, str]:
        (engines,) = in_flight.offer(members(ids))
        at = {}
        for session in sessions:
            at[session] = policy.choose(engines, Hint(session, num_bytes=TURN)).engine_id
            in_flight.add(at[session], session)
        for session, engine_id in at.items():
            in_flight.discard(engine_id, session)
        return at

    first = turn_of_all("abcd")
    assert set(Counter(first.values()).values()) == {10}
    without = turn_of_all("abc")
    assert all(without[one] == first[one] for one in sessions if first[one] != "d")
    assert sorted(Counter(without.values()).values()) == [13, 13, 14]
    again = turn_of_all("abcd")
    moved = [one for one in sessions if again[one] != without[one]]
    assert 0 < len(moved) <= 10
    assert {again[one] for one in moved} == {"d"}
    assert turn_of_all("abcd") == again


@given(st.text(min_size=1, max_size=8), st.integers(1, 8))
def test_an_affinity_sticks(affinity, num_engines):
    policy, engines = Affinity(), idle("abcdefgh"[:num_engines])
    chosen = {policy.choose(engines, Hint(affinity)).engine_id for _ in range(5)}
    assert len(chosen) == 1


def test_an_affinity_stays_where_it_is_when_engines_are_added():
    policy = Affinity()
    few, many = idle("ab"), idle("abcdefgh")
    homes = {n: policy.choose(few, Hint(f"s{n}")) for n in range(50)}
    assert {n: policy.choose(many, Hint(f"s{n}")) for n in range(50)} == homes


def test_affinities_are_forgotten_past_their_time_and_beyond_the_cap():
    policy, engines = Affinity(ttl_s=10, max_num=3), idle("ab")
    for n in range(5):
        policy.choose(engines, Hint(f"s{n}", now_s=n))
    assert policy.num_kept <= 4
    policy.choose(engines, Hint("late", now_s=100))
    assert policy.num_kept == 1


def test_a_prompt_goes_where_its_beginning_went():
    policy, engines = PrefixAffinity(block_bytes=4), idle("abcd")
    first = policy.choose(engines, Hint(prompt=b"system prompt one, question one"))
    policy.choose(engines, Hint(prompt=b"something else altogether, long"))
    again = policy.choose(engines, Hint(prompt=b"system prompt one, question two!"))
    assert again == first


def test_prefix_affinity_reuses_more_than_least_in_flight_on_shared_prefixes():
    def blocks_found(policy):
        cached: dict[str, set[bytes]] = {engine_id: set() for engine_id in "abcd"}
        found = 0
        rng, in_flight = Random(3), InFlight[int]()
        (engines,) = in_flight.offer(members("abcd"))
        for number in range(400):
            prompt = b"%03d" % rng.randrange(12) * 40 + b"%08d" % number
            blocks = [prompt[: end + 8] for end in range(0, len(prompt) - 8, 8)]
            chosen = policy.choose(engines, Hint(prompt=prompt)).engine_id
            in_flight.add(chosen, number)
            in_flight.discard(chosen, number)
            found += sum(block in cached[chosen] for block in blocks)
            cached[chosen].update(blocks)
        return found

    assert blocks_found(PrefixAffinity(block_bytes=8)) > blocks_found(LeastInFlight())


def test_the_memory_of_prefixes_is_bounded():
    policy = PrefixAffinity(block_bytes=4, max_blocks=10)
    for number in range(100):
        policy.choose(idle("a"), Hint(prompt=b"%016d" % number))
    assert len(policy._engines) == 10


@pytest.mark.parametrize("name", ["least_in_flight", "affinity", "prefix"])
def test_every_policy_of_the_configuration_exists(name):
    policy = make_policy(name, affinity_ttl_s=1, max_affinities=1)
    assert policy.choose(idle("a")).engine_id == "a"


@pytest.mark.parametrize("number", range(3))
def test_no_policy_looks_at_more_engines_when_there_are_more(number):
    """Counted in questions for a number of live requests: the one thing that cannot be kept."""

    def asked_per_choice(num_engines: int) -> float:
        policy, in_flight, num_asked = policies()[number], InFlight[int](), 0
        engines = [Backend(f"e-{n}", Endpoint("127.0.0.1", 9000)) for n in range(num_engines)]
        (candidates,) = in_flight.offer(engines)
        load = candidates.load

        def counted(engine_id: str) -> int:
            nonlocal num_asked
            num_asked += 1
            return load(engine_id)

        candidates.load = counted
        rng, live = Random(5), []
        for request in range(600):
            hint = Hint(f"s{rng.randrange(40)}", rng.randbytes(1) * 16)
            live.append((policy.choose(candidates, hint).engine_id, request))
            in_flight.add(*live[-1])
            if len(live) > 2 * 64:
                in_flight.discard(*live.pop(rng.randrange(len(live))))
        return num_asked / 600

    assert asked_per_choice(256) < asked_per_choice(16) + 4
