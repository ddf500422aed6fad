"""Records in memory that outlive a process: whole or not there, within a bound, used again."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator

import pytest

from rollout.router.state.state_file import Kind, StateFile
from rollout.router.state.stored_replies import StoredReplies
from tests.support.line_kills import killed_at_each_line


@pytest.fixture
def state() -> Iterator[StateFile]:
    made = StateFile.make(1 << 20)
    yield made
    made.close()


def contents(state: StateFile) -> dict[tuple[int, int], bytes]:
    """What another process finds."""
    other = StateFile(state.path, 1 << 20)
    found = {(one.owner, one.number): other.read(one.place) for one in other.records()}
    other.close()
    return found


def test_another_process_finds_the_records_that_were_not_removed(state: StateFile) -> None:
    state.records()
    chance, expected, places = random.Random(1), dict[tuple[int, int], bytes](), []
    for number in range(1, 400):
        data = chance.randbytes(chance.randrange(1, 3000))
        place = state.put(Kind.EVENTS, 7, number, data, room=len(data) + 10)
        assert place
        state.extend(place, len(data), b"0123456789")
        expected[7, number] = data + b"0123456789"
        places.append((place, number))
        if chance.random() < 0.9:
            place, removed = places.pop(chance.randrange(len(places)))
            state.remove(place)
            del expected[7, removed]
    assert contents(state) == expected


@pytest.mark.parametrize(
    "name",
    [
        "put",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("records", "_new", "extend", "remove")
        ),
    ],
)
def test_a_process_that_is_killed_at_any_line_leaves_whole_records(name: str) -> None:
    states = [StateFile.make(1 << 20)]
    killed = []
    for is_killed in killed_at_each_line(
        getattr(StateFile, name), lambda: write_records(states[-1].path)
    ):
        killed.append(is_killed)
        check_records(states[-1])
        states[-1].close()
        states.append(StateFile.make(1 << 20))
    states[-1].close()
    assert sum(killed) == len(killed) - 1 > 0


LONG = b"long" * 400


def write_records(path: str) -> None:
    mine = StateFile(path, 1 << 20)
    mine.records()
    for number in (1, 2, 1, 2):
        place = mine.put(Kind.EVENTS, 1, number, LONG, room=2 * len(LONG))
        mine.extend(place, len(LONG), LONG)
        if number == 1:
            mine.remove(place)


def check_records(state: StateFile) -> None:
    """All that is found is whole, and another process writes beside it."""
    before = contents(state)
    assert before.keys() <= {(1, 1), (1, 2)}
    assert all(data in (LONG, LONG + LONG) for data in before.values())
    after = StateFile(state.path, 1 << 20)
    after.records()
    for number in (3, 4):
        assert after.put(Kind.EVENTS, 1, number, b"short")
        before[1, number] = b"short"
        assert contents(state) == before
    after.close()


def test_what_does_not_fit_is_reported_once_and_counted(
    state: StateFile, caplog: pytest.LogCaptureFixture
) -> None:
    state.records()
    with caplog.at_level(logging.ERROR):
        places = [state.put(Kind.EVENTS, 1, number, b"x" * 100_000) for number in range(20)]
    assert 0 in places
    assert state.num_lost == places.count(0)
    (record,) = caplog.records
    assert "generation goes on" in record.message
    state.remove(places[0])
    assert state.put(Kind.EVENTS, 1, 99, b"x" * 100_000) == places[0]


def test_the_lock_is_free_when_its_process_is_killed(state: StateFile) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        StateFile(state.path).lock()
        os.write(tell, b"x")
        signal.pause()
    os.read(ready, 1)
    os.kill(child, signal.SIGKILL)
    state.lock()
    os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)


def test_a_reply_of_many_events_needs_the_room_of_the_last_ones(state: StateFile) -> None:
    state.records()
    replies = StoredReplies(state)
    kept = replies.of(("/generate", "r", b"{}"), (None,))
    kept.begin(1, "sglang", (None,))
    for number in range(1, 200):
        kept.add(b"x" * 50 * number + b"\n", True)
    assert state.num_lost == 0
    assert sum(map(len, contents(state).values())) < 20 * 200 * 50
    kept.end()
    assert contents(state) == {}
