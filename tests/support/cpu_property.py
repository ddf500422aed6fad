"""The CPU of each test, as a property of its JUnit report: ``.ci/durations.py`` reads it.

It is that of the test process and of the children it has waited for, set-up and tear-down
included.  Engines are under a guard, which is no child: theirs is not in it.
"""

from __future__ import annotations

import resource
from collections.abc import Generator

import pytest

NAME = "cpu_s"
_began = 0.0


def cpu_s() -> float:
    """Seconds so far."""
    parts = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def pytest_runtest_logstart() -> None:
    global _began
    _began = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    # The plugin that writes the report takes the properties of the last phase.
    if call.when == "teardown":
        item.user_properties.append((NAME, round(cpu_s() - _began, 3)))
    return (yield)
