"""The curves of a server, as far as its folder has them."""

import json
from pathlib import Path

from rollout.config.run_dir import FIGURES_FILE, SPANS_SUFFIX
from rollout.observability import recorded as module
from rollout.observability.recorded import last_lines, recorded_curves
from rollout.observability.timeline.span import Kind, Outcome, Span

REWARD = "rollout/reward/mean"


def figures(step: int, reward: float, launch: str = "") -> str:
    metrics = {REWARD: reward, "rollout/reward/max": 1.0}
    return json.dumps({"step": step, "metrics": metrics, "launch": launch, "at_s": step}) + "\n"


def test_a_curve_has_the_last_value_of_each_step_in_the_order_of_steps(tmp_path: Path) -> None:
    lines = figures(2, 0.2) + figures(1, 0.1) + figures(2, 0.3) + '{"step": 3, "met'
    (tmp_path / FIGURES_FILE).write_text(lines)
    assert recorded_curves(tmp_path, "") == {REWARD: [(1, 0.1), (2, 0.3)]}


def test_only_one_launch_of_a_run_is_read(tmp_path: Path) -> None:
    (tmp_path / FIGURES_FILE).write_text(figures(1, 0.1, "first") + figures(1, 0.9, "second"))
    assert recorded_curves(tmp_path, "second") == {REWARD: [(1, 0.9)]}


def test_the_time_lost_at_a_boundary_is_that_of_the_servers_phases(tmp_path: Path) -> None:
    server = tmp_path / "policy"
    server.mkdir()
    spans = [
        Span(Kind.PHASE, name, "policy", start_s, 1.0, Outcome.OK)
        for start_s, name in (
            (10.0, "pause_generation"),
            (11.0, "release_memory_occupation"),
            (20.0, "continue_generation"),
        )
    ]
    lines = "".join(json.dumps(span.to_dict()) + "\n" for span in spans)
    (server / f"policy{SPANS_SUFFIX}").write_text(lines)
    assert recorded_curves(server, "") == {"lost_s": [(1, 3.0)]}


def test_a_long_curve_keeps_its_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MAX_POINTS", 2)
    (tmp_path / FIGURES_FILE).write_text("".join(figures(step, step / 10) for step in range(5)))
    assert recorded_curves(tmp_path, "") == {REWARD: [(3, 0.3), (4, 0.4)]}


def test_the_end_of_a_long_file_has_whole_lines(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("first\nsecond\nthird\n")
    assert last_lines(tmp_path / "lines", 9) == ["third"]
    assert last_lines(tmp_path / "lines", 99) == ["first", "second", "third"]
    assert last_lines(tmp_path / "nothing", 9) == []
