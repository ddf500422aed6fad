"""From what an engine should be to a running one, on this machine.

``EngineSpec`` says what is wanted in the words of the protocol; the module of each kind turns it
into a command line.  ``LocalLauncher`` runs that command under a guard, so that the engine never
outlives the process that launched it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engines.client import EngineClient
from engines.embedded.command import build_command as embedded_command
from engines.errors import EngineNotReady
from engines.ports import reserve_port
from engines.process import EngineProcess
from engines.protocol import Endpoint


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What one engine should be.

    Attributes:
        kind: ``embedded`` or ``sglang``.
        gpu_ids: physical GPUs it gets; empty runs it on the CPU.
        num_cpus: its number of torch threads on the CPU, rounded up.
        memory_saver: it must be able to give its memory back.
        weights_cpu_backup: it keeps a host copy of its weights while they are released.
        options: more options in the engine's own names, without the leading dashes.
        log_path: its standard output and error.
    """

    engine_id: str
    kind: str
    model_path: str
    log_path: str
    gpu_ids: tuple[int, ...] = ()
    num_cpus: float = 1.0
    memory_saver: bool = True
    weights_cpu_backup: bool = False
    weight_version: int = 0
    start_timeout_s: float = 300.0
    host: str = "127.0.0.1"
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


class RunningEngine(Protocol):
    """An engine process that can be reached, measured and ended, wherever it runs."""

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def pid(self) -> int | None: ...
    async def resident_bytes(self) -> int | None:
        """Host memory of the engine's processes; None where it cannot be measured."""
        ...

    async def is_alive(self) -> bool: ...
    async def log_tail(self, lines: int = 20) -> str: ...
    async def stop(self, grace_s: float) -> bool:
        """Ask it to end, then kill it; True if it had to be killed.  Gone when this returns."""
        ...

    async def kill(self) -> None:
        """End it at once, whatever it is doing; confirmed gone when this returns."""
        ...


class EngineLauncher(Protocol):
    """Starts engines; returns when they are ready, or raises with nothing left running."""

    async def launch(self, spec: EngineSpec) -> RunningEngine: ...


class LocalEngine:
    """A ``RunningEngine`` on this machine."""

    def __init__(self, endpoint: Endpoint, process: EngineProcess) -> None:
        self.endpoint = endpoint
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def resident_bytes(self) -> int | None:
        return self._process.resident_bytes()

    async def is_alive(self) -> bool:
        return self._process.is_alive()

    async def log_tail(self, lines: int = 20) -> str:
        return self._process.log_tail(lines)

    async def stop(self, grace_s: float) -> bool:
        return await self._process.stop(grace_s)

    async def kill(self) -> None:
        await self._process.kill()


class LocalLauncher:
    """Launches engines as guarded child processes of this one."""

    async def launch(self, spec: EngineSpec) -> LocalEngine:
        """Start the engine and wait until it answers as ready.

        Raises:
            EngineNotReady: it died or was late; its log's tail is in the error.
            ValueError: an option that this library sets itself, or an unknown kind.
        """
        build = _COMMANDS.get(spec.kind)
        if build is None:
            raise ValueError(
                f"engine kind {spec.kind!r} cannot be launched; known: {', '.join(_COMMANDS)}"
            )
        log_path = Path(spec.log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with reserve_port(spec.host) as reservation:
            endpoint = Endpoint(spec.host, reservation.port)
            command = build(spec, endpoint)
            # The engine binds the port itself, so the reservation ends just before it starts.
            reservation.release()
            process = await EngineProcess.spawn(
                command, env=_environment(spec), log_path=log_path, engine_id=spec.engine_id
            )
        client = EngineClient(endpoint, engine_id=spec.engine_id)
        try:
            await process.wait_until_ready(client.is_ready, spec.start_timeout_s)
        except BaseException:
            await process.kill()
            raise
        finally:
            await client.aclose()
        return LocalEngine(endpoint, process)


_COMMANDS = {"embedded": embedded_command}


def _environment(spec: EngineSpec) -> dict[str, str]:
    env = dict(os.environ)
    env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu_id) for gpu_id in spec.gpu_ids)
    env.update(spec.env)
    return env


__all__ = [
    "EngineLauncher",
    "EngineNotReady",
    "EngineSpec",
    "LocalEngine",
    "LocalLauncher",
    "RunningEngine",
]
