"""``.ci/durations.py``: what each test takes, from the reports of real runs of pytest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes import importing_us

pytestmark = pytest.mark.clock

ROOT = Path(__file__).parents[1]
TESTS = """
import time, subprocess, sys
BUSY = "import time\\nwhile time.process_time() < {}: pass"

def test_that_waits(): time.sleep(0.3)
def test_that_works(): subprocess.run([sys.executable, "-c", BUSY.format({own})], check=True)
def test_short(): ...
def test_short_too(): ...
"""


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    monkeypatch.delitem(sys.modules, "durations", raising=False)
    import durations

    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.json")
    return durations


def run_suite(folder: Path, own_s: float) -> Path:
    """The folder of its report."""
    (folder / "conftest.py").write_text(
        "from tests.support.cpu_property import pytest_runtest_logstart, pytest_runtest_makereport"
    )
    (folder / "test_one.py").write_text(TESTS.replace("{own}", str(own_s)))
    report = folder / "junit/test-small.xml"
    options = ("-o", "junit_family=xunit1", f"--junitxml={report}", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", *options, str(folder)]
    subprocess.run(command, cwd=folder, env=importing_us(), check=True, capture_output=True)
    return report.parent


def write(durations: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["durations.py", "write", str(folder)])
    durations.main()


def test_seconds_and_cpu_of_each_test_are_written_a_line_each(
    durations: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durations.FILE.write_text('{"other": {"test_two.py": {"test_it": [1.5, 0.25]}}}')
    write(durations, run_suite(tmp_path, 0.3), monkeypatch)
    found = json.loads(durations.FILE.read_text())
    assert found["other"] == {"test_two.py": {"test_it": [1.5, 0.25]}}, "of another suite"
    rows = found["test-small"]["test_one.py"]
    assert set(rows) == {"test_that_waits", "test_that_works", "short"}
    assert rows["test_that_waits"][0] >= 0.3
    assert rows["test_that_waits"][1] < 0.3 <= rows["test_that_works"][1], "CPU of a child counts"
    assert ": [1.5, 0.25]\n" in durations.FILE.read_text(), "a line for each"


def test_what_grew_is_named_and_what_is_as_before_is_not(
    durations: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(durations, run_suite(tmp_path, 0.1), monkeypatch)
    folder = run_suite(tmp_path, 1.5)
    monkeypatch.setattr(sys, "argv", ["durations.py", "compare", str(folder)])
    durations.main()
    told = capsys.readouterr().out
    assert "test-small: " in told
    (grown,) = [line for line in told.splitlines() if line.startswith("  +")]
    assert grown.endswith(": test_one.py::test_that_works")


def test_without_a_report_it_says_what_makes_one(
    durations: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="has no report: run `make test` first"):
        write(durations, tmp_path, monkeypatch)
