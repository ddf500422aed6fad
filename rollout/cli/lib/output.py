"""Output of commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rollout.core.errors import ConfigError

_PIPED = 1000

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def console() -> Console:
    """The console for tables: as wide as the terminal; wide enough not to wrap in a pipe."""
    is_piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPED if is_piped else None)


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
