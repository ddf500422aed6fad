"""``python -m benchmarks.lifecycle``: one full offload and onload, by number of engines.

Fake engines on real HTTP in a process of their own, which reply at once; server, group and router
are Ray actors.  Medians by number of engines:

- ``overhead_s``: seconds of a cycle beyond the time that the slowest engine took to reply;
- ``cycle_s``: seconds of a cycle;
- ``unverified_s``: ``overhead_s`` with ``verify.by: version`` instead of fingerprints;
- ``sequential_s``: a plain client that makes the same calls, one engine after the other;
- ``rpcs``: HTTP calls to the engines per cycle;
- ``coordinator_cpu_ms_per_engine``: CPU of the actors per engine and cycle.

Fake engines in the memory of this process, without HTTP and Ray, up to 512:

- ``in_memory_cpu_ms_per_engine``: CPU of server, group and fakes per engine and cycle;
- ``in_memory_growth``: that figure at the largest number over that at the next smaller one.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lifecycle import in_memory, over_http
from benchmarks.report import machine, parse_arguments, publish


def measure_over_http(nums: Sequence[int], repeats: int, folder: Path) -> dict[str, Any]:
    """Each figure by number of engines, from a local Ray cluster."""
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(
        "local", num_cpus=4, include_dashboard=False, logging_level="warning", log_to_driver=False
    )
    try:
        by_num = {str(num): over_http.measure(num, repeats, folder) for num in nums}
    finally:
        ray.shutdown()
    verify_s = [figures.pop("verify_unchanged_s_per_engine") for figures in by_num.values()]
    names = by_num[str(nums[0])]
    result: dict[str, Any] = {
        name: {num: figures[name] for num, figures in by_num.items()} for name in names
    }
    return result | {"verify_unchanged_s_per_engine": verify_s[-1]}


def main() -> None:
    arguments = parse_arguments("Cost of one offload and onload beyond the engines' own time.")
    nums = arguments.by_size(smoke=(2,), quick=(8,), full=(8, 32, 64))
    repeats = arguments.by_size(smoke=1, quick=3, full=9)
    nums_in_memory = arguments.by_size(smoke=(2, 16), quick=(8, 64, 512), full=(8, 64, 512))
    num_rounds = arguments.by_size(smoke=1, quick=5, full=15)
    with tempfile.TemporaryDirectory() as folder:
        # First, while this process is small: Ray's imports make its garbage collections slower.
        measured = asyncio.run(
            in_memory.measure(nums_in_memory, num_rounds, Path(folder) / "in_memory")
        )
        result = measure_over_http(nums, repeats, Path(folder)) | measured
    publish(
        {"machine": machine("ray", "aiohttp"), "repeats": repeats, **result},
        as_json=arguments.as_json,
        title="one offload and onload",
    )


if __name__ == "__main__":
    main()
