"""CI closes with one line in pytest's form, which adds up the runs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def closing_line(output: str) -> str:
    command = [sys.executable, str(ROOT / ".ci/closing_line.py")]
    done = subprocess.run(command, input=output, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_counts_of_all_runs_are_added_up() -> None:
    output = """
........ [100%]
268 passed in 5.88s
== 2600 passed, 13 skipped, 1 warning in 280.10s (0:04:40) ==
the 3 engines started in 4s
= 2 passed, 1 skipped, 70 deselected, 2 warnings in 3.02s =
"""
    assert closing_line(output) == (
        "== 2870 passed, 14 skipped, 70 deselected, 3 warnings in 289.00s =="
    )


def test_a_failure_is_not_lost() -> None:
    assert closing_line("= 1 failed, 2 passed, 1 error in 3.00s =\n4 passed in 1.00s") == (
        "== 1 failed, 6 passed, 1 error in 4.00s =="
    )


def test_without_a_run_nothing_is_claimed() -> None:
    assert closing_line("make: *** [check] Error 1") == ""
