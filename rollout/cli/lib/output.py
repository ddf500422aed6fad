"""Output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rollout.core.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def console() -> Console:
    """The console for tables, with the current width of the terminal."""
    return Console()


def print_json(values: Any) -> None:
    """Print to stdout, neither wrapped nor coloured."""
    typer.echo(json.dumps(values, indent=1, default=str))


def write_text(path: Path, text: str) -> None:
    """Write a file that the user asked for.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; choose another file with --out"
        ) from None
