"""Requests per second, added latency, CPU and memory of routers, alternating, medians.

CPU is user and system time of the router's own processes per thousand requests; of all figures it
depends least on other work on the machine.  Added latency is a percentile through the router less
the same percentile straight to the engines, at the same steady rate.  ``cached_share`` is the share
of prompt tokens that embedded engines found in their prefix caches, by policy.  ``choice_ns`` is
CPU per request for choosing an engine, by policy and number of engines.  ``ray_call`` is a call to
the router's actor, idle and under load.  ``turns`` are turns of agents, one after the other, with
2 KB of new text.  ``agents`` are turns of one agent by the length of its history, beside a peer.
``affinity`` is a simulation: sessions of recorded agents over engines with a KV budget, by policy.

``--smoke`` leaves out the peers and most kinds of requests, and installs nothing.  ``--families``
measures some parts alone.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.report import machine, parse_arguments, publish
from benchmarks.router import agents, load, peers
from benchmarks.router.affinity import measure_affinity
from benchmarks.router.calls import measure_calls
from benchmarks.router.choice import measure_choice
from benchmarks.router.simulation.measure import SCENARIOS as AGENT_SCENARIOS
from benchmarks.router.simulation.measure import SMALL, measure_agents_cache
from tests.support.chat_models import write_chat_model

Runs = dict[str, dict[str, list[dict[str, float]]]]
"""Figures of each round, by target and kind of request."""

ROOT = Path(__file__).parents[2]
NUM_ENGINES = 4
TARGETS = (
    "ours",
    "ours_failover",
    "sglang_router",
    "smg",
    "vllm_router",
    "fastapi_httpx",
    "direct",
)
FAMILIES = ("routers", "choice_ns", "turns", "agents", "cached_share", "affinity", "ray_call")
PYTHON_ROUTERS = ("ours", "ours_failover", "ours_vllm", "fastapi_httpx")
_START_TIMEOUT_S = 60.0
_ONCE_OVER_S = 20.0
"""A scenario that takes a router longer than this is measured once."""


@dataclass(frozen=True)
class Scenario:
    """A kind of request, the number of clients, and the rate at which latency is measured.

    Attributes:
        per_s: requests per second of that rate.
        ramp_s: seconds at that rate before the measurement begins.
        times: length of the phase at that rate, as a multiple of the usual one.
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

    def __init__(self, ports: list[int], *owned: psutil.Process) -> None:
        self.ports = ports
        self.owned = owned

    def _processes(self) -> list[psutil.Process]:
        return [process for one in self.owned for process in (one, *one.children(recursive=True))]

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes())

    def reset_peak(self) -> None:
        for process in self._processes():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_rss_mib(self) -> float:
        total = 0
        for process in self._processes():
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += int(status.split("VmHWM:")[1].split()[0])
        return total / 1024


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, cwd=ROOT, text=True, **options)
    try:
        yield process
    finally:
        process.kill()  # the Rust routers stop slowly, and have no state to save
        process.wait()


@contextmanager
def stub_engines(*folder: str) -> Iterator[list[int]]:
    command = [sys.executable, "-m", "benchmarks.router.stub", str(NUM_ENGINES), *folder]
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


@contextmanager
def in_front(name: str, folder: str, engines: list[int]) -> Iterator[Target]:
    """A worker of agents, or its peer, in front of our router; or the router alone."""
    with running("ours_vllm" if name == "renderers" else "ours", engines) as router:
        if name == "spliced":
            yield router
            return
        command = [sys.executable, "-m", "benchmarks.router.serve", name, str(router.ports[0])]
        with started([*command, folder], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            with process.stdout:
                port = json.loads(process.stdout.readline())
                yield Target([port], *router.owned, psutil.Process(process.pid))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def wait_until_serving(port: int, process: subprocess.Popen[str]) -> None:
    """Wait until it replies to a generation request."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    body = next(load.requests("small")).split(b"\r\n\r\n", 1)[1]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, {"content-type": "application/json"}
    )
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(request, timeout=5) as reply:
            reply.read()
            return
        time.sleep(0.1)
    raise RuntimeError(f"the router does not serve after {_START_TIMEOUT_S:.0f} s")


async def run(target: Target, kind: str, for_s: float, num_many: int) -> dict[str, float]:
    """Figures of one run of a scenario."""
    scenario = SCENARIOS[kind]
    target.reset_peak()
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


@dataclass(frozen=True)
class Plan:
    """Which routers get which kinds of requests, how often and for how long.

    Attributes:
        repeats: rounds; the targets take turns within each.
        for_s: seconds of a phase.
        num_many: requests in flight in the scenario ``many``.
    """

    targets: Sequence[str]
    kinds: Sequence[str]
    repeats: int
    for_s: float
    num_many: int

    @property
    def peers(self) -> list[str]:
        return [name for name in self.targets if name in peers.PACKAGES]


def measure(plan: Plan) -> dict[str, Any]:
    """Figures by target and kind of request."""
    missing = peers.install() if plan.peers else {}
    runs: Runs = {}
    too_slow: set[tuple[str, str]] = set()
    with stub_engines() as engines:
        for number, kind, name in product(range(plan.repeats), plan.kinds, plan.targets):
            if missing.get(name) or (name, kind) in too_slow:
                continue
            print(f"round {number + 1} of {plan.repeats}: {kind}, {name}", file=sys.stderr)
            began_s = time.monotonic()
            try:
                with running(name, engines) as target:
                    uvloop.run(run(target, "small", min(0.5, plan.for_s), 0))  # warm up
                    figures = uvloop.run(run(target, kind, plan.for_s, plan.num_many))
            except (RuntimeError, OSError) as error:
                missing[name] = str(error)
                continue
            if time.monotonic() - began_s > _ONCE_OVER_S:
                too_slow.add((name, kind))
            runs.setdefault(name, {}).setdefault(kind, []).append(figures)
    result: dict[str, Any] = {}
    for name in plan.targets:
        if missing.get(name):
            result[name] = None
            result.setdefault("why", {})[name] = missing[name]
        else:
            result[name] = {kind: summary(runs, name, kind) for kind in plan.kinds}
    result["peers"] = {name: peers.version(name) for name in plan.peers if not missing.get(name)}
    return result


def measure_turns(repeats: int, for_s: float) -> dict[str, dict[str, float]]:
    """Turns of agents, one after the other: time and CPU of worker and router; medians."""
    runs: dict[str, list[dict[str, float]]] = {"turn": [], "turn_sse": []}
    with tempfile.TemporaryDirectory() as folder, stub_engines() as engines:
        write_chat_model(Path(folder))
        for _, kind in product(range(repeats), runs):
            with in_front("agents", folder, engines) as target:
                runs[kind].append(_turns_of(target, kind, for_s))
    return {kind: _medians(of_kind) for kind, of_kind in runs.items()}


def _turns_of(target: Target, kind: str, for_s: float) -> dict[str, float]:
    (port,) = target.ports
    uvloop.run(load.closed_loop(port, kind, 1, min(0.5, for_s)))  # warm up
    used_s = target.cpu_s()
    outcome = uvloop.run(load.closed_loop(port, kind, 1, for_s))
    used_s = target.cpu_s() - used_s
    return {
        "p50_ms": percentile(sorted(outcome.latencies_s), 0.5) * 1e3,
        "cpu_ms_per_1k": used_s * 1e6 / max(1, len(outcome.latencies_s)),
        "errors": float(outcome.num_errors),
    }


def measure_agents(num_turns: int, sizes: Sequence[str], repeats: int) -> dict[str, Any]:
    """Turns per second and CPU per turn by length of history, for each target; medians."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, stub_engines() as engines:
        folder = agents.write_model(Path(name))
        for size in sizes:
            messages = agents.history(folder, agents.NUMS_OF_TOKENS[size])
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in agents.KINDS}
            for number, of in product(range(repeats), runs):
                with in_front(of, name, engines) as target:
                    (port,) = target.ports
                    uvloop.run(agents.converse(port, of, "warm", [], 2, target.cpu_s))
                    place = port, of, f"s-{number}"
                    figures = agents.converse(*place, messages, num_turns, target.cpu_s)
                    runs[of].append(uvloop.run(figures))
            result[size] = {name: _medians(of_target) for name, of_target in runs.items()}
    return result


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in runs), 2) for name in runs[0]}


def summary(runs: Runs, name: str, kind: str) -> dict[str, float]:
    """Medians; latency is the difference to the direct latency of the same round."""
    through, direct = runs[name][kind], runs["direct"][kind]
    shown = {
        key: statistics.median(figures[key] for figures in through)
        for key in ("requests_per_s", "cpu_ms_per_1k", "peak_rss_mib")
    }
    for share in ("p50", "p99"):
        key = f"{share}_ms"
        pairs = zip(through, direct, strict=False)
        shown[f"added_{key}"] = statistics.median(ours[key] - base[key] for ours, base in pairs)
    shown["errors"] = sum(figures["errors"] for figures in through)
    return {key: round(value, 2) for key, value in shown.items()}


def main() -> None:
    arguments = parse_arguments(__doc__ or "", FAMILIES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 16384 if hard == resource.RLIM_INFINITY else min(16384, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    plan = arguments.by_size(
        smoke=Plan(("ours", "direct"), ("small", "sse"), repeats=1, for_s=0.2, num_many=0),
        quick=Plan(TARGETS, tuple(SCENARIOS), repeats=1, for_s=0.5, num_many=512),
        full=Plan(TARGETS, tuple(SCENARIOS), repeats=3, for_s=2.0, num_many=4096),
    )
    num_requests = arguments.by_size(smoke=4, quick=40, full=200)
    sizes = arguments.by_size(smoke=("4k",), quick=("4k", "64k"), full=agents.NUMS_OF_TOKENS)
    num_turns = arguments.by_size(smoke=2, quick=10, full=40)
    families = arguments.families
    result = measure(plan) if "routers" in families else {}
    if "choice_ns" in families:
        result["choice_ns"] = measure_choice(plan.repeats)
    if "turns" in families:
        result["turns"] = measure_turns(plan.repeats, plan.for_s)
    if "agents" in families:
        result["agents"] = measure_agents(num_turns, tuple(sizes), plan.repeats)
    if "cached_share" in families:
        result["cached_share"] = asyncio.run(measure_affinity(num_requests))
    if "affinity" in families:
        scenarios = arguments.by_size(smoke=SMALL, quick=AGENT_SCENARIOS, full=AGENT_SCENARIOS)
        seeds = arguments.by_size(smoke=1, quick=1, full=5)
        result["affinity"] = measure_agents_cache(seeds, scenarios)
    if "ray_call" in families:
        with stub_engines() as engines:
            result["ray_call"] = asyncio.run(measure_calls(engines, plan.for_s))
    result["machine"] = machine("uvicorn", "uvloop", "httptools", "httpx", "fastapi", "renderers")
    result["repeats"] = plan.repeats
    publish(result, as_json=arguments.as_json, title="routers over four stub engines")


if __name__ == "__main__":
    main()
