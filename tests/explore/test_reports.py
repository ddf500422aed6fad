"""What drivers report and groups record is taken and shown once, whichever side is lost."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.observability import step_reports
from rollout.observability.page import run_history
from rollout.observability.step_reports import Taken
from rollout.observability.timeline import recorder
from rollout.router.proxy import figures
from tests.explore import reports
from tests.explore.explorer import Search
from tests.explore.reports import Reports


def violations(folder: Path, num_lost: int) -> tuple[int, list[str]]:
    """How many runs there are, and what is wrong in them."""
    search = Search(lambda: Reports(folder / "run"))
    found = [str(done) for done in search.enumerate(num_lost) if done.violation]
    return search.num_runs, found


def test_one_side_is_lost_at_any_time(tmp_path: Path) -> None:
    num_runs, found = violations(tmp_path, 1)
    assert num_runs > 40
    assert not found, found[0]


@pytest.mark.slow
def test_two_sides_or_one_twice_are_lost_at_any_time(tmp_path: Path) -> None:
    num_runs, found = violations(tmp_path, 2)
    assert num_runs > 1000
    assert not found, found[0]


_UNNAMED: Any = SimpleNamespace(token_hex=lambda num_bytes: "the same")
MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a router counts from 1 again": (
        lambda patch: patch.setattr(figures, "secrets", _UNNAMED),
        "written are",
    ),
    "a timeline counts from 0 again": (
        lambda patch: patch.setattr(recorder, "secrets", _UNNAMED),
        "shown are the spans",
    ),
    "a server takes all that there is": (
        lambda patch: patch.setattr(run_history, "Taken", lambda reports: Taken()),
        "written are",
    ),
    "a line is written behind a part of one": (
        lambda patch: patch.setattr(step_reports, "_is_cut", lambda file: False),
        "written are",
    ),
    "a step counts as often as it is done": (
        lambda patch: patch.setattr(reports, "standing", list),
        "counted twice",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_explorer_finds_a_seeded_bug(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, caught_as = MUTATIONS[name]
    seed(monkeypatch)
    _, found = violations(tmp_path, 1)
    assert any(caught_as in one for one in found), found
