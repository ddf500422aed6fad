"""How commands speak: tables for people, JSON for programs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def console() -> Console:
    """Where tables go; as wide as the terminal is now."""
    return Console()


def print_json(told: Any) -> None:
    """As it is, on stdout: nothing is wrapped or coloured."""
    typer.echo(json.dumps(told, indent=1, default=str))


def gib(num_bytes: float | None) -> str:
    """Bytes in a unit that reads well."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def seconds(value: float) -> str:
    """Seconds as people say them."""
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
