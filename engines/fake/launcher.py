"""A launcher of fake engines, and the process each seems to run in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from engines.fake.engine import FakeEngine
from engines.fake.faults import Gate
from engines.protocol import Endpoint, PauseMode, ProcessIdentity
from engines.spec import EngineSpec

Make = Callable[[EngineSpec, Endpoint], FakeEngine]


def make_engine(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    """The fake engine a spec asks for."""
    return FakeEngine(
        spec.engine_id,
        endpoint=endpoint,
        model_path=spec.model_path,
        weight_version=str(spec.weight_version),
        memory_saver=spec.memory_saver,
        weights_cpu_backup=spec.weights_cpu_backup,
    )


class FakeRunningEngine:
    """``launch.RunningEngine`` for an engine in memory.

    Attributes:
        is_stopped: it was asked to end, politely or not.
        num_kills: how often it was killed.
    """

    node_id = ""
    node_ids: Sequence[str] = ()

    def __init__(self, engine: FakeEngine, pid: int) -> None:
        self.engine = engine
        self.pid: int | None = pid
        self.processes: Sequence[ProcessIdentity] = ()
        self.is_stopped = False
        self.num_kills = 0

    @property
    def endpoint(self) -> Endpoint:
        return self.engine.endpoint

    async def resident_bytes(self) -> int | None:
        return self.engine.resident_bytes

    async def is_alive(self) -> bool:
        return not self.engine.is_dead

    async def log_tail(self, lines: int = 20) -> str:
        log = [f"{call.at_s:.3f} {call.operation}" for call in self.engine.calls]
        if self.engine.is_dead:
            log.append(f"ended: {self.engine.dead_because}")
        return "\n".join(log[-lines:])

    async def stop(self, grace_s: float) -> bool:
        """Stopped, or paused with frozen requests, SGLang does not hear SIGTERM: it is killed."""
        self.is_stopped = True
        is_deaf = self.engine.paused in (PauseMode.RETRACT, PauseMode.IN_PLACE)
        if self.engine.is_frozen or (is_deaf and self.engine.in_flight):
            await self.kill()
            return True
        self.engine.die("stopped")
        return False

    async def kill(self) -> None:
        self.is_stopped = True
        self.num_kills += 1
        self.engine.die("killed")


class FakeLauncher:
    """``launch.EngineLauncher`` of fake engines.

    Args:
        make: makes the engine of a spec, to give it other tensors or timings.

    Attributes:
        specs: what was asked for, in order.
        processes: everything launched so far, by engine id; the last one of each id.
    """

    def __init__(self, make: Make = make_engine) -> None:
        self._make = make
        self.specs: list[EngineSpec] = []
        self.processes: dict[str, FakeRunningEngine] = {}
        self._by_endpoint: dict[Endpoint, FakeEngine] = {}
        self._failures: dict[str, BaseException] = {}
        self._gates: dict[str, _LaunchGate] = {}

    async def launch(self, spec: EngineSpec) -> FakeRunningEngine:
        """Start the engine, unless its launch is to fail."""
        self.specs.append(spec)
        if (gate := self._gates.get(spec.engine_id)) is not None:
            await gate.wait()
        if (error := self._failures.pop(spec.engine_id, None)) is not None:
            raise error
        num = len(self._by_endpoint) + 1
        endpoint = Endpoint(spec.host, num)
        engine = self._make(spec, endpoint)
        process = FakeRunningEngine(engine, pid=num)
        self.processes[spec.engine_id] = process
        self._by_endpoint[endpoint] = engine
        return process

    def connect(self, endpoint: Endpoint, engine_id: str) -> FakeEngine:
        """The engine that listens there, in the place of an HTTP client of it."""
        return self._by_endpoint[endpoint]

    def fail_next(self, engine_id: str, error: BaseException) -> None:
        """The next launch of ``engine_id`` raises ``error``."""
        self._failures[engine_id] = error

    def hold(self, engine_id: str) -> Gate:
        """Hold the launches of ``engine_id`` until the gate is opened."""
        self._gates[engine_id] = _LaunchGate()
        return self._gates[engine_id].gate

    def __getitem__(self, engine_id: str) -> FakeEngine:
        return self.processes[engine_id].engine


class _LaunchGate:
    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self.gate = Gate(self._opened.set)

    async def wait(self) -> None:
        self.gate.entered.set()
        self.gate.num_waiting += 1
        try:
            await self._opened.wait()
        finally:
            self.gate.num_waiting -= 1
