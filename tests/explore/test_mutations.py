"""The explorer finds bugs that are put into the real code, each in a short schedule."""

import logging
import re
from collections.abc import Iterator

import pytest

from tests.explore.explorer import replay
from tests.explore.mutations import MUTATIONS, Mutation
from tests.explore.snapshots import thaw
from tests.explore.world import World


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_seeded_bug_is_caught_in_a_schedule_that_shows_it_again(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = mutation.explore(monkeypatch)
    assert explorer.tally.found, f"{explorer.tally.num_schedules} schedules showed nothing"
    found = explorer.tally.found[0]
    print(found)
    assert re.search(mutation.caught_as, found.run.violation), found
    assert len(found.run.schedule) <= mutation.deviations
    again = replay(lambda: World(thaw(found.state.frozen), found.settings), found.run.schedule)
    of_what_follows = "goes on" in found.run.violation or "brought back" in found.run.violation
    assert again.violation == found.run.violation or of_what_follows
