"""Figures of a run on a GPU: printed, and added to the file that ``GPU_JSON`` names.

Each is a line of JSON, on disk before the next test begins: a run that is ended loses none.
"""

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
    print(line, flush=True)
    if path := os.environ.get(FILE_VARIABLE):
        with Path(path).open("a") as file:
            print(json.dumps({"test": test, **figures}), file=file)
            file.flush()
            os.fsync(file.fileno())
    return line


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
