"""The tables of the pure part: capacity, staleness, retries, limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.protocol import VersionSpan
from rollout.driver.concurrency import Bounds, next_limit
from rollout.driver.door import Load, Trouble
from rollout.driver.plan import Freshness, Mode, capacity, deliverable, may_begin, seed_of
from rollout.driver.retry import Patience, Troubles
from rollout.samples import Sample


@pytest.mark.parametrize(
    ("mode", "lag", "is_asked", "most"),
    [
        (Mode.SYNC, None, True, 12),
        (Mode.SYNC, None, False, 0),
        (Mode.ONE_AHEAD, None, True, 12),
        (Mode.ONE_AHEAD, 4, False, 12),
        (Mode.ASYNC, None, False, 20),
        (Mode.ASYNC, 0, True, 20),
        (Mode.ASYNC, 3, False, 36),
    ],
)
def test_capacity_is_bounded_in_every_mode(mode, lag, is_asked: bool, most: int) -> None:
    assert capacity(mode, 8, 1.5, lag, is_asked) == most


@pytest.mark.parametrize(
    ("num_open", "num_ready", "num_unfinished", "may"),
    [(3, 4, 9, True), (4, 4, 9, False), (0, 8, 0, False), (3, 4, 10, False)],
)
def test_a_group_is_begun_only_with_room_for_it(num_open, num_ready, num_unfinished, may) -> None:
    assert may_begin(num_open, num_ready, num_unfinished, limit=10, most=8) is may


def sample(*versions: str) -> Sample:
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
    return Sample([1], [0] * len(spans), [0.0] * len(spans), weight_versions=spans)


@pytest.mark.parametrize(
    ("freshness", "versions", "is_stale"),
    [
        (Freshness(5, 1), ("4", "5"), False),
        (Freshness(5, 1), ("3", "5"), True),
        (Freshness(5, 0), ("5",), False),
        (Freshness(5, None), ("0",), False),
        (Freshness(None, 0), ("0",), False),
        (Freshness(5, 0), (), False),
        (Freshness(5, 0), ("default",), False),
        (Freshness(pin=4), ("4", "4"), False),
        (Freshness(pin=4), ("4", "5"), True),
        (Freshness(pin=0), ("1",), True),
    ],
)
def test_a_sample_is_as_old_as_its_oldest_token(freshness, versions, is_stale: bool) -> None:
    assert freshness.is_stale(sample(*versions)) is is_stale


def test_the_first_taken_are_delivered_first() -> None:
    assert deliverable([7, 3, 5], 2) == [3, 5]


def test_seeds_are_small_whole_numbers_of_their_own() -> None:
    seeds = {seed_of(1, serial, index, 0) for serial in range(100) for index in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(1, 2, 3, 0) == seed_of(1, 2, 3, 0) != seed_of(1, 2, 3, 1)


def test_a_refusal_is_never_retried() -> None:
    assert wait(Troubles(), Trouble.REFUSED) is None


def wait(troubles: Troubles, trouble: Trouble, now_s: float = 0.0, after_s: float = 0.0):
    patience = Patience(max_lost=3, unavailable_s=60.0, max_fruitless=4)
    return troubles.wait_s(trouble, retry_after_s=after_s, now_s=now_s, patience=patience)


def test_lost_engines_are_waited_for_longer_each_time_and_not_for_ever() -> None:
    troubles = Troubles()
    assert [wait(troubles, Trouble.LOST) for _ in range(4)] == [0.1, 0.2, 0.4, None]


def test_aborts_without_a_token_end_in_the_end_but_progress_forgives_them() -> None:
    troubles = Troubles()
    for _ in range(4):
        assert wait(troubles, Trouble.ABORTED) is not None
    troubles.has_progressed()
    assert wait(troubles, Trouble.ABORTED) == 0.1
    assert [wait(troubles, Trouble.ABORTED) for _ in range(4)][-1] is None


@pytest.mark.parametrize(
    ("now_s", "after_s", "expected"),
    [(0.0, 2.0, 2.0), (0.0, 0.0, 1.0), (0.0, 500.0, 10.0), (59.0, 5.0, 1.0), (60.0, 2.0, None)],
)
def test_a_closed_door_is_asked_when_it_says_until_patience_ends(now_s, after_s, expected) -> None:
    troubles = Troubles(unavailable_since_s=0.0)
    assert wait(troubles, Trouble.UNAVAILABLE, now_s, after_s) == expected


def test_patience_with_a_closed_door_begins_anew_after_another_trouble() -> None:
    troubles = Troubles(unavailable_since_s=0.0)
    wait(troubles, Trouble.LOST)
    assert wait(troubles, Trouble.UNAVAILABLE, now_s=100.0, after_s=2.0) == 2.0


BOUNDS = Bounds(lowest_per_engine=4, highest=100)


@pytest.mark.parametrize(
    ("limit", "num_used", "load", "expected"),
    [
        (40, 40, Load(2, num_running=40), 50),
        (40, 39, Load(2, num_running=39), 40),
        (40, 40, Load(2, num_running=40, kv_use=0.9), 40),
        (40, 40, Load(2, num_running=40, kv_use=0.97), 30),
        (40, 40, Load(2, num_running=20, num_waiting=20), 36),
        (40, 40, Load(2, num_running=36, num_waiting=4), 50),
        (99, 99, Load(2, num_running=99), 100),
        (9, 9, Load(2, kv_use=1.0), 8),
        (40, 40, Load(0), 40),
    ],
)
def test_the_limit_follows_the_load(limit, num_used, load, expected: int) -> None:
    assert next_limit(limit, num_used, load, BOUNDS) == expected


@settings(deadline=None)
@given(
    st.integers(1, 10_000),
    st.integers(0, 10_000),
    st.builds(
        Load,
        num_engines=st.integers(0, 64),
        num_running=st.integers(0, 5000),
        num_waiting=st.integers(0, 5000),
        kv_use=st.none() | st.floats(0, 1),
    ),
    st.builds(Bounds, lowest_per_engine=st.integers(1, 64), highest=st.integers(1, 5000)),
)
def test_the_limit_stays_within_its_bounds(limit, num_used, load, bounds) -> None:
    assert 1 <= next_limit(limit, num_used, load, bounds) <= bounds.highest
