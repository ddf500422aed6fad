"""What ``rollout bench`` measured, for people."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from rollout.commands.output import console

_MAX_FAILURES = 5
# What the table has a row for: its name, the figure, decimals.
_ROWS = (
    ("seconds", "seconds", 1),
    ("requests/s", "requests_per_s", 1),
    ("tokens/s", "tokens_per_s", 0),
    ("latency p50 (s)", "latency_p50_s", 3),
    ("latency p99 (s)", "latency_p99_s", 3),
    ("requests answered", "num_done", 0),
    ("ended by a pause", "num_aborted", 0),
    ("failed", "num_failed", 0),
)


def show(told: dict[str, Any]) -> None:
    loads = {"steady": told["load"], "with offloads": told.get("load_in_cycles")}
    named = {name: one for name, one in loads.items() if one}
    table = Table("load", *named, title=f"{told['load']['num_clients']} clients")
    for row, key, digits in _ROWS:
        values = [_number(one[key], digits) for one in named.values()]
        table.add_row(row, *values)
    console().print(table)
    if "boundary" in told:
        _show_boundary(told["boundary"])
    for one in named.values():
        for error in one["errors"][:3]:
            console().print(f"[red]{escape(error)}[/red]")
    if "load_in_cycles" in told:
        console().print(f"more of it: rollout trace {told['run']}", soft_wrap=True)


def _show_boundary(told: dict[str, Any]) -> None:
    if not told["num_cycles"]:
        console().print("no step was recorded where it can be read from here")
        return
    table = Table("phase", "median", "longest", "slowest engine", "others waited")
    for phase, one in told["phases"].items():
        who = f"{one['slowest_engine']} in {one['slowest_in']} of {told['num_cycles']}"
        table.add_row(
            phase,
            f"{one['median_s']:.3f} s",
            f"{one['longest_s']:.3f} s",
            who if one["slowest_engine"] else "",
            f"{one['others_waited_s']:.3f} s",
        )
    table.add_section()
    lost = f"{told['lost_median_s']:.3f} s", f"{told['lost_longest_s']:.3f} s"
    table.add_row("lost per step", *lost, "", "", style="bold")
    console().print(table)
    for failure in told["failures"][:_MAX_FAILURES]:
        console().print(f"[red]{escape(failure.partition(chr(10))[0])}[/red]", soft_wrap=True)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
