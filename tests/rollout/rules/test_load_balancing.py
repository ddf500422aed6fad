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


def loaded(**loads: int) -> Candidates:
    return Candidates(members("".join(loads)), loads.__getitem__)


def policies():
    return [
        LeastInFlight(),
        Affinity(at_least=1),
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


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from(["s", "t", "u"]), st.binary(max_size=12)), max_size=200),
    st.booleans(),
)
def test_a_preference_never_takes_an_engine_over_its_share(num_engines, requests, is_affinity):
    policy = Affinity(at_least=1) if is_affinity else PrefixAffinity(at_least=1, block_bytes=4)
    in_flight = InFlight[int]()
    (engines,) = in_flight.offer(members("abcdefgh"[:num_engines]))
    for number, (affinity, prompt) in enumerate(requests):
        chosen = policy.choose(engines, Hint(affinity, prompt))
        in_flight.add(chosen.engine_id, number)
        fair = (number + 1) / num_engines
        assert in_flight.num(chosen.engine_id) <= math.ceil(1.25 * fair)


@given(st.text(min_size=1, max_size=8), st.integers(1, 8))
def test_an_affinity_sticks(affinity, num_engines):
    policy, engines = Affinity(), idle("abcdefgh"[:num_engines])
    chosen = {policy.choose(engines, Hint(affinity)).engine_id for _ in range(5)}
    assert len(chosen) == 1


@given(st.text(min_size=1, max_size=8))
def test_an_affinity_fails_over_to_one_engine_and_comes_back(affinity):
    policy, engines = Affinity(), idle("abcd")
    home = policy.choose(engines, Hint(affinity))
    rest = engines.without(home.engine_id)
    away = {policy.choose(rest, Hint(affinity)).engine_id for _ in range(5)}
    assert len(away) == 1
    assert policy.choose(engines, Hint(affinity)) == home


def test_an_affinity_stays_where_it_is_when_engines_are_added():
    policy = Affinity()
    few, many = idle("ab"), idle("abcdefgh")
    homes = {n: policy.choose(few, Hint(f"s{n}")) for n in range(50)}
    assert {n: policy.choose(many, Hint(f"s{n}")) for n in range(50)} == homes


def test_an_affinity_keeps_its_engine_when_others_come_and_go():
    """The ring keeps those that are gone for a while; it must not matter."""
    affinities = [Hint(f"s{n}") for n in range(100)]
    policy, engines = Affinity(), idle("adgz")
    for others in ("abcd", "efgh", "az", "adg"):
        policy.choose(idle(others), Hint(f"on {others}"))
    fresh = Affinity()
    for hint in affinities:
        assert policy.choose(engines, hint) == fresh.choose(engines, hint)


def test_the_ring_forgets_engines_that_are_gone_for_good():
    policy = Affinity()
    for number in range(50):
        policy.choose(
            Candidates(members(["a", "b", f"c{number}"]), lambda engine_id: 0), Hint(f"s{number}")
        )
    assert len(policy._ring) <= 2 * 3 * 64


def test_affinities_spread_over_the_engines():
    policy, engines = Affinity(), idle("abcd")
    chosen = Counter(policy.choose(engines, Hint(f"s{n}")).engine_id for n in range(400))
    assert len(chosen) == 4
    assert max(chosen.values()) < 200


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
