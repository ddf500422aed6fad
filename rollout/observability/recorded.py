"""What a run has recorded of its steps: drivers' figures, and the curves of one server.

Always true: of curves, a bounded part of each file is read, its end; of several launches of a run,
the last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.config.run_dir import FIGURES_FILE, SPANS_SUFFIX, RunFolder
from rollout.observability.step_reports import last_lines, parsed, standing
from rollout.observability.timeline.analysis import steps
from rollout.observability.timeline.span import Kind
from rollout.observability.timeline.span_file import read_lines

# Of a driver's reports; the page names the same in its ``curves.js``.
COMPARED = (
    "rollout/reward/mean",
    "rollout/tokens_per_s",
    "rollout/response_len/mean",
    "rollout/engine_busy_share",
    "logprob_gap/mean",
)
LOST = "lost_s"
_MAX_BYTES = 16 << 20
_MAX_POINTS = 2_000

Points = list[tuple[int, float]]


def read_figures(run: Path) -> list[dict[str, Any]]:
    """The figures that drivers reported, by time; lines that are no report are skipped, and
    reports in whose place there are those of a driver that was started again."""
    figures = []
    for file in RunFolder(run, run.name).figure_files():
        by_launch = defaultdict(list)
        for report in parsed(file.read_text(errors="replace").splitlines()):
            by_launch[report.get("launch", "")].append(report)
        for reports in by_launch.values():
            figures += [dict(report) for report in standing(reports)]
    return sorted(figures, key=lambda entry: entry["at_s"])


def recorded_curves(server: Path, launch: str) -> dict[str, Points]:
    """The points (step, value) of each curve that has any, in the order of their steps.

    Args:
        server: the folder of a server.
        launch: the launch of the run, or empty for one without an id.
    """
    found: dict[str, dict[int, float]] = {}
    for report in parsed(last_lines(server / FIGURES_FILE, _MAX_BYTES)):
        if report.get("launch", "") != launch:
            continue
        for name in COMPARED:
            if name in report["metrics"]:
                found.setdefault(name, {})[report["step"]] = report["metrics"][name]
    # The file of the server itself has its phases; those of engines are in its groups' files.
    lines = last_lines(server / f"{server.name}{SPANS_SUFFIX}", _MAX_BYTES)
    phases = [
        span for span in read_lines(lines) if span.kind is Kind.PHASE and span.launch == launch
    ]
    lost = {number: step.lost_s for number, step in enumerate(steps(phases), 1)}
    return {name: _points(values) for name, values in (found | {LOST: lost}).items() if values}


def _points(values: Mapping[int, Any]) -> Points:
    return sorted(values.items())[-_MAX_POINTS:]
