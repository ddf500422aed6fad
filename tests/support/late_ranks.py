"""SGLang whose first rank is ahead of the others: they load files, and release memory, late."""

from __future__ import annotations

import os
from pathlib import Path

from tools.cpu_engines import install

# clock: how late a rank is.
_PLUGIN = """
import time

DELAY_S = {delay_s}


def late(function):
    def called(*args, **settings):
        from sglang.srt.runtime_context import get_parallel

        own = get_parallel()
        time.sleep(DELAY_S * (own.pp_rank * own.tp_size + own.tp_rank))
        return function(*args, **settings)

    return called


def delay():
    from sglang.srt.managers.scheduler_components import weight_updater

    manager = weight_updater.SchedulerWeightUpdaterManager
    for name in ("update_weights_from_disk", "release_memory_occupation"):
        setattr(manager, name, late(getattr(manager, name)))
"""


def late_ranks(folder: Path, delay_s: float) -> dict[str, str]:
    """Variables with which an engine loads a plugin that delays its other ranks.

    Args:
        folder: for the plugin.
        delay_s: how late each of them is, in each call, after the one before it.
    """
    metadata = folder / "late_ranks-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: late-ranks\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nlate = late_ranks:delay\n")
    (folder / "late_ranks.py").write_text(_PLUGIN.format(delay_s=delay_s))
    own = install.variables_of("sglang")["PYTHONPATH"]
    return {"PYTHONPATH": os.pathsep.join([str(folder), own])}
