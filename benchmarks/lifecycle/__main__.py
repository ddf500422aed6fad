"""``python -m benchmarks.lifecycle``: one full offload and onload over 8, 32 and 64 fake engines.

The engines listen on real HTTP in a process of their own and answer at once; server, group and
router are Ray actors.  Taken in turns, medians:

- ``overhead_s``: seconds of a cycle beyond what the slowest engine itself was busy answering;
- ``unverified_s``: the same, with ``verify_by: version`` in the place of fingerprints;
- ``sequential_s``: a plain client that asks one engine after the other, the same calls;
- ``rpcs``: HTTP calls to the engines per cycle;
- ``coordinator_cpu_ms_per_engine``: CPU of all our processes per engine and cycle.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import machine, parse_arguments, publish
from engines.client import EngineClient
from engines.fake import FakeTensor, pack_tensors, write_checkpoint
from engines.fake.weights import DEFAULT_TENSORS
from engines.protocol import Endpoint, MemoryTag
from rollout.config import RolloutConfig
from rollout.handle import ServerHandle
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.push import WeightPush

_PROBES = frozenset({"/ready", "/health"})


def push(version: int) -> WeightPush:
    """New weights for all tensors of a fake."""
    manifest = Manifest.of(TensorSpec(one.name, one.dtype, one.shape) for one in DEFAULT_TENSORS)
    tensors = {one.name: FakeTensor(one.shape, version) for one in DEFAULT_TENSORS}
    return WeightPush(version, manifest, [pack_tensors(tensors)])


@contextmanager
def fake_engines(num: int) -> Iterator[list[str]]:
    """URLs of so many engines in another process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.lifecycle.engines", str(num)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)


@contextmanager
def deployed(urls: list[str], folder: Path, verify_by: str) -> Iterator[ServerHandle]:
    """A server over these engines, as Ray actors."""
    from rollout.actors.launch import launch_ray

    folder.mkdir()
    config = RolloutConfig.from_dict(
        {
            "log_dir": str(folder),
            "servers": {
                "policy": {
                    "model_path": str(write_checkpoint(folder)),
                    "groups": {"main": {"engine": {"kind": "attached", "urls": urls}}},
                    "lifecycle": {"verify_by": verify_by},
                    "health": {"recover": False},
                }
            },
        }
    )
    with launch_ray(config) as handle:
        yield handle["policy"]


class Watched:
    """What engines were busy with, and what our processes have used, since the last look."""

    def __init__(self, urls: list[str]) -> None:
        self._clients = [httpx.Client(base_url=url, trust_env=False) for url in urls]
        self._seen = [len(one.get("/fake/requests").json()) for one in self._clients]
        self._cpu_s = _cpu_s()

    def look(self) -> tuple[float, int, float]:
        """Seconds the busiest engine was answering, calls to all, CPU seconds of ours."""
        cpu_s = _cpu_s()
        used_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        busiest_s, num_calls = 0.0, 0
        for index, client in enumerate(self._clients):
            calls = client.get("/fake/requests").json()
            new = [one for one in calls[self._seen[index] :] if one[0] not in _PROBES]
            self._seen[index] = len(calls)
            busiest_s = max(busiest_s, sum(answered - came for _, came, answered in new))
            num_calls += len(new)
        self._cpu_s = _cpu_s()
        return busiest_s, num_calls, used_s

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _cpu_s() -> float:
    """CPU seconds of the actors that coordinate; this process only waits for them."""
    total = 0.0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            name = " ".join(process.cmdline())
            if "ServerGroupActor" in name or "RolloutServerActor" in name or "RouterActor" in name:
                used = process.cpu_times()
                total += used.user + used.system
        except psutil.Error:
            continue
    return total


def measure_ours(server: ServerHandle, urls: list[str], repeats: int) -> list[dict[str, float]]:
    """Figures of each cycle, after one to warm up."""
    watched, figures = Watched(urls), []
    try:
        for _ in range(repeats + 1):
            version = server.status().result().weight_version + 1
            watched.look()
            started = time.perf_counter()
            report = server.offload().result()
            report = report.merged(server.onload_push(push(version)).result())
            elapsed_s = time.perf_counter() - started
            busiest_s, num_calls, cpu_s = watched.look()
            figures.append(
                {
                    "overhead_s": elapsed_s - busiest_s,
                    "cycle_s": elapsed_s,
                    "verify_s": report.phase_s["verify"],
                    "rpcs": num_calls,
                    "cpu_s": cpu_s,
                }
            )
    finally:
        watched.close()
    return figures[1:]


async def sequential(urls: list[str], version: int) -> float:
    """Seconds of the same calls, one engine after the other, one phase after the other."""
    clients = [EngineClient(Endpoint.of_url(url), engine_id=url) for url in urls]
    one_push = push(version)
    payload = [base64.b64encode(one_push.buckets[0]).decode()]
    try:
        started = time.perf_counter()
        for one in clients:
            await one.pause_generation()
        for one in clients:
            await one.flush_cache(timeout_s=28.0)
        for one in clients:
            await one.release_memory_occupation(tuple(MemoryTag))
        for one in clients:
            await one.resume_memory_occupation([MemoryTag.WEIGHTS])
        for one in clients:
            await one.begin_weight_update()
            await one.update_weights_from_tensor(payload, weight_version=str(version))
            await one.end_weight_update()
        for one in clients:
            await one.weight_version()
            await one.weights_checker()
        for one in clients:
            await one.resume_memory_occupation([MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH])
        for one in clients:
            await one.continue_generation()
        return time.perf_counter() - started
    finally:
        for one in clients:
            await one.aclose()


def measure(num: int, repeats: int, folder: Path) -> dict[str, float]:
    """All figures for so many engines."""
    by_way: dict[str, list[dict[str, float]]] = {}
    for verify_by in ("fingerprint", "version"):
        with (
            fake_engines(num) as urls,
            deployed(urls, folder / f"{num}-{verify_by}", verify_by) as server,
        ):
            by_way[verify_by] = measure_ours(server, urls, repeats)
    ours, unverified = by_way["fingerprint"], by_way["version"]
    with fake_engines(num) as urls:
        one_by_one = [asyncio.run(sequential(urls, 1000 + at)) for at in range(repeats)]
    middle = {name: statistics.median(one[name] for one in ours) for name in ours[0]}
    return {
        "overhead_s": middle["overhead_s"],
        "cycle_s": middle["cycle_s"],
        "unverified_s": statistics.median(one["overhead_s"] for one in unverified),
        "sequential_s": statistics.median(one_by_one),
        "verify_unchanged_s_per_engine": middle["verify_s"] / num,
        "rpcs": middle["rpcs"],
        "coordinator_cpu_ms_per_engine": 1000 * middle["cpu_s"] / num,
    }


def main() -> None:
    arguments = parse_arguments("Seconds and calls of one offload and onload beyond the engines'.")
    import ray

    nums = (8,) if arguments.quick else (8, 32, 64)
    repeats = 3 if arguments.quick else 9
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=4, include_dashboard=False, logging_level="warning", log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            by_num = {str(num): measure(num, repeats, Path(folder)) for num in nums}
    finally:
        ray.shutdown()
    keys = list(next(iter(by_num.values())))
    result: dict[str, Any] = {
        key: {num: figures[key] for num, figures in by_num.items()}
        for key in keys
        if key != "verify_unchanged_s_per_engine"
    }
    largest = by_num[str(nums[-1])]
    result["verify_unchanged_s_per_engine"] = largest["verify_unchanged_s_per_engine"]
    publish(
        {"machine": machine("ray", "aiohttp"), "repeats": repeats, **result},
        as_json=arguments.json,
        title="Lifecycle",
    )


if __name__ == "__main__":
    main()
