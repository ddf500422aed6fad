"""Figures of a run on a GPU: printed, and added to the JSON file that ``GPU_JSON`` names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE_VARIABLE = "GPU_JSON"
GIB = 1 << 30


def record(test: str, **figures: Any) -> str:
    """Record one test's figures; returns the line that was printed.

    Args:
        test: its section and case, for example ``push cuda_ipc``.
        figures: ``seconds`` and ``num_bytes`` together give GiB/s.
    """
    if "seconds" in figures and "num_bytes" in figures:
        figures["gib_per_s"] = figures["num_bytes"] / GIB / max(figures["seconds"], 1e-9)
    line = f"{test}: " + ", ".join(f"{name} {_text(value)}" for name, value in figures.items())
    print(line)
    if path := os.environ.get(FILE_VARIABLE):
        _add(Path(path), test, figures)
    return line


def _add(path: Path, test: str, figures: dict[str, Any]) -> None:
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known[test] = figures
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(known, indent=1))
    partial.replace(path)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
