"""What every benchmark shares: its size, the machine's description, and how a result is printed.

The table or the JSON object goes to standard output at the end; a row of ``Rows`` goes to standard
error as a line of JSON when it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line of a benchmark.

    Attributes:
        size: ``smoke`` (seconds, only shows that it runs), ``quick`` or ``full``.
        families: those that are measured.
        seconds: that all of it may take; None where there is no limit.
    """

    size: str
    as_json: bool
    families: Sequence[str] = ()
    seconds: float | None = None

    def by_size(self, *, smoke: T, quick: T, full: T) -> T:
        return {"smoke": smoke, "quick": quick, "full": full}[self.size]


def parse_arguments(
    description: str, families: Sequence[str] = (), *, has_limit: bool = False
) -> Arguments:
    """Parse ``--quick``, ``--smoke``, ``--json``, and ``--families`` if there are any.

    Args:
        has_limit: take ``--seconds``, too.
    """
    parser = argparse.ArgumentParser(description=description)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick", action="store_const", dest="size", const="quick", help="fewer and smaller runs"
    )
    sizes.add_argument(
        "--smoke", action="store_const", dest="size", const="smoke", help="only show that it runs"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    if families:
        parser.add_argument(
            "--families", nargs="+", choices=families, help="only these; by default all"
        )
    if has_limit:
        parser.add_argument("--seconds", type=float, help="end in so many, with fewer repeats")
    parser.set_defaults(size="full", families=None, seconds=None)
    arguments = parser.parse_args()
    chosen = arguments.families or families
    return Arguments(arguments.size, arguments.json, chosen, arguments.seconds)


def machine(*packages: str) -> dict[str, Any]:
    """Describe the cores of this process, the memory, and the versions of Python and packages."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Rows(dict[str, Any]):
    """Rows by name; each is printed when it is set, so that a run that is ended loses none.

    Args:
        place: where they stand in the result, such as ``push.dense``.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place

    def __setitem__(self, name: str, row: Any) -> None:
        super().__setitem__(name, row)
        print(json.dumps({f"{self._place}.{name}": row}), file=sys.stderr, flush=True)


def publish(result: Mapping[str, Any], *, as_json: bool, title: str) -> None:
    """Print a result; nested mappings become rows with dotted names."""
    if as_json:
        print(json.dumps(result))
        return
    table = Table(title=title)
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in _rows(result, ""):
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def _rows(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _rows(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value))
    return rows
