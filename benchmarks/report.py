"""What every benchmark shares: its arguments, what machine it ran on, and how it prints.

The table or the one JSON object goes to standard output; everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


def parse_arguments(description: str) -> argparse.Namespace:
    """``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="check that it works, in short")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser.parse_args()


def machine(*packages: str) -> dict[str, Any]:
    """Cores this process may use, memory, and the versions of Python and of these packages."""
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


def publish(result: Mapping[str, Any], *, as_json: bool, title: str) -> None:
    """Print a result; nested mappings become dotted rows of the table."""
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
