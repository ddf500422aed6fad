"""The memory saver: GiB/s of the release and of the resume of weights, each by itself.

``none``: the contents are dropped.  ``backup``: they are copied to pinned host memory, which the
first release allocates; later ones reuse it, as in the engines that this library starts.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.repeats import rates
from benchmarks.report import Rows
from tests.support.gpu.machine import Gpu, report_of


def measure(gpu: Gpu, repeats: int, sizes_gib: tuple[int, ...]) -> dict[str, Any]:
    rows = Rows("gpu.saver")
    for size in sizes_gib:
        # Weights and a KV cache of as many bytes.
        num_bytes = gpu.need_free(2 * size + 2) * size // (2 * size + 2)
        for backup in ("none", "backup"):
            rows[f"{backup}_{size}_gib"] = _row(gpu, backup, num_bytes, repeats)
    return rows


def _row(gpu: Gpu, backup: str, num_bytes: int, repeats: int) -> dict[str, float]:
    arguments = gpu.device, str(gpu.gpu_id), str(num_bytes), backup, str(repeats + 1)
    rounds = report_of("saver", *arguments, TMS_RETAIN_CPU_BACKUP="1")["rounds"]
    row: dict[str, float] = {}
    for name in ("release", "resume"):
        first, *later = (one[f"{name}_s"] for one in rounds)
        row[f"{name}_first_gib_per_s"] = rates([first], num_bytes)[0]
        row[f"{name}_gib_per_s"], row[f"{name}_worst_gib_per_s"] = rates(later, num_bytes)
    return row
