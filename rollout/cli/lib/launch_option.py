"""The launch of a run that a command shows, and the list of all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from rollout.cli.lib.output import console, print_json
from rollout.observability.timeline.launches import Launch, choose_launch, launches_of
from rollout.observability.timeline.span import Span

LaunchId = Annotated[
    str, typer.Option("--launch", help="Id of a launch of the run; default: the last one.")
]
ListLaunches = Annotated[bool, typer.Option("--launches", help="Only list the launches.")]

NOT_STOPPED = "not stopped: it was killed, or it runs"


def spans_of_launch(recorded: Sequence[Span], wanted: str) -> tuple[Launch, list[Span]]:
    """The launch with this id, or the last one, and its spans.

    Raises:
        ConfigError: there is no such launch.
    """
    chosen = choose_launch(recorded, wanted)
    return chosen, [span for span in recorded if span.launch == chosen.launch]


def show_launches(spans: Sequence[Span], *, as_json: bool) -> None:
    """Print the launches that recorded these spans."""
    found = launches_of(spans)
    if as_json:
        print_json([asdict(launch) for launch in found])
        return
    table = Table("launch", "began (UTC)", "seconds", "spans", "end")
    for launch in found:
        table.add_row(
            launch.launch or "(no id)",
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(launch.began_s)),
            f"{launch.ended_s - launch.began_s:.0f}",
            str(launch.num_spans),
            end_text(launch),
        )
    console().print(table)


def end_text(launch: Launch) -> str:
    """How it ended."""
    return "stopped" if launch.is_stopped else NOT_STOPPED
