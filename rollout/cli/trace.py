"""``rollout trace``: the spans of a run as a trace file and as a summary."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from engines.protocol.plain_text import size_text
from rollout.cli.lib.launches import spans_of_launch
from rollout.cli.lib.output import print_json, show, table, write_text
from rollout.cli.lib.push_rows import HEADS, push_rows
from rollout.control.server.runs import recorded_run
from rollout.core.types import PushStage
from rollout.observability.timeline.analysis import (
    Step,
    push_stages,
    pushes,
    slowest_engines,
    steps,
)
from rollout.observability.timeline.export import chrome_trace
from rollout.observability.timeline.span import Span
from rollout.observability.timeline.span_file import read_spans

_NUM_SHOWN = 20
_REPORTED = ("server", "start_s", "lost_s", "paused_s", "trainer_s", "weight_version", "phase_s")


def write_trace(run: Path, out: Path | None, launch: str, *, has_otel: bool, as_json: bool) -> None:
    """Write the trace of one launch of a run, and print the time of each phase."""
    file = recorded_run(run)
    chosen, spans = spans_of_launch(read_spans(file), launch)
    target = out or (file if file.is_dir() else file.parent) / "trace.json"
    write_text(target, json.dumps(chrome_trace(spans)))
    found = steps(spans)
    if has_otel:
        from rollout.observability.timeline.otel import export

        show(f"sent {export(spans)} spans")
    if as_json:
        reported = [_as_dict(step) for step in found]
        values = {"trace": str(target), "launch": chosen.launch, "num_spans": len(spans)}
        ranks = [asdict(stage) for stage in push_stages(spans)]
        pushed = [asdict(push) for push in pushes(spans, found)]
        print_json(values | {"steps": reported, "pushes": pushed, "push_stages": ranks})
        return
    show(f"{target}: {len(spans)} spans; open it in ui.perfetto.dev or chrome://tracing")
    _show(found, spans)


def _as_dict(step: Step) -> dict[str, Any]:
    values = {name: getattr(step, name) for name in _REPORTED}
    return values | {"slowest": {name: slowest.engine_id for name, slowest in step.slowest.items()}}


def _show(all_steps: list[Step], spans: list[Span]) -> None:
    steps_shown = table(
        *("server", "version", "lost at the boundary", "paused for the push", "trainer time"),
        "longest phases",
    )
    for step in all_steps[-_NUM_SHOWN:]:
        longest = sorted(step.phase_s.items(), key=lambda item: -item[1])[:3]
        steps_shown.add_row(
            step.server,
            str(step.weight_version),
            f"{step.lost_s:.2f} s",
            f"{step.paused_s:.2f} s",
            f"{step.trainer_s:.2f} s",
            ", ".join(f"{name} {took:.2f}" for name, took in longest),
        )
    if all_steps:
        show(steps_shown, "")
    engines = table("phase", "slowest engine", "its seconds", "median", "others waited (engine-s)")
    for phase, slowest in slowest_engines(spans).items():
        engines.add_row(
            phase,
            slowest.engine_id,
            f"{slowest.elapsed_s:.2f}",
            f"{slowest.median_s:.2f}",
            f"{slowest.waited_s:.2f}",
        )
    show(engines)
    if rows := push_rows(pushes(spans, all_steps)):
        pushed = table(*HEADS)
        for row in rows[-_NUM_SHOWN:]:
            pushed.add_row(*row)
        show("", pushed)
    if stages := push_stages(spans):
        show("", _ranks(stages))


def _ranks(stages: list[PushStage]) -> Table:
    ranks = table("rank", "stage of pushes", "route", "seconds", "bytes", "GiB/s")
    for stage in stages[:_NUM_SHOWN]:
        ranks.add_row(
            str(stage.rank),
            stage.stage,
            stage.route,
            f"{stage.elapsed_s:.2f}",
            size_text(stage.num_bytes),
            f"{stage.gib_per_s:.2f}",
        )
    return ranks
