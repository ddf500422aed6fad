"""The same steps of one server under the same requests, with recording on and off in turns.

Server, group and router are in this process, whose CPU is measured.  The fake engines, which reply
at once, and the clients are in other processes.  The timeline is written to files, as it is by
default.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lifecycle.engines import fake_engines
from engines.fake import write_checkpoint
from engines.launch import LocalLauncher
from rollout.config import RolloutConfig
from rollout.control.group.server_group import ServerGroup
from rollout.control.server.server import RolloutServer
from rollout.core.types import EngineSlot
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import Kind, Span
from rollout.observability.timeline.span_file import SpanFile
from rollout.router.host import RouterHost
from rollout.runtime.local import group_settings
from tests.support.builders import push

_WARM_UP = 3


class Switched(Timeline):
    """A timeline whose recording can be switched off."""

    is_on = True

    @contextmanager
    def span(
        self, kind: Kind, name: str, *, engine_id: str = "", budget_s: float = 0.0
    ) -> Iterator[Span]:
        if not Switched.is_on:
            yield Span(kind, name, self.source, 0.0)
            return
        with super().span(kind, name, engine_id=engine_id, budget_s=budget_s) as span:
            yield span

    def event(self, name: str, message: str = "", *, engine_id: str = "") -> None:
        if Switched.is_on:
            super().event(name, message, engine_id=engine_id)


class Clients:
    """Clients in a process of their own."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.timeline.clients", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, num: int) -> None:
        """Send ``num`` requests and wait for all replies."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num}\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("a request failed; its error is printed above")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def make_server(urls: list[str], folder: Path) -> RolloutServer:
    """A server over these engines whose timelines can be switched."""
    engine = {"kind": "attached", "urls": urls}
    server = {
        "model_path": str(write_checkpoint(folder)),
        "groups": {"main": {"engine": engine}},
        "health": {"recover": False},
    }
    config = RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": server}})
    settings = group_settings(config, "policy", "main")

    def recorded(source: str) -> Timeline:
        file = folder / f"{source.replace('/', '-')}.spans.jsonl"
        return Switched(source, sinks=[SpanFile(file)])

    slots = [EngineSlot(f"main-{index}", "main", index) for index in range(len(urls))]
    timeline = recorded(settings.source)
    group = ServerGroup(settings, slots, LocalLauncher(), timeline=timeline)
    of_policy = config.servers["policy"]
    router = RouterHost(of_policy.router)
    return RolloutServer("policy", of_policy, {"main": group}, router, timeline=recorded("policy"))


async def measure(num_engines: int, num_pairs: int, num_requests: int, folder: Path) -> Any:
    """CPU of a step and its requests, with recording and without; see ``figures``."""
    spent_s: dict[bool, list[float]] = {True: [], False: []}
    with fake_engines(num_engines) as urls:
        server = make_server(urls, folder)
        status = await server.start()
        clients = Clients(status.router_url)
        try:
            for number in range(2 * (num_pairs + _WARM_UP)):
                # On, off, off, on: a drift of the machine affects both alike.
                Switched.is_on = number % 4 in (0, 3)
                gc.collect()
                began_s = time.process_time()
                await server.offload()
                await server.push(push(number + 1))
                await asyncio.to_thread(clients.send, num_requests)
                spent_s[Switched.is_on].append(time.process_time() - began_s)
        finally:
            clients.close()
            await server.stop()
    return figures(spent_s[True][_WARM_UP:], spent_s[False][_WARM_UP:])


def figures(on_s: list[float], off_s: list[float]) -> dict[str, float]:
    """Medians, and the difference within each pair with its quartiles."""
    differences = [on - off for on, off in zip(on_s, off_s, strict=True)]
    low_s, middle_s, high_s = statistics.quantiles(differences, n=4)
    return {
        "cpu_ms, on": 1e3 * statistics.median(on_s),
        "cpu_ms, off": 1e3 * statistics.median(off_s),
        "cpu_ms of recording": 1e3 * middle_s,
        "its first quartile": 1e3 * low_s,
        "its third quartile": 1e3 * high_s,
        "share of the CPU of such a step (%)": 100 * middle_s / statistics.median(off_s),
    }
