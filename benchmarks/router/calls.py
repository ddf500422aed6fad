"""Time of a Ray call to the router's actor while the router is under full load.

The gate is closed and the members are set through such calls, so a busy router must serve them
without delay.
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
from rollout.config import RouterConfig
from rollout.router.host import RouterHost
from rollout.rules.routing import Backend
from rollout.runtime.ray.handles import remote_router
from rollout.runtime.ray.router_actor import RouterActor

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
    alone = ray.remote(num_cpus=0)(RouterActor)
    actor = alone.remote(RouterConfig(), run="run", server=("", ""))
    router = remote_router(actor, "router")
    endpoint = await router.start()
    members = [Backend(f"e-{n}", Endpoint("127.0.0.1", port)) for n, port in enumerate(engines)]
    await router.set_members(1, members)
    await router.set_gate("open", weight_version=1)
    try:
        idle = await _round_trips(router, for_s)
        # In another process: in this one the calls would wait for the clients, not for the router.
        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.router.calls", str(endpoint.port), str(for_s + 1)),
            stdout=subprocess.PIPE,
        )
        await asyncio.sleep(0.75)
        loaded = await _round_trips(router, for_s)
        output, _ = await clients.communicate()
    finally:
        await router.stop(1.0)
    return {
        "idle_p50_ms": round(statistics.median(idle), 2),
        "idle_p99_ms": round(_p99(idle), 2),
        "loaded_p50_ms": round(statistics.median(loaded), 2),
        "loaded_p99_ms": round(_p99(loaded), 2),
        "requests_per_s_meanwhile": json.loads(output),
    }


async def _round_trips(router: RouterHost, for_s: float) -> list[float]:
    """Milliseconds of each call."""
    until_s, calls_ms = time.perf_counter() + for_s, []
    while (began_s := time.perf_counter()) < until_s:
        await router.stats()
        calls_ms.append((time.perf_counter() - began_s) * 1e3)
    return calls_ms


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def main() -> None:
    """The clients: arguments ``PORT SECONDS``; prints requests per second."""
    port, for_s = int(sys.argv[1]), float(sys.argv[2])
    outcome = uvloop.run(load.closed_loop(port, "small", NUM_CLIENTS, for_s))
    print(round(len(outcome.latencies_s) / outcome.elapsed_s, 1))


if __name__ == "__main__":
    main()
