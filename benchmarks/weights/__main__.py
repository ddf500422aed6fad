"""Weights: how fast they move and are kept, against memcpy in the same run.

``measure(num_bytes, repeats)`` of each family gives its rows; GiB/s are medians, and each comes
with the CPU seconds it costs per GiB.
"""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.report import machine, parse_arguments, publish
from benchmarks.weights.clock import memcpy

FAMILIES = ("push", "store", "beside")


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    num_bytes, repeats = (64 << 20, 2) if arguments.quick else (2 << 30, 5)
    result: dict[str, Any] = {"memcpy": memcpy(num_bytes, repeats)}
    for family in FAMILIES:
        measure = importlib.import_module(f"benchmarks.weights.{family}").measure
        result[family] = measure(num_bytes, repeats)
    result |= {"bytes": num_bytes, "repeats": repeats, "machine": machine("torch", "xxhash")}
    publish(result, as_json=arguments.json, title="weights")


if __name__ == "__main__":
    main()
