"""``tests/support/longest_first``: the order of the files of tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.longest_first import FILE, longest_first, read_durations


def sort(durations: Any, *names: str) -> list[str]:
    items: list[Any] = [
        SimpleNamespace(nodeid=name, name=name.rpartition("::")[2]) for name in names
    ]
    longest_first(items, durations)
    return [item.nodeid for item in items]


def test_files_are_sorted_by_the_tests_that_run_and_keep_their_order() -> None:
    names = "a.py::one", "a.py::two", "b.py::long[3]", "c.py::C::one", "c.py::C::two"
    assert sort({}, *names) == ["a.py::one", "a.py::two", "c.py::C::one", "c.py::C::two", names[2]]
    durations = {
        "test": {"a.py": {"one": [0.5, 0.1], "not chosen": [99.0, 99.0]}},
        "test-slow": {"b.py": {"long[3]": [2.0, 0.1]}, "c.py": {"one": [0.3, 0.1]}},
    }
    assert sort(durations, *names) == [names[2], *names[:2], *names[3:]]
    durations["test"]["c.py"] = {"two": [5.0, 0.1]}
    assert sort(durations, *names) == [*names[3:], names[2], *names[:2]]


def test_the_durations_of_the_repository_are_read() -> None:
    assert FILE.is_file()
    assert read_durations()["test"]["tests/engines/contract/test_contract.py"]
