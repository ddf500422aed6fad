"""What each test takes: ``tests/durations.json``, made of the JUnit reports of the suites.

    python .ci/durations.py write [FOLDER]
    python .ci/durations.py compare [FOLDER]

``write`` replaces the suites that the folder (build/junit) has reports of; ``compare`` prints
beside the file what each suite took, and the tests whose CPU grew most.  Seconds depend on the host
and its load, CPU on the host alone.  Tests below a tenth of a second are one row of their file.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests/durations.json"
SHORT_S = 0.1
SHORT = "short"
_MOST_ROWS = 10
# Less is what runs on one host differ by.
_LEAST_GROWTH_S = 0.5

# File of tests -> test -> seconds and CPU-seconds.
Suite = dict[str, dict[str, list[float]]]


def read_reports(folder: Path) -> dict[str, Suite]:
    """The suites by the names of their reports; what ran again counts as well."""
    suites: dict[str, Suite] = {}
    for report in sorted(folder.rglob("*.xml")):
        suite = suites.setdefault(report.stem, defaultdict(dict))
        for case in ElementTree.parse(report).iter("testcase"):
            seconds = float(case.get("time", 0))
            properties = {one.get("name"): one.get("value", "0") for one in case.iter("property")}
            cpu = float(properties.get("cpu_s", 0))
            file = case.get("file") or str(case.get("classname"))
            is_short = max(seconds, cpu) < SHORT_S
            row = suite[file].setdefault(SHORT if is_short else str(case.get("name")), [0.0, 0.0])
            row[0], row[1] = round(row[0] + seconds, 2), round(row[1] + cpu, 2)
    return suites


def total(suite: Mapping[str, Mapping[str, list[float]]]) -> tuple[float, float]:
    """Seconds and CPU-seconds of all tests of a suite."""
    rows = [row for tests in suite.values() for row in tests.values()]
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def comparison(before: Mapping[str, Suite], now: Mapping[str, Suite]) -> list[str]:
    """Lines that say what grew.  A suite without a row in the file is only counted."""
    lines = []
    for name, suite in now.items():
        (old_s, old_cpu), (new_s, new_cpu) = total(before.get(name, {})), total(suite)
        taken = f"{new_s:.0f} s of tests, {new_cpu:.0f} of CPU"
        lines.append(f"{name}: {taken} (before: {old_s:.0f}, {old_cpu:.0f})")
        grown = sorted(
            (
                (row[1] - old[1], f"{file}::{test}", old[1], row[1])
                for file, tests in suite.items()
                for test, row in tests.items()
                if (old := before.get(name, {}).get(file, {}).get(test))
            ),
            reverse=True,
        )
        lines += [
            f"  +{more:.1f} s of CPU ({old:.1f} to {new:.1f}): {test}"
            for more, test, old, new in grown[:_MOST_ROWS]
            if more >= _LEAST_GROWTH_S
        ]
    return lines


def main() -> None:
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "build/junit"
    now = read_reports(folder)
    before = json.loads(FILE.read_text()) if FILE.is_file() else {}
    if sys.argv[1] == "compare":
        print(
            "== what the tests took, beside tests/durations.json:",
            *comparison(before, now),
            sep="\n",
        )
        return
    if not now:
        sys.exit(f"{folder} has no report: run `make test` first")
    text = json.dumps(before | now, indent=1, sort_keys=True)
    # Both figures in one line: a changed test is a changed line.
    FILE.write_text(re.sub(r"\[\s+([\d.]+),\s+([\d.]+)\s+\]", r"[\1, \2]", text) + "\n")


if __name__ == "__main__":
    main()
