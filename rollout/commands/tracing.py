"""``rollout trace``: what was recorded, as a trace and added up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rollout.commands.output import AsJson, console, print_json
from rollout.errors import ConfigError
from rollout.run_folder import RunFolder
from rollout.timeline.analysis import Step, slowest_engines, steps
from rollout.timeline.export import chrome_trace
from rollout.timeline.span import Span, read_lines

_NUM_SHOWN = 20


def trace(
    file: Annotated[Path, typer.Argument(help="A run folder, or one .spans.jsonl file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the trace goes; left out: trace.json.")
    ] = None,
    otel: Annotated[
        bool, typer.Option(help="Also send it to the OTLP endpoint of the OTEL_* variables.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a trace for chrome://tracing or ui.perfetto.dev, and say where the time went."""
    spans = read_spans(file)
    target = out or (file if file.is_dir() else file.parent) / "trace.json"
    target.write_text(json.dumps(chrome_trace(spans)))
    found = steps(spans)
    if otel:
        from rollout.timeline.otel import export

        console().print(f"sent {export(spans)} spans")
    if as_json:
        print_json({"trace": str(target), "num_spans": len(spans), "steps": _told(found)})
        return
    console().print(f"{target}: {len(spans)} spans; open it in ui.perfetto.dev or chrome://tracing")
    _show(found, spans)


def read_spans(path: Path) -> list[Span]:
    """What was recorded there.

    Raises:
        ConfigError: nothing was.
    """
    if path.is_file():
        files = [path]
    else:
        files = RunFolder(path, path.name).span_files() or sorted(path.glob("*.spans.jsonl*"))
    spans = []
    for file in files:
        with file.open() as lines:
            spans += read_lines(lines)
    if not spans:
        raise ConfigError(f"{path}: nothing was recorded there (no .spans.jsonl with spans in it)")
    return spans


def _told(found: list[Step]) -> list[dict[str, Any]]:
    return [
        {
            "server": one.server,
            "start_s": one.start_s,
            "lost_s": one.lost_s,
            "trainer_s": one.trainer_s,
            "weight_version": one.weight_version,
            "phase_s": dict(one.phase_s),
            "slowest": {name: who.engine_id for name, who in one.slowest.items()},
            "checking": None if one.checking is None else one.checking.to_dict(),
        }
        for one in found
    ]


def _show(found: list[Step], spans: list[Span]) -> None:
    table = Table("server", "version", "lost at the boundary", "trainer's", "most of it")
    for one in found[-_NUM_SHOWN:]:
        longest = sorted(one.phase_s.items(), key=lambda of: -of[1])[:3]
        table.add_row(
            one.server,
            str(one.weight_version),
            f"{one.lost_s:.2f} s",
            f"{one.trainer_s:.2f} s",
            ", ".join(f"{name} {took:.2f}" for name, took in longest),
        )
    if found:
        console().print(table)
    if found and found[-1].checking is not None:
        console().print(f"last step: {found[-1].checking}")
    slow = Table("phase", "slowest engine", "its seconds", "median", "others waited (engine-s)")
    for phase, who in slowest_engines(spans).items():
        slow.add_row(
            phase,
            who.engine_id,
            f"{who.elapsed_s:.2f}",
            f"{who.median_s:.2f}",
            f"{who.waited_s:.2f}",
        )
    console().print(slow)
