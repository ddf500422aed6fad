"""Requests per second, added latency, CPU and memory of routers, alternating, medians.

CPU is what the router's own processes used, user and system, per thousand requests: of all
figures it suffers least from whatever else the machine does.  Added latency is a percentile
through the router less the same percentile straight to the engines, at the same steady rate.
``cached_share`` is what prefix affinity is for: the share of prompt tokens that embedded engines
found in their caches, by policy.  ``choice_ns`` is CPU per request for choosing an engine, by
policy and number of engines.  ``ray_call`` is a call to the router's actor, idle and under load.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.report import machine, parse_arguments, publish
from benchmarks.router import load, peers
from benchmarks.router.affinity import measure_affinity
from benchmarks.router.calls import measure_calls
from benchmarks.router.choice import measure_choice

ROOT = Path(__file__).parents[2]
NUM_ENGINES = 4
TARGETS = ("ours", "ours_failover", "sglang_router", "smg", "fastapi_httpx", "direct")
PYTHON_ROUTERS = ("ours", "ours_failover", "fastapi_httpx")
_START_TIMEOUT_S = 60.0
_ONCE_OVER_S = 20.0
"""What takes a router longer than this is measured once."""


@dataclass(frozen=True)
class Scenario:
    """A kind of request, how many clients, and the steady rate at which latency is measured.

    Attributes:
        ramp_s: at that rate for so long before anything counts.
        times: how much longer a phase is than others.
    """

    num_clients: int
    per_s: float
    ramp_s: float = 0.0
    times: float = 1.0


SCENARIOS = {
    "small": Scenario(32, 300),
    "fresh": Scenario(32, 300),
    "medium": Scenario(16, 100),
    "large": Scenario(8, 20),
    "sse": Scenario(16, 20),
    "long": Scenario(0, 1000, ramp_s=1.0, times=4.0),
    "many": Scenario(4096, 0),
}


class Target:
    """A running router, or the engines themselves."""

    def __init__(self, ports: list[int], process: psutil.Process | None = None) -> None:
        self.ports = ports
        self._process = process

    def _all(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        return [self._process, *self._process.children(recursive=True)]

    def cpu_s(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self._all())

    def forget_peak(self) -> None:
        for one in self._all():
            Path(f"/proc/{one.pid}/clear_refs").write_text("5")

    def peak_rss_mib(self) -> float:
        total = 0
        for one in self._all():
            status = Path(f"/proc/{one.pid}/status").read_text()
            total += int(status.split("VmHWM:")[1].split()[0])
        return total / 1024


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, cwd=ROOT, text=True, **options)
    try:
        yield process
    finally:
        process.kill()  # the Rust routers take their time to end, and there is nothing to save
        process.wait()


@contextmanager
def stub_engines() -> Iterator[list[int]]:
    command = [sys.executable, "-m", "benchmarks.router.stub", str(NUM_ENGINES)]
    with started(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with process.stdout:
            yield json.loads(process.stdout.readline())


@contextmanager
def running(name: str, engines: list[int]) -> Iterator[Target]:
    if name == "direct":
        yield Target(engines)
    elif name in PYTHON_ROUTERS:
        command = [sys.executable, "-m", "benchmarks.router.serve", name, *map(str, engines)]
        with started(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            with process.stdout:
                port = json.loads(process.stdout.readline())
                yield Target([port], psutil.Process(process.pid))
    else:
        port, metrics_port = free_port(), free_port()
        command = peers.command(name, port, metrics_port, engines)
        with (
            tempfile.TemporaryFile() as log,
            started(command, stdout=log, stderr=log) as process,
        ):
            wait_until_serving(port, process)
            yield Target([port], psutil.Process(process.pid))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def wait_until_serving(port: int, process: subprocess.Popen[str]) -> None:
    """Until it answers a generation request."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    body = next(load.requests("small")).split(b"\r\n\r\n", 1)[1]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, {"content-type": "application/json"}
    )
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            answer.read()
            return
        time.sleep(0.1)
    raise RuntimeError(f"does not serve after {_START_TIMEOUT_S:.0f} s")


async def run(target: Target, kind: str, for_s: float, num_many: int) -> dict[str, float]:
    """One scenario once."""
    scenario = SCENARIOS[kind]
    target.forget_peak()
    ports, share = target.ports, len(target.ports)
    outcomes: list[load.Outcome] = []
    before = target.cpu_s()
    if kind == "many":
        parts = (load.burst(port, kind, num_many // share) for port in ports)
        counted = outcomes = list(await asyncio.gather(*parts))
        used_s = target.cpu_s() - before
        latencies = merged(outcomes)
    else:
        if scenario.num_clients:
            clients = max(1, scenario.num_clients // share)
            parts = (load.closed_loop(port, kind, clients, for_s) for port in ports)
            outcomes = list(await asyncio.gather(*parts))
            used_s = target.cpu_s() - before
        for_s *= scenario.times
        per_s, ramp_s, cpu_s = scenario.per_s / share, scenario.ramp_s, target.cpu_s
        parts = (load.paced(port, kind, per_s, for_s, ramp_s=ramp_s, cpu_s=cpu_s) for port in ports)
        at_rate = list(await asyncio.gather(*parts))
        latencies = merged(at_rate)
        counted = outcomes or at_rate
        if not outcomes:
            used_s = at_rate[0].cpu_s
        outcomes = [*outcomes, *at_rate]
    num = sum(len(outcome.latencies_s) for outcome in counted)
    elapsed_s = max(outcome.elapsed_s for outcome in counted)
    return {
        "requests_per_s": num / elapsed_s,
        "cpu_ms_per_1k": used_s * 1e6 / max(1, num),
        "p50_ms": percentile(latencies, 0.5) * 1e3,
        "p99_ms": percentile(latencies, 0.99) * 1e3,
        "peak_rss_mib": target.peak_rss_mib(),
        "errors": float(sum(outcome.num_errors for outcome in outcomes)),
    }


def merged(outcomes: list[load.Outcome]) -> list[float]:
    return sorted(value for outcome in outcomes for value in outcome.latencies_s)


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def measure(*, repeats: int, for_s: float, num_many: int) -> dict[str, Any]:
    """Every target and scenario ``repeats`` times, the targets taking turns."""
    result: dict[str, Any] = {}
    why = peers.install()
    raw: dict[str, dict[str, list[dict[str, float]]]] = {}
    too_slow: set[tuple[str, str]] = set()
    with stub_engines() as engines:
        for number in range(repeats):
            for kind in SCENARIOS:
                for name in TARGETS:
                    if why.get(name) or (name, kind) in too_slow:
                        continue
                    print(f"round {number + 1} of {repeats}: {kind}, {name}", file=sys.stderr)
                    began = time.monotonic()
                    try:
                        with running(name, engines) as target:
                            uvloop.run(run(target, "small", min(0.5, for_s), 0))  # warm up
                            figures = uvloop.run(run(target, kind, for_s, num_many))
                    except (RuntimeError, OSError) as error:
                        why[name] = str(error)
                        continue
                    if time.monotonic() - began > _ONCE_OVER_S:
                        too_slow.add((name, kind))
                    raw.setdefault(name, {}).setdefault(kind, []).append(figures)
    for name in TARGETS:
        if why.get(name):
            result[name] = None
            result.setdefault("why", {})[name] = why[name]
        else:
            result[name] = {kind: summary(raw, name, kind) for kind in SCENARIOS}
    result["peers"] = {name: peers.version(name) for name in peers.PACKAGES if not why.get(name)}
    return result


def summary(
    raw: dict[str, dict[str, list[dict[str, float]]]], name: str, kind: str
) -> dict[str, float]:
    """Medians; latency as what the router adds to the direct one of the same round."""
    runs, direct = raw[name][kind], raw["direct"][kind]
    shown = {
        key: statistics.median(run[key] for run in runs)
        for key in ("requests_per_s", "cpu_ms_per_1k", "peak_rss_mib")
    }
    for share in ("p50", "p99"):
        key = f"{share}_ms"
        pairs = zip(runs, direct, strict=False)
        shown[f"added_{key}"] = statistics.median(run[key] - base[key] for run, base in pairs)
    shown["errors"] = sum(run["errors"] for run in runs)
    return {key: round(value, 2) for key, value in shown.items()}


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 16384 if hard == resource.RLIM_INFINITY else min(16384, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    repeats, for_s, num_many = (1, 0.5, 512) if arguments.quick else (3, 2.0, 4096)
    result = measure(repeats=repeats, for_s=for_s, num_many=num_many)
    result["choice_ns"] = measure_choice(repeats)
    result["cached_share"] = asyncio.run(measure_affinity(40 if arguments.quick else 200))
    with stub_engines() as engines:
        result["ray_call"] = asyncio.run(measure_calls(engines, for_s))
    result["machine"] = machine("uvicorn", "uvloop", "httptools", "httpx", "fastapi")
    result["repeats"] = repeats
    publish(result, as_json=arguments.json, title="routers over four stub engines")


if __name__ == "__main__":
    main()
