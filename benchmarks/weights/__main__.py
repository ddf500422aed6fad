"""Weights: speed and CPU of pushes and of the store, against memcpy in the same run.

``measure(num_bytes, repeats)`` of each family returns its rows; GiB/s are medians, and each row
has the CPU seconds per GiB.
"""

from __future__ import annotations

import importlib

from benchmarks.report import Rows, machine, parse_arguments, publish
from benchmarks.weights.clock import memcpy

FAMILIES = ("push", "delta", "gate", "store", "beside", "ranks", "link")


def main() -> None:
    arguments = parse_arguments(__doc__ or "", FAMILIES)
    num_bytes, repeats = arguments.by_size(
        smoke=(4 << 20, 1), quick=(64 << 20, 2), full=(2 << 30, 5)
    )
    result = Rows("weights")
    result["memcpy"] = memcpy(num_bytes, repeats)
    for family in arguments.families:
        measure = importlib.import_module(f"benchmarks.weights.{family}").measure
        result[family] = measure(num_bytes, repeats)
    result |= {"bytes": num_bytes, "repeats": repeats, "machine": machine("torch", "xxhash")}
    publish(result, as_json=arguments.as_json, title="weights")


if __name__ == "__main__":
    main()
