"""The output of the quickstart, also where matplotlib is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rollout.core.types import StepReport

from report import PHASES, Report


def reported(path: Path) -> Report:
    """A report of one step."""
    report = Report(path, 1)
    report.begin({"eval/addition": 0.25})
    seconds = dict.fromkeys(PHASES, 0.1)
    report.step(1, 0.5, {"eval/addition": 0.75}, StepReport(seconds))
    return report


def test_without_matplotlib_it_says_so_at_the_start_and_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "matplotlib" else find_spec(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    report = reported(tmp_path / "run")
    assert "pip install matplotlib" in capsys.readouterr().out
    report.finish()
    assert (tmp_path / "run.json").exists()
    assert not (tmp_path / "run.png").exists()
