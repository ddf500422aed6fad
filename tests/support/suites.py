"""Finds the make targets that run the tests of a file."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SUITES = ("test", "test-slow", "test-sglang", "test-vllm", "test-chaos")


def expressions() -> dict[str, str]:
    """Suite -> the ``-m`` of its target in the Makefile; for ``test`` pytest's default."""
    default = re.search(r"^addopts = .*-m '([^']+)'", (ROOT / "pyproject.toml").read_text(), re.M)
    makefile = (ROOT / "Makefile").read_text()
    targets = {
        suite: re.search(rf'^{suite}:.*\n(?:\t.*\n)*?.* -m "?([^"$]+?)"? \$', makefile, re.M)
        for suite in SUITES[1:]
    }
    return {suite: match[1] for suite, match in {"test": default, **targets}.items() if match}


def suites_of(files: Collection[str]) -> Mapping[str, list[str]]:
    """Test file, relative to the repository -> the suites that run any of its tests."""
    program = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", __name__, "-m", ""]
    done = subprocess.run(
        [*program, *sorted(files)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    wanted = {suite: compile(text, suite, "eval") for suite, text in expressions().items()}
    runs: dict[str, set[str]] = {}
    for line in re.findall(r"^MARKS (.+)$", done.stdout, re.M):
        file, *marks = line.split()
        marked = _Marks.fromkeys(marks, True)
        runs.setdefault(file, set()).update(
            suite for suite, expression in wanted.items() if eval(expression, {}, marked)
        )
    if missing := set(files) - runs.keys():
        raise AssertionError(f"no tests collected in {sorted(missing)}:\n{done.stdout[-2000:]}")
    return {file: [suite for suite in SUITES if suite in found] for file, found in runs.items()}


class _Marks(dict[str, Any]):
    def __missing__(self, name: str) -> bool:
        return False


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print each test's file and marks, in the process that collects them."""
    for item in session.items:
        marks = sorted({marker.name for marker in item.iter_markers()})
        print("MARKS", item.path.relative_to(ROOT), *marks)
