"""Several launches of one run write to the same files; each is shown as a run of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout.cli.lib.launches import launches_of, spans_of_launch
from rollout.cli.main import app
from rollout.core.errors import ConfigError
from rollout.observability.timeline.span import Kind, Outcome, Span
from rollout.observability.timeline.span_file import create_timeline, read_spans


def span(launch: str, name: str, start_s: float, kind: Kind = Kind.PHASE) -> Span:
    return Span(kind, name, "policy", start_s, 1.0, Outcome.OK, launch=launch)


SPANS = [
    span("b", "pause_generation", 100.0),
    span("a", "pause_generation", 10.0),
    span("a", "stop", 12.0, Kind.GROUP),
    span("ba", "pause_generation", 200.0),
]


def test_launches_are_in_order_and_tell_which_were_stopped() -> None:
    found = launches_of(SPANS)
    assert [(one.launch, one.num_spans, one.is_stopped) for one in found] == [
        ("a", 2, True),
        ("b", 1, False),
        ("ba", 1, False),
    ]


def test_the_last_launch_is_chosen_or_the_named_one() -> None:
    assert spans_of_launch(SPANS, "")[0].launch == "ba"
    assert spans_of_launch(SPANS, "a")[0].launch == "a"
    assert spans_of_launch(SPANS, "b")[0].launch == "b"
    with pytest.raises(ConfigError, match="'zzz': no such launch; there are: a, b, ba"):
        spans_of_launch(SPANS, "zzz")


def record(run: Path, launch: str, step: int) -> None:
    """What one launch writes: a step, and its figures."""
    (run / "policy").mkdir(parents=True, exist_ok=True)
    (run / "launch.json").write_text(json.dumps({"launch": launch}))
    timeline = create_timeline(run / "policy", "policy")
    for command in (
        "pause_generation",
        "flush_cache",
        "release_memory_occupation",
        "onload_weights",
        "continue_generation",
    ):
        with timeline.span(Kind.PHASE, command):
            pass
    asyncio.run(timeline.aclose())
    figures = {
        "at_s": float(step),
        "step": step,
        "metrics": {"rollout/reward/mean": step},
        "launch": launch,
    }
    with (run / "policy" / "figures.jsonl").open("a") as lines:
        lines.write(json.dumps(figures) + "\n")


def told(*words: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_report_and_trace_show_one_launch_and_list_the_others(tmp_path: Path) -> None:
    run = tmp_path / "exp"
    for launch in ("one", "two", "three"):
        record(run, launch, 1)
    assert {found.launch for found in read_spans(run)} == {"one", "two", "three"}
    report = told("report", run)
    assert (report["launch"], report["num_steps"], report["is_stopped"]) == ("three", 1, False)
    page = (run / "report.html").read_text()
    assert "exp three" in page
    assert "not stopped: it was killed, or it runs" in page
    assert told("report", run, "--launch", "one")["launch"] == "one"
    assert len(told("trace", run)["steps"]) == 1
    assert told("trace", run, "--launch", "two")["launch"] == "two"
    for command in ("report", "trace"):
        assert [one["launch"] for one in told(command, run, "--launches")] == [
            "one",
            "two",
            "three",
        ]


def test_a_run_that_recorded_no_launch_is_one_launch(tmp_path: Path) -> None:
    run = tmp_path / "exp"
    record(run, "", 1)
    assert told("report", run)["launch"] == ""
