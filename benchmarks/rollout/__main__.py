"""How busy the driver keeps the engines, and its CPU: the same training run in five modes.

Lengths of samples are log-normal.  Time is virtual, except for the CPU figures: those come from
requests over HTTP in real time.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from benchmarks.report import machine, parse_arguments, publish
from benchmarks.rollout.cost import cpu_s_per_1k
from benchmarks.rollout.modes import Run, batch_s, in_virtual_time
from benchmarks.rollout.trace import Fleet

MODES = ("gather_all", "sync", "partial", "one_ahead", "async")
SEED = 1


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    fleet = arguments.by_size(
        smoke=Fleet(num_engines=1, num_slots=16), quick=Fleet(num_engines=2), full=Fleet()
    )
    run = arguments.by_size(
        smoke=Run(num_steps=1, num_warm_up=1, num_groups=8, group_size=4),
        quick=Run(num_steps=2, num_groups=64),
        full=Run(num_steps=6),
    )
    repeats, num_batches = arguments.by_size(smoke=(1, 3), quick=(1, 1), full=(3, 2))
    in_flight, delay_s = arguments.by_size(smoke=(64, 0.1), quick=(2048, 1.0), full=(2048, 1.0))
    figures: dict[str, dict[str, Any]] = {
        mode: in_virtual_time(mode, run, fleet, SEED) for mode in MODES
    }
    costs: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode in MODES:
            costs[mode].append(asyncio.run(cpu_s_per_1k(mode, num_batches, in_flight, delay_s)))
    for mode, cpu_s in costs.items():
        figures[mode]["driver_cpu_s_per_1k"] = statistics.median(cpu_s)
    ideal = run.num_groups * run.group_size / batch_s(run, fleet, SEED)
    result = {
        **figures,
        "ideal_samples_per_s": ideal,
        "in_flight": in_flight,
        "machine": machine("aiohttp", "uvloop"),
        "repeats": repeats,
    }
    publish(result, as_json=arguments.as_json, title="rollout driver, five modes")


if __name__ == "__main__":
    main()
