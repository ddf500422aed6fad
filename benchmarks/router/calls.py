"""How long a Ray call to the router's actor takes while the router is under full load.

The gate is shut and the membership pushed through such calls, so a router that is busy must not
be slow to hear them.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import ray
import uvloop

from benchmarks.router import load
from engines.protocol import Endpoint
from rollout.actors.handles import RayRouter
from rollout.actors.shells import RouterActor
from rollout.config import RouterConfig
from rollout.routing import Member

NUM_CLIENTS = 32


async def measure_calls(engines: list[int], for_s: float) -> dict[str, float]:
    """Median and p99 in ms of one call, idle and with ``NUM_CLIENTS`` clients in a closed loop."""
    with tempfile.TemporaryDirectory(prefix="rr-") as folder:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(address="local", include_dashboard=False, _temp_dir=folder, num_cpus=2)
        try:
            return await _measure(engines, for_s)
        finally:
            ray.shutdown()


async def _measure(engines: list[int], for_s: float) -> dict[str, float]:
    actor = ray.remote(num_cpus=0)(RouterActor).remote(RouterConfig())
    router = RayRouter(actor, "router")
    endpoint = await router.start()
    members = [Member(f"e-{n}", Endpoint("127.0.0.1", port)) for n, port in enumerate(engines)]
    await router.set_members(1, members)
    await router.set_gate("open", weight_version=1)
    try:
        idle = await _round_trips(router, for_s)
        # In a process of its own: here the calls would wait for the clients, not for the router.
        loading = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.router.calls", str(endpoint.port), str(for_s + 1)),
            stdout=subprocess.PIPE,
        )
        await asyncio.sleep(0.75)
        loaded = await _round_trips(router, for_s)
        told, _ = await loading.communicate()
    finally:
        await router.stop(1.0)
    return {
        "idle_p50_ms": round(statistics.median(idle), 2),
        "idle_p99_ms": round(_p99(idle), 2),
        "loaded_p50_ms": round(statistics.median(loaded), 2),
        "loaded_p99_ms": round(_p99(loaded), 2),
        "requests_per_s_meanwhile": json.loads(told),
    }


async def _round_trips(router: RayRouter, for_s: float) -> list[float]:
    until, taken = time.perf_counter() + for_s, []
    while (began := time.perf_counter()) < until:
        await router.stats()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def main() -> None:
    """The clients: ``PORT SECONDS``, prints requests per second."""
    port, for_s = int(sys.argv[1]), float(sys.argv[2])
    outcome = uvloop.run(load.closed_loop(port, "small", NUM_CLIENTS, for_s))
    print(round(len(outcome.latencies_s) / outcome.elapsed_s, 1))


if __name__ == "__main__":
    main()
