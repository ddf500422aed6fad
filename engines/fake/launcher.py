"""A launcher of fake engines, and the process each seems to run in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engines.fake.engine.fake_caches import caches_of
from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.engine.faults import CallGate
from engines.protocol import (
    NO_ACCESS,
    Endpoint,
    EngineAccess,
    GpuId,
    GpuMemory,
    PauseMode,
    ProcessIdentity,
)
from engines.protocol.spec import EngineSpec

_HOST_BYTES = 1 << 30

Make = Callable[[EngineSpec, Endpoint], FakeEngine]


def make_engine(spec: EngineSpec, endpoint: Endpoint, **settings: Any) -> FakeEngine:
    """The fake engine of a spec; ``settings`` are further arguments of ``FakeEngine``."""
    return FakeEngine(spec.engine_id, **settings_of(spec, endpoint), **settings)


def settings_of(spec: EngineSpec, endpoint: Endpoint) -> dict[str, Any]:
    """The arguments of a fake engine that its spec has."""
    return {
        "endpoint": endpoint,
        "model_path": spec.model_path,
        "weight_version": str(spec.weight_version),
        "memory_saver": spec.memory_saver,
        "weights_cpu_backup": spec.weights_cpu_backup,
        "caches": caches_of(spec),
    }


@dataclass
class FakeGpus:
    """The GPUs of one fake engine, which no other engine uses.

    Attributes:
        others: bytes that other programs hold on each of them, such as the trainer.
        is_measured: this machine has NVML.
        names_own: the driver names the engine's processes, as it does not in many containers.
    """

    gpu_ids: Sequence[GpuId]
    total_bytes: int
    others: int = 0
    is_measured: bool = True
    names_own: bool = True

    def memory(self, engine_bytes: int) -> Sequence[GpuMemory] | None:
        """Their memory, of which the engine holds so many bytes in equal shares."""
        if self.gpu_ids and not self.is_measured:
            return None
        own = engine_bytes // len(self.gpu_ids) if self.gpu_ids else 0
        holders = {"pid 77 (trainer)": self.others} if self.others else {}
        return [
            GpuMemory(
                f"GPU-{gpu_id}",
                self.others + own,
                self.total_bytes,
                holders,
                own_bytes=own if self.names_own else None,
            )
            for gpu_id in self.gpu_ids
        ]


class FakeRunningEngine:
    """``launch.RunningEngine`` for an engine in memory.

    What an engine with GPUs holds is there; its process holds the same on the host all the time.

    Attributes:
        gpus: its GPUs; none for an engine on the CPU.
        is_stopped: it was stopped or killed.
        num_kills: how often it was killed.
    """

    node_id = ""
    node_ids: Sequence[str] = ()
    access: EngineAccess = NO_ACCESS

    def __init__(self, engine: FakeEngine, pid: int, gpu_ids: Sequence[GpuId] = ()) -> None:
        self.engine = engine
        self.gpus = FakeGpus(gpu_ids, total_bytes=2 * engine.resident_bytes)
        self.pid: int | None = pid
        self.processes: Sequence[ProcessIdentity] = ()
        self.is_stopped = False
        self.num_kills = 0

    @property
    def endpoint(self) -> Endpoint:
        return self.engine.endpoint

    async def resident_bytes(self) -> int | None:
        return _HOST_BYTES if self.gpus.gpu_ids else self.engine.resident_bytes

    async def gpu_memory(self) -> Sequence[GpuMemory] | None:
        return self.gpus.memory(self.engine.resident_bytes)

    async def is_alive(self) -> bool:
        return not self.engine.is_dead

    async def log_tail(self, lines: int = 20) -> str:
        log = [f"{call.at_s:.3f} {call.operation}" for call in self.engine.calls]
        if self.engine.is_dead:
            log.append(f"ended: {self.engine.death_reason}")
        return "\n".join(log[-lines:])

    async def stop(self, grace_s: float) -> bool:
        """Stopped, or paused with frozen requests, SGLang ignores SIGTERM: it is killed."""
        self.is_stopped = True
        ignores_sigterm = self.engine.paused in (PauseMode.RETRACT, PauseMode.IN_PLACE)
        if self.engine.is_frozen or (ignores_sigterm and self.engine.in_flight):
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
        specs: the specs of all launches, in order.
        processes: everything launched so far, by engine id; the last one of each id.
    """

    def __init__(self, make: Make = make_engine) -> None:
        self._make = make
        self.specs: list[EngineSpec] = []
        self.processes: dict[str, FakeRunningEngine] = {}
        self._by_endpoint: dict[Endpoint, FakeEngine] = {}
        self._failures: dict[str, BaseException] = {}
        self._gates: dict[str, tuple[CallGate, asyncio.Event]] = {}

    async def launch(self, spec: EngineSpec) -> FakeRunningEngine:
        """Start the engine, unless its launch is to fail."""
        self.specs.append(spec)
        if spec.engine_id in self._gates:
            gate, opened = self._gates[spec.engine_id]
            with gate.waiting():
                await opened.wait()
        if (error := self._failures.pop(spec.engine_id, None)) is not None:
            raise error
        num = len(self._by_endpoint) + 1
        endpoint = Endpoint(spec.host, num)
        engine = self._make(spec, endpoint)
        process = self.processes[spec.engine_id] = FakeRunningEngine(engine, num, spec.gpu_ids)
        self._by_endpoint[endpoint] = engine
        return process

    def connect(self, endpoint: Endpoint, engine_id: str) -> FakeEngine:
        """The engine that listens there, in the place of an HTTP client of it."""
        return self._by_endpoint[endpoint]

    def fail_next(self, engine_id: str, error: BaseException) -> None:
        """The next launch of ``engine_id`` raises ``error``."""
        self._failures[engine_id] = error

    def hold(self, engine_id: str) -> CallGate:
        """Hold the launches of ``engine_id`` until the gate is opened."""
        opened = asyncio.Event()
        gate = CallGate(opened.set)
        self._gates[engine_id] = gate, opened
        return gate

    def __getitem__(self, engine_id: str) -> FakeEngine:
        return self.processes[engine_id].engine
