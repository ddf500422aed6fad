from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Endpoint, WorkerType
from rollout.rules.routing import Backend, BackendState, Candidates, InFlight


def members(engine_ids: str) -> list[Backend]:
    return [
        Backend(engine_id, Endpoint("127.0.0.1", 9000 + index))
        for index, engine_id in enumerate(engine_ids)
    ]


@pytest.mark.parametrize(
    ("state", "worker_type", "is_choosable"),
    [
        (BackendState.SERVING, WorkerType.REGULAR, True),
        (BackendState.SERVING, WorkerType.PREFILL, False),
        (BackendState.SERVING, WorkerType.DECODE, False),
        (BackendState.SERVING, WorkerType.PLACEHOLDER, False),
        (BackendState.DRAINING, WorkerType.REGULAR, False),
        (BackendState.ASLEEP, WorkerType.REGULAR, False),
        (BackendState.FENCED, WorkerType.REGULAR, False),
        (BackendState.DEAD, WorkerType.REGULAR, False),
    ],
)
def test_only_a_serving_regular_engine_can_be_chosen(state, worker_type, is_choosable):
    member = Backend("a", Endpoint("127.0.0.1", 9000), state, worker_type)
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


# -- candidates -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "turns", "chosen"),
    [
        ((0, 0, 0), "abc", "a"),
        ((0, 0, 0), "bca", "b"),
        ((0, 0, 0), "ab", "c"),
        ((3, 1, 2), "abc", "b"),
        ((3, 1, 1), "acb", "c"),
        ((1, 1, 0), "abc", "c"),
        ((5, 5, 5), "cab", "c"),
    ],
)
def test_the_least_loaded_comes_first_and_of_equals_the_next_in_turn(loads, turns, chosen):
    load = dict(zip("abc", loads, strict=True))
    candidates = Candidates(members("abc"), load.__getitem__, turns)
    assert candidates.least().engine_id == chosen
    assert candidates.total == sum(loads)


def test_idle_engines_share_the_requests_of_a_quiet_hour():
    in_flight = InFlight[int]()
    (candidates,) = in_flight.offer(members("abc"))
    chosen = []
    for number in range(9):
        chosen.append(candidates.least().engine_id)
        in_flight.add(chosen[-1], number)
        in_flight.discard(chosen[-1], number)
    assert chosen == [*"abcabcabc"]


def test_the_turns_survive_a_change_of_the_membership():
    in_flight = InFlight[int]()
    (candidates,) = in_flight.offer(members("abc"))
    in_flight.add(candidates.least().engine_id, 1)
    in_flight.discard("a", 1)
    (candidates,) = in_flight.offer(members("abd"))
    assert candidates.turns() == [*"dba"]  # the new engine is the next in turn


def test_a_candidate_is_found_by_its_id_and_no_other_engine_is():
    (candidates,) = InFlight[int]().offer(members("ab"))
    assert [candidates.get(engine_id) for engine_id in "abc"] == [*candidates.members, None]


def test_the_others_are_all_but_one_as_they_are_now():
    in_flight = InFlight[int]()
    (candidates,) = in_flight.offer(members("abc"))
    for request, engine_id in enumerate("aacbb"):
        in_flight.add(engine_id, request)
    others = candidates.without("c")
    assert (others.by_load(), others.total) == ({2: ["a", "b"]}, 4)
    assert candidates.without("x") is candidates
    assert candidates.without("a").without("b").without("c").members == ()


GROUPS = st.lists(st.sampled_from([0, 1, None]), min_size=5, max_size=5)
CHANGES = st.tuples(st.sampled_from("abcde"), st.integers(0, 5), st.sampled_from(["+", "-"]))


@given(st.lists(st.one_of(CHANGES, GROUPS, st.none()), max_size=80))
def test_candidates_stand_where_the_sets_of_live_requests_put_them(events):
    """None looks; so that changes are seen one by one and many at once."""
    in_flight: InFlight[int] = InFlight()
    groups = in_flight.offer(members("abc"), members("de"))
    live: set[tuple[str, int]] = set()
    for event in [*events, None]:
        match event:
            case (engine_id, request, "+"):
                in_flight.add(engine_id, request)
                live.add((engine_id, request))
            case (engine_id, request, "-"):
                in_flight.discard(engine_id, request)
                live.discard((engine_id, request))
            case [*places]:
                groups = in_flight.offer(
                    *(
                        members(e for e, at in zip("abcde", places, strict=True) if at == number)
                        for number in (0, 1)
                    )
                )
            case None:
                sizes = Counter(engine_id for engine_id, _ in live)
                for candidates in groups:
                    ids = [member.engine_id for member in candidates.members]
                    by_load: dict[int, set[str]] = {}
                    for engine_id in ids:
                        by_load.setdefault(sizes[engine_id], set()).add(engine_id)
                    found = candidates.by_load()
                    assert {num: set(equals) for num, equals in found.items()} == by_load
                    assert sorted(candidates.turns()) == ids
                    assert candidates.total == sum(sizes[engine_id] for engine_id in ids)
                    if ids:
                        assert candidates.least().engine_id == found[min(by_load)][0]


@given(
    st.lists(
        st.one_of(
            st.just("choose"),
            st.integers(0, 40),
            st.sets(st.sampled_from("abcdef"), min_size=1).map(sorted),
        ),
        max_size=120,
    )
)
def test_of_equals_the_one_that_changed_longest_ago_is_next(events):
    in_flight: InFlight[int] = InFlight()
    (candidates,) = in_flight.offer(members("abc"))
    changed_in, num_choices, live = dict.fromkeys("abc", 0), 0, dict[int, str]()
    for number, event in enumerate(events):
        if event == "choose":
            chosen = candidates.least().engine_id
            ranks = {name: (in_flight.num(name), when) for name, when in changed_in.items()}
            assert ranks[chosen] == min(ranks.values())
            num_choices += 1
            changed_in[chosen] = num_choices
            in_flight.add(chosen, number)
            live[number] = chosen
        elif isinstance(event, list):
            (candidates,) = in_flight.offer(members(event))
            changed_in = {name: changed_in.get(name, 0) for name in event}
            num_choices += 1
        elif event in live:
            engine_id = live.pop(event)
            in_flight.discard(engine_id, event)
            if engine_id in changed_in:
                changed_in[engine_id] = num_choices


@given(st.lists(st.integers(1, 5), max_size=60), st.integers(1, 5))
def test_loads_stay_within_one_of_each_other_while_nothing_ends(sizes, num_engines):
    in_flight = InFlight[int]()
    (candidates,) = in_flight.offer(members("abcde"[:num_engines]))
    for number in range(sum(sizes)):
        in_flight.add(candidates.least().engine_id, number)
    loads = [in_flight.num(member.engine_id) for member in candidates.members]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("avoided", "excluded", "chosen"),
    [
        ("", "", "a"),
        ("a", "", "b"),
        ("ab", "", "c"),
        ("abc", "", "a"),
        ("ab", "c", "a"),
        ("ab", "a", "c"),
        ("abc", "a", "b"),
    ],
)
def test_an_avoided_engine_is_chosen_only_where_there_is_no_other(avoided, excluded, chosen):
    in_flight: InFlight[int] = InFlight()
    (candidates,) = in_flight.offer(members("abc"), avoided=avoided)
    assert candidates.without(excluded).least().engine_id == chosen
