"""A TCP proxy in front of a real engine, where one request can be made to go wrong.

It sees the path of each request as it comes, so that a fault strikes in the middle of the phase
that sends it.  Everything else passes through untouched.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from engines.launch import EngineSpec, LocalEngine, LocalLauncher
from engines.protocol import Endpoint

FAULTS = ("drop", "502", "kill", "stop", "freeze")
THAWS_AFTER_S = 2.0
"""How long a frozen engine stands still; one that is stopped does so until it is killed."""
_BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 11\r\n\r\nBad Gateway"
_METHODS = (b"GET ", b"POST ")


class FaultProxy:
    """Listens in the place of one engine.

    Attributes:
        num_struck: requests that went wrong so far.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.num_struck = 0
        self._planned: dict[str, tuple[str, int]] = {}
        self._lost: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        # A stream has no strong reference to the task that reads it: while a killed engine takes
        # no data, only a cycle would hold both.
        self._served: set[asyncio.Task[None]] = set()

    async def start(self) -> Endpoint:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return Endpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def strike(self, path: str, fault: str, nth: int = 1) -> None:
        """The next request of ``path`` goes wrong, or the ``nth`` from now.

        Args:
            fault: one of ``FAULTS``, or ``lose``: it never arrives, and its connection stays open.
        """
        self._planned[path] = fault, nth

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _accept(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(client, answer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        there = self.engine.endpoint
        try:
            reply, request = await asyncio.open_connection(there.host, there.port)
        except OSError:
            answer.close()
            return
        backwards = asyncio.create_task(_copy(reply, answer, lambda data: True))
        try:
            await _copy(client, request, lambda data: self._passes(data, answer))
            if answer in self._lost:
                await client.read()
        finally:
            self._lost.discard(answer)
            request.close()
            await backwards

    def _passes(self, data: bytes, answer: asyncio.StreamWriter) -> bool:
        """Whether this part of a request may go on; a fault is carried out here."""
        if not data.startswith(_METHODS):
            return True
        path = data.split(b" ", 2)[1].partition(b"?")[0].decode()
        fault, nth = self._planned.pop(path, ("", 0))
        if nth > 1:
            self._planned[path] = fault, nth - 1
        if nth != 1:
            return True
        self.num_struck += 1
        if fault == "502":
            answer.write(_BAD_GATEWAY)
        elif fault == "lose":
            self._lost.add(answer)
        elif fault != "drop":
            self._signal(fault)
            return True
        return False

    def _signal(self, fault: str) -> None:
        """To the main process alone, as a crash would; stopped are all of them."""
        assert self.engine.pid is not None
        if fault == "kill":
            with suppress(ProcessLookupError):
                os.kill(self.engine.pid, signal.SIGKILL)
            return
        processes = tree_of(self.engine.pid)
        for one in processes:
            with suppress(psutil.NoSuchProcess):
                one.suspend()
        if fault == "freeze":
            asyncio.get_running_loop().call_later(THAWS_AFTER_S, _thaw, processes)


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and all below it; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _thaw(processes: list[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.resume()


async def _copy(
    source: asyncio.StreamReader,
    target: asyncio.StreamWriter,
    passes: Callable[[bytes], bool],
) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            if not passes(data):
                break
            target.write(data)
            await target.drain()
    with suppress(OSError):
        target.close()


class ProxiedEngine:
    """A ``RunningEngine`` that is reached through its proxy."""

    def __init__(self, engine: LocalEngine, proxy: FaultProxy, endpoint: Endpoint) -> None:
        self._engine = engine
        self._proxy = proxy
        self.endpoint = endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def stop(self, grace_s: float) -> bool:
        self._proxy.close()
        return await self._engine.stop(grace_s)

    async def kill(self) -> None:
        self._proxy.close()
        await self._engine.kill()


class ProxiedLauncher(LocalLauncher):
    """Real engines, each behind a proxy of its own.

    Attributes:
        proxies: the newest of each engine id.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proxies: dict[str, FaultProxy] = {}

    async def launch(self, spec: EngineSpec) -> Any:
        engine = await super().launch(spec)
        assert isinstance(engine, LocalEngine)
        proxy = self.proxies[spec.engine_id] = FaultProxy(engine)
        return ProxiedEngine(engine, proxy, await proxy.start())
