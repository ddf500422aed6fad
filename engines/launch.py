"""Launch an engine on this machine, or attach to one that runs already.

``EngineSpec`` describes the engine; the module of its kind turns it into a command line.
``LocalLauncher`` runs that command under a guard, so that the engine never outlives the process
that launched it.  A port is held from its choice until its user starts.

Always true: an attached engine is controlled like any other, but never stopped from here: no
signal, no shutdown call.  When it has failed, the router stops sending it requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from engines.http.key_check import CONTROL_KEY, SAMPLING_KEY, key_variables, new_access
from engines.kinds import kind_of
from engines.process.background import start_task
from engines.process.cuda_runtime import LIBRARY_PATH
from engines.process.engine_process import EngineProcess
from engines.process.engine_records import clear_crashed
from engines.process.gpu_memory import gpu_memory, wait_until_free
from engines.process.tcp_ports import PortReservation, reserve_port, who_listens
from engines.protocol import (
    NO_ACCESS,
    Endpoint,
    Engine,
    EngineAccess,
    GpuMemory,
    ProcessIdentity,
)
from engines.protocol.errors import EngineError, EngineNotReady, EngineRejected, PortTaken
from engines.protocol.spec import EngineSpec, Invocation, normalized

logger = logging.getLogger(__name__)

_PROBE_INTERVAL_S = 0.5
_MOST_PORTS = 3
_AT_START = "default"
_WRONG_KEY = (401, 403)
_NOT_READY = (
    "it answers 503: starting, unhealthy or paused; if it is paused and its weights are whole, "
    "send POST {url}{path}"
)


class RunningEngine(Protocol):
    """An engine process that can be reached, measured and ended, wherever it runs."""

    @property
    def endpoint(self) -> Endpoint: ...
    @property
    def access(self) -> EngineAccess:
        """What calls to it must carry."""
        ...

    @property
    def pid(self) -> int | None: ...
    @property
    def node_id(self) -> str:
        """The node it runs on, the first of several, or empty where there is but one."""
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
        """Host memory of the engine's processes, or None where it cannot be measured."""
        ...

    async def gpu_memory(self) -> Sequence[GpuMemory] | None:
        """Memory of its GPUs, in order of rank, or empty if it has none, None if not measured."""
        ...

    async def is_alive(self) -> bool: ...
    async def log_tail(self, lines: int = 20) -> str: ...
    async def stop(self, grace_s: float) -> bool:
        """Terminate it, then kill it; True if it had to be killed.  Gone when this returns."""
        ...

    async def kill(self) -> None:
        """Kill it at once; confirmed gone when this returns."""
        ...


class EngineLauncher(Protocol):
    """Starts engines; returns when they are ready, or raises and leaves no process."""

    async def launch(self, spec: EngineSpec) -> RunningEngine: ...


@runtime_checkable
class NodeLauncher(EngineLauncher, Protocol):
    """One that can also start an engine's part on one node of several."""

    def hold_address(self, host: str) -> str: ...


class LocalEngine:
    """A ``RunningEngine`` on this machine.

    Args:
        access: its keys, and its process.
        used_before: bytes on its GPUs before it started, or None if not measured.
    """

    node_id = ""
    node_ids: Sequence[str] = ()

    def __init__(
        self,
        endpoint: Endpoint,
        process: EngineProcess,
        spec: EngineSpec,
        access: EngineAccess,
        used_before: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.access = access
        self._process = process
        self._gpu_ids = spec.gpu_ids
        self._kill_s = spec.process_kill_s
        self._pids = process.pids()
        self._used_before = used_before

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def processes(self) -> Sequence[ProcessIdentity]:
        identity = self._process.identity
        return () if identity is None else (identity,)

    async def resident_bytes(self) -> int | None:
        return self._process.resident_bytes()

    async def gpu_memory(self) -> Sequence[GpuMemory] | None:
        if not self._gpu_ids:
            return ()
        pids = self._process.pids()
        return await asyncio.to_thread(gpu_memory, self._gpu_ids, pids)

    async def is_alive(self) -> bool:
        return self._process.is_alive()

    async def log_tail(self, lines: int = 20) -> str:
        return self._process.log_tail(lines)

    async def stop(self, grace_s: float) -> bool:
        self._pids |= self._process.pids()
        was_killed = await self._process.stop(grace_s)
        await self._wait_for_gpus()
        return was_killed

    async def kill(self) -> None:
        self._pids |= self._process.pids()
        await self._process.kill()
        await self._wait_for_gpus()

    async def _wait_for_gpus(self) -> None:
        if self._gpu_ids:
            await wait_until_free(self._gpu_ids, self._pids, self._kill_s, self._used_before)


class AttachedEngine:
    """A ``RunningEngine`` that another program launched.

    Attributes:
        detached: called when it is used no more, or None if there is nothing to do then.
    """

    node_id = ""
    node_ids: Sequence[str] = ()
    pid: int | None = None
    processes: Sequence[ProcessIdentity] = ()

    def __init__(
        self, endpoint: Endpoint, engine_id: str, access: EngineAccess = NO_ACCESS
    ) -> None:
        self.endpoint = endpoint
        self.access = access
        self.detached: Callable[[], None] | None = None
        self._engine_id = engine_id

    async def resident_bytes(self) -> int | None:
        """Unknown: it may run on another machine."""
        return None

    async def gpu_memory(self) -> Sequence[GpuMemory] | None:
        """Unknown: it may run on another machine."""
        return None

    async def is_alive(self) -> bool:
        """Whether anything listens there."""
        try:
            _, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
        except OSError:
            return False
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True

    async def log_tail(self, lines: int = 20) -> str:
        return f"attached at {self.endpoint.url}; the program that launched it has its log"

    async def stop(self, grace_s: float) -> bool:
        """Detach from it; it keeps running."""
        logger.info("detached from engine %s", self._engine_id)
        await self._detach()
        return False

    async def kill(self) -> None:
        """Detach from it: it was not launched here.  A fenced engine gets no more requests."""
        logger.warning("engine %s was not launched here and keeps running", self._engine_id)
        await self._detach()

    async def _detach(self) -> None:
        detached, self.detached = self.detached, None
        if detached is not None:
            await asyncio.to_thread(detached)


async def attach(spec: EngineSpec) -> AttachedEngine:
    """Wait until the engine at ``spec.url`` takes requests, and give it a numbered version.

    Raises:
        EngineNotReady: it did not within ``spec.start_timeout_s``.
        EngineRejected: it needs another key.
        ValueError: the URL is not that of an engine.
        Exception: whatever ``spec.claim`` raises.
    """
    detached = await claimed(spec.claim) if spec.claim is not None else None
    try:
        engine = await _attach(spec)
    except BaseException:
        if detached is not None:
            detached()
        raise
    engine.detached = detached
    return engine


async def claimed(claim: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Claim an engine in a thread; returns what ends the claim.  A cancelled call ends it."""
    taking = start_task(asyncio.to_thread(claim), "claim")
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        taking.add_done_callback(_end_claim)
        raise


def _end_claim(taking: asyncio.Future[Callable[[], None]]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result()()


async def _attach(spec: EngineSpec) -> AttachedEngine:
    endpoint = Endpoint.of_url(spec.url)
    kind = kind_of(spec.kind)
    access = (spec.access or NO_ACCESS).of(run=spec.run)
    client = kind.client(endpoint, engine_id=spec.engine_id)
    client.authorize(access)
    last_answer = _NOT_READY.format(url=endpoint.url, path=kind.resume_path)
    # A key of requests alone may be vLLM's own, which leaves the control endpoints open.
    if why := kind.why_open(endpoint.host, bool(access.control)):
        logger.warning("engine %s at %s: %s", spec.engine_id, endpoint.url, why)
    has_told = False
    try:
        async with asyncio.timeout(spec.start_timeout_s) as deadline:
            while True:
                try:
                    if await client.is_ready():
                        break
                except EngineError as error:
                    if isinstance(error, EngineRejected) and error.status in _WRONG_KEY:
                        raise
                    last_answer = str(error)
                if not has_told:
                    has_told = True
                    waits = (spec.engine_id, spec.start_timeout_s, last_answer)
                    logger.warning("engine %s: waits up to %g s for it: %s", *waits)
                await asyncio.sleep(_PROBE_INTERVAL_S)
            await _number(client, spec)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise EngineNotReady(
            f"engine {spec.engine_id} at {endpoint.url} was not ready after "
            f"{spec.start_timeout_s:g} s: {last_answer}",
            engine=spec.engine_id,
            operation="attach",
        ) from None
    finally:
        await client.aclose()
    return AttachedEngine(endpoint, spec.engine_id, access)


async def _number(client: Engine, spec: EngineSpec) -> None:
    """Give an engine a number where it has the version with which SGLang and vLLM start.

    Not one that somebody has named, or in which a push has ended early: a number would make it
    serve as what it may not be.
    """
    if await client.weight_version() == _AT_START:
        await client.update_weight_version(str(spec.weight_version))
        numbered = (spec.engine_id, _AT_START, spec.weight_version)
        logger.info("%s: weight version %r is called %d now", *numbered)


class LocalLauncher:
    """Launches engines as guarded child processes of this one."""

    def __init__(self) -> None:
        self._reserved: dict[str, PortReservation] = {}

    def hold_address(self, host: str) -> str:
        """An address on this node for the nodes of one engine to meet at.

        Held until this launcher starts the engine's node of rank 0.
        """
        reservation = reserve_port(host)
        address = f"[{host}]:{reservation.port}" if ":" in host else f"{host}:{reservation.port}"
        self._reserved[address] = reservation
        return address

    async def launch(self, spec: EngineSpec) -> LocalEngine | AttachedEngine:
        """Start the engine and wait until it answers as ready.

        Nothing is sent to another program that took the port before the engine could: the engine
        is started again on another one.

        Raises:
            EngineNotReady: it died or was late; its log's tail is in the error.
            PortTaken: other programs took its ports, or the one of an engine over several nodes.
            ValueError: an option that this library sets itself, or an unknown kind.
        """
        if spec.is_attached:
            return await attach(spec)
        num_ports = 1 if spec.num_nodes > 1 else _MOST_PORTS  # the other nodes know its addresses
        for _ in range(num_ports - 1):
            try:
                return await self._launch(spec)
            except PortTaken as error:
                if not error.port:
                    raise
                logger.warning("%s; it is started again on another port", error)
        return await self._launch(spec)

    async def _launch(self, spec: EngineSpec) -> LocalEngine:
        kind = kind_of(spec.kind)
        if cleared := await asyncio.to_thread(clear_crashed):
            logger.warning("removed the leftovers of a crashed run: %s", ", ".join(cleared))
        gpus = await asyncio.to_thread(gpu_memory, spec.gpu_ids) if spec.gpu_ids else None
        used_before = None if gpus is None else sum(gpu.used_bytes for gpu in gpus)
        log_path = Path(spec.log_path)
        with ExitStack() as held:
            reservation = held.enter_context(reserve_port(spec.host))
            if spec.node_rank == 0 and spec.dist_init_addr in self._reserved:
                held.enter_context(self._reserved.pop(spec.dist_init_addr))
            endpoint = Endpoint(spec.host, reservation.port)
            if spec.access is None:
                spec = replace(spec, access=new_access())
            start = invocation(spec, endpoint, os.environ)
            for port in start.ports:
                held.enter_context(reserve_port(spec.host, port))
            # The engine binds its ports itself, so they are released just before it starts.
            held.close()
            process = await EngineProcess.spawn(
                start.command,
                env=start.env,
                log_path=log_path,
                engine_id=spec.engine_id,
                cleanup=start.cleanup,
                folder_variable=start.folder_variable,
                kill_timeout_s=spec.process_kill_s,
            )
        assert spec.access is not None
        identity = process.identity
        access = spec.access.of("" if identity is None else identity.token, run=spec.run)
        client = kind.client(endpoint, engine_id=spec.engine_id)
        client.authorize(access)
        # Only the first node takes requests; the others only report that they live.
        probe = client.is_ready if spec.node_rank == 0 else client.is_healthy
        ports = endpoint.port, *start.ports
        listens = partial(_listens, spec.engine_id, endpoint.host, ports, process)

        async def probe_own() -> bool:
            """The engine's own answer: it alone listens there before the probe and after it."""
            return await listens() and await probe() and await listens()

        try:
            await process.wait_until_ready(probe_own, spec.start_timeout_s)
            if not kind.is_numbered_at_start:
                await _number(client, spec)
        except BaseException as error:
            await process.kill()
            if isinstance(error, EngineNotReady) and error.exit_status is not None:
                _refuse_taken(spec.engine_id, endpoint, error)
            raise
        finally:
            await client.aclose()
        return LocalEngine(endpoint, process, spec, access, used_before)


async def _listens(engine_id: str, host: str, ports: Sequence[int], process: EngineProcess) -> bool:
    """Whether the engine listens at the first of these ports.

    Raises:
        PortTaken: another program does at one of them.
    """
    found: list[bool] = []
    for port in ports:
        listening = await asyncio.to_thread(who_listens, host, port, process.pids)
        if listening.stranger:
            raise PortTaken(
                f"engine {engine_id}: {listening.stranger} has taken port {port} on {host} before "
                "the engine, and gets no request",
                engine=engine_id,
                port=port,
            )
        found.append(listening.is_ours)
    return found[0]


def _refuse_taken(engine_id: str, endpoint: Endpoint, error: EngineNotReady) -> None:
    """Raise PortTaken if an engine has ended and another program has its port."""
    try:
        reserve_port(endpoint.host, endpoint.port).release()
    except PortTaken as taken:
        raise PortTaken(
            f"engine {engine_id}: {taken}; {error}", engine=engine_id, port=endpoint.port
        ) from error


def invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    """How an engine is started at this endpoint.

    Args:
        inherited: the environment that it inherits.

    Raises:
        ValueError: an option that this library sets itself, one that its kind does not have, or
            one that would keep state of old weights.
    """
    kind = kind_of(spec.kind)
    if kind.invocation is None:
        raise ValueError(f"engine kind {spec.kind!r} cannot be launched; give its url")
    start, keeps = kind.invocation(spec, endpoint, inherited), spec.keeps_embeddings
    env = kind.old_state.variables(keeps_embeddings=keeps) | dict(start.env)
    kind.old_state.refuse(normalized(spec.options), env, keeps_embeddings=keeps)
    # Those of the process that launches are of an engine that is its parent.
    env = {name: value for name, value in env.items() if name not in (SAMPLING_KEY, CONTROL_KEY)}
    return replace(start, env=env | key_variables(spec.access or NO_ACCESS))


def check_spec(spec: EngineSpec) -> None:
    """Check that an engine can be launched with this specification; starts nothing.

    Raises:
        ValueError: see ``invocation``.
    """
    invocation(spec, Endpoint(spec.host, 1), os.environ)


@dataclass(frozen=True, slots=True)
class Override:
    """A choice of this library that the user's replaces.

    Attributes:
        by: ``engine.options``, ``engine.env``, or the environment that the engine inherits.
    """

    name: str
    default: Any
    used: Any
    by: str


@dataclass(frozen=True, slots=True)
class StartSettings:
    """What decides how an engine starts, besides its command.

    Attributes:
        dropped: variables that it does not inherit, or only a part of.
        env: variables that this library sets, with the values that the engine gets.
        options: options that this library chooses, with the values that the engine gets.
        overrides: the settings among them that the user has set differently.
    """

    dropped: Sequence[str]
    env: Mapping[str, str]
    options: Mapping[str, Any]
    overrides: Sequence[Override]


_INHERITED = "the environment"
# A part of each is inherited.
_EXTENDED = ("PATH", LIBRARY_PATH)


def start_settings(spec: EngineSpec, inherited: Mapping[str, str]) -> StartSettings:
    """What an engine would be started with; starts nothing.

    Raises:
        ValueError: see ``invocation``.
    """
    endpoint = Endpoint(spec.host, 1)
    start = invocation(spec, endpoint, inherited)
    ours = dict(invocation(replace(spec, env={}), endpoint, {}).env)
    for name in _EXTENDED:
        ours.pop(name, None)
    given = normalized(spec.options)
    env = {name: start.env[name] for name in ours}
    options = {name: given.get(name, value) for name, value in start.defaults.items()}
    known = ours.keys() | spec.env.keys() | {*_EXTENDED}
    return StartSettings(
        dropped=sorted(
            name for name in inherited.keys() - known if start.env.get(name) != inherited[name]
        ),
        env=env,
        options=options,
        overrides=[
            *(
                Override(name, default, options[name], "engine.options")
                for name, default in start.defaults.items()
                if options[name] != default
            ),
            *(
                Override(name, default, env[name], "engine.env" if name in spec.env else _INHERITED)
                for name, default in ours.items()
                if env[name] != default
            ),
        ],
    )


__all__ = [
    "AttachedEngine",
    "EngineLauncher",
    "EngineNotReady",
    "EngineSpec",
    "LocalEngine",
    "LocalLauncher",
    "NodeLauncher",
    "Override",
    "RunningEngine",
    "StartSettings",
    "attach",
    "check_spec",
    "invocation",
    "start_settings",
]
