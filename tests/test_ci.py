"""What CI runs besides the tests: the line that adds up the runs, and the audit of the pins."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def audited(folder: Path, answers: dict[str, Any], **more: str) -> tuple[int, str]:
    """Status and output of an audit whose pip-audit answers so, by service."""
    tool = folder / "pip-audit"
    tool.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"answer = {answers!r}.get(sys.argv[sys.argv.index('--vulnerability-service') + 1])\n"
        "sys.exit('no such host') if answer is None else print(json.dumps(answer))\n"
    )
    tool.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "GITHUB_ACTIONS"}
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci/audit.py"), str(tool), "constraints.txt"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, **more},
    )
    return done.returncode, done.stdout


WELL = {"name": "a", "version": "1", "vulns": []}
ILL = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


def test_an_audit_that_could_look_nothing_up_neither_fails_nor_passes_in_silence(
    tmp_path: Path,
) -> None:
    silent = {"pypi": {"dependencies": [UNKNOWN, UNKNOWN]}}
    status, told = audited(tmp_path, silent)
    assert (status, told.splitlines()[-1].startswith("audit: NOTHING WAS AUDITED")) == (0, True)
    assert audited(tmp_path, silent, GITHUB_ACTIONS="true")[1].startswith("::warning title=audit::")


def test_a_vulnerable_pin_fails_the_audit_with_what_mends_it(tmp_path: Path) -> None:
    status, told = audited(tmp_path, {"pypi": {"dependencies": [WELL, ILL]}})
    assert status == 1
    assert "b 2: CVE-1; mended in 3" in told
    assert "2 of 2 pins looked up in pypi: 1 vulnerable" in told


def test_pins_that_could_not_be_looked_up_are_named(tmp_path: Path) -> None:
    status, told = audited(tmp_path, {"pypi": {"dependencies": [WELL, UNKNOWN]}})
    assert status == 0
    assert "1 pins are not in pypi, and were not audited: c" in told
    assert "1 of 2 pins looked up" in told


def test_another_database_is_asked_where_the_first_knows_nothing(tmp_path: Path) -> None:
    answers = {"pypi": {"dependencies": [UNKNOWN]}, "osv": {"dependencies": [ILL]}}
    status, told = audited(tmp_path, answers)
    assert status == 1
    assert "looked up in osv" in told
