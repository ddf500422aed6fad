"""How busy the driver keeps engines and what it costs: five ways to do the same training run.

Lengths are log-normal; time is accelerated, except for the CPU figures, which come from HTTP.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from benchmarks.report import machine, parse_arguments, publish
from benchmarks.rollout.cost import IN_FLIGHT, cpu_s_per_1k
from benchmarks.rollout.modes import Run, batch_s, in_virtual_time
from benchmarks.rollout.trace import Fleet

MODES = ("gather_all", "sync", "partial", "one_ahead", "async")
SEED = 1


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    fleet = Fleet(num_engines=2) if arguments.quick else Fleet()
    run = Run(num_steps=2, num_groups=64) if arguments.quick else Run(num_steps=6)
    repeats, num_batches = (1, 1) if arguments.quick else (3, 2)
    figures: dict[str, dict[str, Any]] = {
        mode: in_virtual_time(mode, run, fleet, SEED) for mode in MODES
    }
    costs: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode in MODES:
            costs[mode].append(asyncio.run(cpu_s_per_1k(mode, num_batches)))
    for mode, of_mode in costs.items():
        figures[mode]["driver_cpu_s_per_1k"] = statistics.median(of_mode)
    ideal = run.num_groups * run.group_size / batch_s(run, fleet, SEED)
    result = {
        **figures,
        "ideal_samples_per_s": ideal,
        "in_flight": IN_FLIGHT,
        "machine": machine("aiohttp", "uvloop"),
        "repeats": repeats,
    }
    publish(result, as_json=arguments.json, title="rollout driver, five ways")


if __name__ == "__main__":
    main()
