"""``.ci/coverage_of_packages.py``: how much of each package a real run of coverage saw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / ".ci/coverage_of_packages.py")
PROGRAM = """
import subprocess, sys
if len(sys.argv) < 2:
    subprocess.run([sys.executable, __file__, "again"], check=True)
elif sys.argv[1] == "never":
    print("no")
else:
    from package import one
"""
CONFIG = "[run]\nbranch = true\nparallel = true\npatch = subprocess\nsource = .\n"


def coverage(folder: Path, *command: str) -> None:
    command = (sys.executable, "-m", "coverage", *command)
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)


def shown(*reports: Path) -> tuple[str, list[str]]:
    """Its error and its lines about the reports."""
    command = [sys.executable, SCRIPT, *map(str, reports)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert bool(done.stderr) == bool(done.returncode)
    return done.stderr, done.stdout.splitlines()


def report(folder: Path, package: str) -> Path:
    """Of a program whose child imports this package."""
    (folder / "package").mkdir(parents=True)
    (folder / "package/one.py").write_text(package)
    (folder / "program.py").write_text(PROGRAM)
    (folder / ".coveragerc").write_text(CONFIG)
    coverage(folder, "run", "program.py")
    coverage(folder, "combine")
    coverage(folder, "json", "-o", "report.json")
    return folder / "report.json"


def test_lines_and_branches_of_child_processes_count_by_package(tmp_path: Path) -> None:
    more = report(tmp_path / "more", "a = 1\nb = 2\n")
    # 2 of 3 lines, and 1 of 2 branches.
    less = report(tmp_path / "less", "a = 1\nif not a:\n    b = 2\n")
    assert shown(more) == ("", [" 80.0 % .", " 83.3 % all", "100.0 % package"])
    error, lines = shown(less, more)
    assert lines[-1] == " 60.0 % package (before: 100.0)"
    assert error == "less is run than before of: all, package\n"
    assert not shown(more, less)[0]
