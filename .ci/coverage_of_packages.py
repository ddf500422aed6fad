"""Prints how much of each package the tests run, of a report that `coverage json` wrote.

    python .ci/coverage_of_packages.py REPORT [REPORT_BEFORE]

Lines and branches count alike, as coverage counts them.  With a report of before, a package of
which less is run than then fails it; hosts and chance move a package by less than half a per cent.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

_LEAST_LOSS = 0.5


def coverage_of_packages(report: Path) -> dict[str, float]:
    """Per cent of the lines and branches that were run, by folder, and the whole as ``all``."""
    run: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for name, file in json.loads(report.read_text())["files"].items():
        found = file["summary"]
        for package in (str(PurePosixPath(name).parent), "all"):
            run[package] += found["covered_lines"] + found["covered_branches"]
            there[package] += found["num_statements"] + found["num_branches"]
    return {name: round(100 * run[name] / there[name], 1) for name in sorted(there) if there[name]}


def main() -> None:
    now = coverage_of_packages(Path(sys.argv[1]))
    before = coverage_of_packages(Path(sys.argv[2])) if len(sys.argv) > 2 else {}
    for name, per_cent in now.items():
        was = f" (before: {before[name]})" if name in before else ""
        print(f"{per_cent:5} % {name}{was}")
    lower = [name for name in now if now[name] < before.get(name, 0) - _LEAST_LOSS]
    if lower:
        sys.exit(f"less is run than before of: {', '.join(lower)}")


if __name__ == "__main__":
    main()
