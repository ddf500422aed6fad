"""The order of the files of tests: the longest first, by ``tests/durations.json``.

So the run does not end with one process at work and the others without.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "durations.json"
# Of a test that the file has no row of.  Most of a suite that was never measured are short, too.
_UNKNOWN_S = 0.05

# Suite -> file of tests -> test -> seconds and CPU-seconds.
Durations = Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]


def read_durations() -> Durations:
    return json.loads(FILE.read_text()) if FILE.is_file() else {}  # type: ignore[no-any-return]


def longest_first(items: list[pytest.Item], durations: Durations) -> None:
    """Sorts the tests by what those of their file take together; a file keeps its order."""
    took = {
        (file, test): row[0]
        for suite in durations.values()
        for file, tests in suite.items()
        for test, row in tests.items()
    }
    files: defaultdict[str, float] = defaultdict(float)
    for item in items:
        files[_file_of(item)] += took.get((_file_of(item), item.name), _UNKNOWN_S)
    items.sort(key=lambda item: -files[_file_of(item)])


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
