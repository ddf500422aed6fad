"""Add up the suites of a CI run: the tests that failed once, and one line in pytest's form.

Reads the JUnit XML in a folder for each suite, which has `first` and, where that failed, `again`:
what failed first is then counted as it ended there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

_OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
_ORDER = ("failed", "passed", "skipped", "xfailed", "error")
_BAD = ("failed", "error")


def outcomes(run: Path) -> Iterator[tuple[str, str]]:
    """The tests of a run with their outcomes, after the folder of their report."""
    for report in sorted(run.rglob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            place = case.get("file") or case.get("classname")
            name = f"{report.parent.relative_to(run)}/{place}::{case.get('name')}"
            found = [one for one in case if one.tag in _OUTCOMES]
            if not found:
                yield name, "passed"
            for one in found:
                is_expected = one.get("type") == "pytest.xfail"
                yield name, "xfailed" if is_expected else _OUTCOMES[one.tag]


def took_s(folder: Path) -> float:
    """The seconds of all runs."""
    suites = (ElementTree.parse(report).iter("testsuite") for report in folder.rglob("*.xml"))
    return sum(float(one.get("time", 0)) for found in suites for one in found)


def unstable(suite: Path) -> list[str]:
    """The tests that failed, and passed when run again."""
    passed = {name for name, outcome in outcomes(suite / "again") if outcome == "passed"}
    failed = {name for name, outcome in outcomes(suite / "first") if outcome in _BAD}
    return sorted(name.removeprefix("./") for name in failed & passed)


def closing_line(folder: Path) -> str:
    """The sum of the runs; empty if there is none."""
    counts: Counter[str] = Counter()
    for suite in folder.iterdir() if folder.exists() else ():
        again = [outcome for _, outcome in outcomes(suite / "again")]
        first = (outcome for _, outcome in outcomes(suite / "first"))
        counts.update([*again, *(one for one in first if not again or one not in _BAD)])
    totals = ", ".join(_words(counts[what], what) for what in _ORDER if counts[what])
    return f"== {totals} in {took_s(folder):.2f}s ==" if totals else ""


def _words(number: int, what: str) -> str:
    return f"{number} {what}s" if what == "error" and number > 1 else f"{number} {what}"


if __name__ == "__main__":
    suites = Path(sys.argv[1])
    if again := [name for suite in sorted(suites.glob("*")) for name in unstable(suite)]:
        print("== failed once, and passed when run again:", *again, sep="\n")
    print(closing_line(suites) or sys.exit("no suite of tests has run"))
