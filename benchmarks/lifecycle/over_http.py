"""Cycles over fake engines on real HTTP, by Ray actors and by a client that calls in sequence."""

from __future__ import annotations

import asyncio
import base64
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.lifecycle.engines import fake_engines
from engines.fake import write_checkpoint
from engines.http.client import EngineClient
from engines.protocol import Endpoint, MemoryTag
from rollout.config import RolloutConfig
from rollout.runtime.handle import ServerHandle
from tests.support.builders import push

_NOT_COUNTED = frozenset({"/ready", "/health", "/fake/requests"})
_ACTORS = ("ServerGroupActor", "RolloutServerActor", "RouterActor")


@contextmanager
def deployed(urls: list[str], folder: Path, verify_by: str) -> Iterator[ServerHandle]:
    """A server over these engines, as Ray actors."""
    from rollout.runtime.ray.launch import launch_ray

    folder.mkdir()
    config = RolloutConfig.from_dict(
        {
            "log_dir": str(folder),
            "servers": {
                "policy": {
                    "model_path": str(write_checkpoint(folder)),
                    "groups": {"main": {"engine": {"kind": "attached", "urls": urls}}},
                    "verify": {"by": verify_by},
                    "health": {"recover": False},
                }
            },
        }
    )
    with launch_ray(config) as deployment:
        yield deployment["policy"]


class Meter:
    """What the engines and the actors have done since the last reading."""

    def __init__(self, urls: list[str]) -> None:
        self._clients = [httpx.Client(base_url=url, trust_env=False) for url in urls]
        self._num_seen = [0] * len(urls)
        self._cpu_s = 0.0
        self.read()

    def read(self) -> tuple[float, int, float]:
        """Seconds that the busiest engine took to reply, calls to all, CPU seconds of actors."""
        used_s = _cpu_s() - self._cpu_s
        busiest_s, num_calls = 0.0, 0
        for index, client in enumerate(self._clients):
            requests = client.get("/fake/requests").json()
            since = requests[self._num_seen[index] :]
            new = [call for call in since if call[0] not in _NOT_COUNTED]
            self._num_seen[index] = len(requests)
            busiest_s = max(busiest_s, sum(replied_s - came_s for _, came_s, replied_s in new))
            num_calls += len(new)
        self._cpu_s = _cpu_s()
        return busiest_s, num_calls, used_s

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _cpu_s() -> float:
    """CPU seconds of the actors that coordinate; this process only waits for them."""
    total_s = 0.0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if any(actor in command for actor in _ACTORS):
                times = process.cpu_times()
                total_s += times.user + times.system
        except psutil.Error:
            continue
    return total_s


def measure_actors(server: ServerHandle, urls: list[str], repeats: int) -> list[dict[str, float]]:
    """Figures of each cycle, after one to warm up."""
    meter, cycles = Meter(urls), []
    try:
        for _ in range(repeats + 1):
            version = server.status().result().weight_version + 1
            meter.read()
            began_s = time.perf_counter()
            report = server.offload().result()
            report = report.merged(server.push(push(version)).result())
            elapsed_s = time.perf_counter() - began_s
            busiest_s, num_calls, cpu_s = meter.read()
            cycles.append(
                {
                    "overhead_s": elapsed_s - busiest_s,
                    "cycle_s": elapsed_s,
                    "verify_s": report.phase_s["verify"],
                    "rpcs": num_calls,
                    "cpu_s": cpu_s,
                }
            )
    finally:
        meter.close()
    return cycles[1:]


async def sequential(urls: list[str], version: int) -> float:
    """Seconds of the same calls, engine by engine and phase by phase."""
    engines = [EngineClient(Endpoint.of_url(url), engine_id=url) for url in urls]
    payload = [base64.b64encode(push(version).buckets[0]).decode()]
    try:
        began_s = time.perf_counter()
        for engine in engines:
            await engine.pause_generation()
        for engine in engines:
            await engine.flush_cache(timeout_s=28.0)
        for engine in engines:
            await engine.release_memory_occupation(tuple(MemoryTag))
        for engine in engines:
            await engine.resume_memory_occupation([MemoryTag.WEIGHTS])
        for engine in engines:
            await engine.begin_weight_update()
            await engine.update_weights_from_tensor(payload, weight_version=str(version))
            await engine.end_weight_update()
        for engine in engines:
            await engine.weight_version()
            await engine.weights_checker()
        for engine in engines:
            await engine.resume_memory_occupation([MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH])
        for engine in engines:
            await engine.continue_generation()
        return time.perf_counter() - began_s
    finally:
        for engine in engines:
            await engine.aclose()


def measure(num: int, repeats: int, folder: Path) -> dict[str, float]:
    """All figures for ``num`` engines; needs a Ray that is initialized."""
    cycles: dict[str, list[dict[str, float]]] = {}
    for verify_by in ("fingerprint", "version"):
        with (
            fake_engines(num) as urls,
            deployed(urls, folder / f"{num}-{verify_by}", verify_by) as server,
        ):
            cycles[verify_by] = measure_actors(server, urls, repeats)
    with fake_engines(num) as urls:
        sequential_s = [asyncio.run(sequential(urls, 1000 + turn)) for turn in range(repeats)]
    verified = {
        name: statistics.median(cycle[name] for cycle in cycles["fingerprint"])
        for name in cycles["fingerprint"][0]
    }
    return {
        "overhead_s": verified["overhead_s"],
        "cycle_s": verified["cycle_s"],
        "unverified_s": statistics.median(cycle["overhead_s"] for cycle in cycles["version"]),
        "sequential_s": statistics.median(sequential_s),
        "verify_unchanged_s_per_engine": verified["verify_s"] / num,
        "rpcs": verified["rpcs"],
        "coordinator_cpu_ms_per_engine": 1000 * verified["cpu_s"] / num,
    }
