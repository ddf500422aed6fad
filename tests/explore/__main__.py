"""``python -m tests.explore``: all plans, with what they cost; ``--deep`` for the long ones."""

from __future__ import annotations

import argparse
import gc
import logging
import time

from tests.explore.plans import DEEP, DEFAULT
from tests.explore.search import Explorer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    parser.add_argument("--deep", action="store_true", help="the plans of make explore")
    parser.add_argument("--only", default="", help="plans whose name contains this")
    parser.add_argument("--max-found", type=int, default=1, help="violations to stop a plan at")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.set_threshold(5000, 20, 50)
    num_found = 0
    traces: set[int] = set()
    started = time.process_time()
    for plan in DEEP if options.deep else DEFAULT:
        if options.only not in plan.name:
            continue
        explorer = Explorer(max_found=options.max_found)
        before = time.process_time()
        plan.search(explorer)
        elapsed, tally = time.process_time() - before, explorer.tally
        num_found += len(tally.found)
        traces |= tally.traces
        print(
            f"{plan.name} ({plan.bound}): {tally.num_schedules} schedules, "
            f"{tally.num_distinct} distinct, {len(tally.states)} states, {elapsed:.1f} s of CPU, "
            f"{tally.num_schedules / elapsed:.0f} per second",
            flush=True,
        )
        for found in tally.found:
            print(found, flush=True)
    elapsed = time.process_time() - started
    print(f"{len(traces)} distinct schedules in {elapsed:.0f} s of CPU, {num_found} violations")
    return min(num_found, 1)


if __name__ == "__main__":
    raise SystemExit(main())
