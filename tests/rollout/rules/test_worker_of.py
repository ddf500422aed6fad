"""Which worker has a session: the same for every process, and all in turn for random ids."""

import os
from collections import Counter

import pytest

from rollout.rules.routing import worker_of


@pytest.mark.parametrize(("session_id", "number"), [("a", 3), ("mine", 3), ("\ud800", 0), ("", 0)])
def test_an_id_always_belongs_to_the_same_worker(session_id: str, number: int) -> None:
    assert worker_of(session_id, 4) == number


def test_random_ids_are_spread_evenly() -> None:
    found = Counter(worker_of(os.urandom(8).hex(), 4) for _ in range(8000))
    assert sorted(found) == [0, 1, 2, 3]
    assert min(found.values()) > 1700
