"""CPU of a cycle over fake engines in this process: no HTTP, no Ray, no sockets.

The CPU of the fakes is included.  It is the same for each engine, so a figure that grows with the
number of engines is growth in ``rollout``.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.control.server.server import RolloutServer
from rollout.runtime.worker_process import collect_rarely
from tests.support.builders import make_server, push


class Fleet:
    """A server over ``num_engines`` fakes, and the version that it was given last."""

    def __init__(self, server: RolloutServer, num_engines: int) -> None:
        self.num_engines = num_engines
        self._server = server
        self._version = 0

    async def cpu_s_per_engine(self, num_cycles: int) -> float:
        """CPU seconds of one offload and onload, per engine; the mean of ``num_cycles``."""
        used_s = 0.0
        for _ in range(num_cycles):
            self._version += 1
            weights = push(self._version)
            before_s = time.process_time()
            await self._server.offload()
            await self._server.push(weights)
            used_s += time.process_time() - before_s
        return used_s / num_cycles / self.num_engines


async def measure(nums: Sequence[int], num_rounds: int, folder: Path) -> dict[str, Any]:
    """CPU-ms per engine and cycle by number of engines, and how much more it is at the largest.

    All sizes take turns within a round, and each round has as many cycles times engines of each
    size, so that noise of the machine hits all sizes alike.

    Args:
        nums: numbers of engines, ascending; the growth compares the last with the one before it.
    """
    servers: list[RolloutServer] = []
    thresholds = gc.get_threshold()
    try:
        fleets = []
        for num in nums:
            (folder / str(num)).mkdir(parents=True)
            server = make_server(folder / str(num), {"main": {"num_engines": num}}).server
            await server.start()
            servers.append(server)
            fleets.append(Fleet(server, num))
        collect_rarely()  # as the actors do when they start
        rounds = [await _round(fleets) for _ in range(num_rounds + 1)][1:]
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        for server in servers:
            await server.stop()
    largest, smaller = str(nums[-1]), str(nums[-2])
    return {
        "in_memory_cpu_ms_per_engine": {
            name: 1e3 * statistics.median(figures[name] for figures in rounds) for name in rounds[0]
        },
        "in_memory_growth": statistics.median(
            figures[largest] / figures[smaller] for figures in rounds
        ),
    }


async def _round(fleets: Sequence[Fleet]) -> dict[str, float]:
    largest = fleets[-1].num_engines
    return {
        str(fleet.num_engines): await fleet.cpu_s_per_engine(largest // fleet.num_engines)
        for fleet in fleets
    }
