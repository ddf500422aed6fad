"""Output of commands: lines and tables for people, JSON for programs.

Always true: no line ends with spaces, and a word, so an address or a path in a sentence, is never
broken.  A pipe gets plain text: each fact on one line, and no frames.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollout.core.errors import ConfigError

_PIPED = 100_000
_PADDING = re.compile(r"(?: |\x1b\[[\d;]*m)+$", re.MULTILINE)


def console() -> Console:
    """The console for text: as wide as the terminal; wide enough not to wrap in a pipe."""
    return Console(width=None if is_terminal() else _PIPED)


def is_terminal() -> bool:
    """Whether a person reads stdout as it is written."""
    return sys.stdout.isatty()


def show(*parts: RenderableType) -> None:
    """Print parts below each other; a ``str`` is text as it is, without markup."""
    target = console()
    with target.capture() as captured:
        for part in parts:
            shown = Text(part) if isinstance(part, str) else part
            target.print(shown, overflow="ignore", crop=False)
    lines = _PADDING.sub(lambda end: end[0].replace(" ", ""), captured.get())
    typer.echo(lines, nl=False)


def table(*heads: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """An empty table without lines.

    Args:
        right: the columns that are aligned to the right.
        whole: columns whose cells stay on one line.
    """
    empty = Table(box=None, padding=(0, 2, 0, 0))
    for head in heads:
        side: Literal["left", "right"] = "right" if head in right else "left"
        empty.add_column(head, justify=side, overflow="fold", no_wrap=head in whole)
    return empty


def framed(part: RenderableType, title: str, color: str) -> RenderableType:
    """Something in a frame; in a pipe below its title, if it has one."""
    if is_terminal():
        return Panel(
            part, title=title or None, title_align="left", border_style=color, expand=False
        )
    return Group(*filter(None, [title]), part)


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
