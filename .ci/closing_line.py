"""Add up the closing lines of several pytest runs, and print one line in pytest's form."""

from __future__ import annotations

import re
import sys
from collections import Counter

_CLOSING = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in ([\d.]+)s\b[^=]*=*$")
_ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error")
_COUNTED = ("warning", "error")


def closing_line(lines: list[str]) -> str:
    """The sum of the runs in this output; empty if there is no run."""
    counts: Counter[str] = Counter()
    took_s = 0.0
    for line in lines:
        if found := _CLOSING.match(line.strip()):
            took_s += float(found[2])
            for number, what in re.findall(r"(\d+) ([a-z]+)", found[1]):
                counts[what.removesuffix("s") if what[:-1] in _COUNTED else what] += int(number)
    totals = ", ".join(_words(counts[what], what) for what in _ORDER if counts[what])
    return f"== {totals} in {took_s:.2f}s ==" if totals else ""


def _words(number: int, what: str) -> str:
    return f"{number} {what}s" if what in _COUNTED and number > 1 else f"{number} {what}"


if __name__ == "__main__":
    print(closing_line(sys.stdin.read().splitlines()) or sys.exit("no suite of tests has run"))
