"""Trackers and the progress bar."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.core.errors import ConfigError
from rollout.driver import trackers
from rollout.driver.progress_bar import ProgressBar
from rollout.driver.stream.step_metrics import Progress


class Writer:
    def __init__(self) -> None:
        self.written: list[object] = []

    def add_scalar(self, *figure: object) -> None:
        self.written.append(figure)

    def log(self, figures: object) -> None:
        self.written.append(figures)


def test_tensorboard_gets_a_scalar_for_each_figure() -> None:
    writer = Writer()
    trackers.tensorboard(writer)(3, {"a": 1.0, "b": 2.0})
    assert writer.written == [("a", 1.0, 3), ("b", 2.0, 3)]


def test_wandb_gets_all_figures_with_their_step(monkeypatch) -> None:
    writer = Writer()
    trackers.wandb(writer)(3, {"a": 1.0})
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=writer))
    trackers.wandb()(4, {"a": 2.0})
    assert writer.written == [{"a": 1.0, "rollout/step": 3}, {"a": 2.0, "rollout/step": 4}]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(ConfigError, match="wandb has no run"):
        trackers.wandb()


def test_a_missing_library_is_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        trackers.wandb()
    with pytest.raises(ConfigError, match="tensorboardX is not installed"):
        trackers.tensorboard(tmp_path)


def test_every_tracker_gets_the_figures(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    both = trackers.every(trackers.json_lines(first), trackers.json_lines(second))
    both(0, {"a": 1.0})
    both(1, {"a": 2.0})
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    assert lines == [{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0}]
    assert first.read_text() == second.read_text()


def test_the_bar_shows_what_is_ready_open_and_dropped(capsys) -> None:
    with ProgressBar("step 3") as bar:
        bar(Progress(num_ready=2, num_wanted=8, num_open=5, num_rejected=1))
    shown = capsys.readouterr().out
    assert "step 3" in shown
    assert "2/8" in shown
    assert "5 open, 1 dropped" in shown
