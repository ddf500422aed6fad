"""From what an engine should be to a running one, on this machine.

``EngineSpec`` says what is wanted in the words of the protocol; the module of each kind turns it
into a command line.  ``LocalLauncher`` runs that command under a guard, so that the engine never
outlives the process that launched it.  A port is held from its choice until its user starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, runtime_checkable

from engines.attached import AttachedEngine, attach
from engines.client import EngineClient
from engines.embedded.command import invocation as embedded_invocation
from engines.errors import EngineNotReady
from engines.fake.command import invocation as fake_invocation
from engines.invocation import Invocation
from engines.ports import PortReservation, reserve_port
from engines.process import EngineProcess
from engines.protocol import Endpoint, ProcessIdentity
from engines.sglang.invocation import invocation as sglang_invocation
from engines.spec import EngineSpec


class RunningEngine(Protocol):
    """An engine process that can be reached, measured and ended, wherever it runs."""

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def node_id(self) -> str:
        """The node it runs on, the first of several; empty where there is but one."""
        ...

    @property
    def node_ids(self) -> Sequence[str]:
        """All its nodes, in order of rank; none where there is but one."""
        ...

    @property
    def processes(self) -> Sequence[ProcessIdentity]:
        """What it runs as, one for each of its nodes; none where it is not ours or has none."""
        ...

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


@runtime_checkable
class NodeLauncher(EngineLauncher, Protocol):
    """One that can also start an engine's part on one node of several."""

    def hold_address(self, host: str) -> str: ...


class LocalEngine:
    """A ``RunningEngine`` on this machine."""

    node_id = ""
    node_ids: Sequence[str] = ()

    def __init__(self, endpoint: Endpoint, process: EngineProcess) -> None:
        self.endpoint = endpoint
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def processes(self) -> Sequence[ProcessIdentity]:
        identity = self._process.identity
        return () if identity is None else (identity,)

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

    def __init__(self) -> None:
        self._held: dict[str, PortReservation] = {}

    def hold_address(self, host: str) -> str:
        """An address on this node for the nodes of one engine to meet at.

        Held until this launcher starts the engine's node of rank 0.
        """
        reservation = reserve_port(host)
        address = f"[{host}]:{reservation.port}" if ":" in host else f"{host}:{reservation.port}"
        self._held[address] = reservation
        return address

    async def launch(self, spec: EngineSpec) -> LocalEngine | AttachedEngine:
        """Start the engine and wait until it answers as ready.

        Raises:
            EngineNotReady: it died or was late; its log's tail is in the error.
            ValueError: an option that this library sets itself, or an unknown kind.
        """
        if spec.kind == "attached":
            return await attach(spec)
        invoke = _KINDS.get(spec.kind)
        if invoke is None:
            raise ValueError(
                f"engine kind {spec.kind!r} cannot be launched; known: {', '.join(_KINDS)}"
            )
        log_path = Path(spec.log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            reservation = held.enter_context(reserve_port(spec.host))
            if spec.node_rank == 0 and spec.dist_init_addr in self._held:
                held.enter_context(self._held.pop(spec.dist_init_addr))
            endpoint = Endpoint(spec.host, reservation.port)
            start = invoke(spec, endpoint, os.environ)
            # The engine binds its ports itself, so they are let go of just before it starts.
            held.close()
            process = await EngineProcess.spawn(
                start.command,
                env=start.env,
                log_path=log_path,
                engine_id=spec.engine_id,
                cleanup=start.cleanup,
            )
        client = EngineClient(endpoint, engine_id=spec.engine_id)
        # Nodes behind the first take no requests; all they have is a sign of life.
        probe = client.is_ready if spec.node_rank == 0 else client.is_healthy
        try:
            await process.wait_until_ready(probe, spec.start_timeout_s)
        except BaseException:
            await process.kill()
            raise
        finally:
            await client.aclose()
        return LocalEngine(endpoint, process)


_KINDS: dict[str, Callable[[EngineSpec, Endpoint, Mapping[str, str]], Invocation]] = {
    "embedded": embedded_invocation,
    "sglang": sglang_invocation,
    "fake": fake_invocation,
}


__all__ = [
    "EngineLauncher",
    "EngineNotReady",
    "EngineSpec",
    "LocalEngine",
    "LocalLauncher",
    "NodeLauncher",
    "RunningEngine",
]
