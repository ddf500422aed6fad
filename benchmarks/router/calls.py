"""How long a Ray call to the router's actor takes while the router is under full load.

The gate is shut and the membership pushed through such calls, so a router that is busy must not
be slow to hear them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time

import ray

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
        loading = asyncio.create_task(
            load.closed_loop(endpoint.port, "small", NUM_CLIENTS, for_s + 0.5)
        )
        await asyncio.sleep(0.25)
        loaded = await _round_trips(router, for_s)
        outcome = await loading
    finally:
        await router.stop(1.0)
    return {
        "idle_p50_ms": round(statistics.median(idle), 2),
        "idle_p99_ms": round(_p99(idle), 2),
        "loaded_p50_ms": round(statistics.median(loaded), 2),
        "loaded_p99_ms": round(_p99(loaded), 2),
        "requests_per_s_meanwhile": round(len(outcome.latencies_s) / outcome.elapsed_s, 1),
    }


async def _round_trips(router: RayRouter, for_s: float) -> list[float]:
    until, taken = time.perf_counter() + for_s, []
    while (began := time.perf_counter()) < until:
        await router.stats()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
