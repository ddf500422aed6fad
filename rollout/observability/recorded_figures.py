"""The figures of drivers' steps that a run has recorded, one line of JSON each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rollout.config.run_dir import FIGURES_FILE, RunFolder


def read_figures(run: Path) -> list[dict[str, Any]]:
    """The figures that drivers reported, by time; incomplete lines are skipped."""
    figures = []
    for file in RunFolder(run, run.name).figure_files():
        figures += _parsed(file.read_text().splitlines())
    return sorted(figures, key=lambda entry: entry["at_s"])


def last_figures(server: Path, max_bytes: int) -> list[dict[str, Any]]:
    """The last figures in the folder of one server."""
    return _parsed(last_lines(server / FIGURES_FILE, max_bytes))


def last_lines(file: Path, max_bytes: int) -> list[str]:
    """The whole lines in the last ``max_bytes`` of a file; none if it does not exist."""
    try:
        with file.open("rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - max_bytes))
            raw = lines.read(max_bytes)
    except FileNotFoundError:
        return []
    if size > max_bytes:
        raw = raw.partition(b"\n")[2]
    return raw.decode(errors="replace").splitlines()


def _parsed(lines: list[str]) -> list[dict[str, Any]]:
    figures = []
    for line in lines:
        try:
            figures.append(json.loads(line))
        except ValueError:
            continue
    return figures
