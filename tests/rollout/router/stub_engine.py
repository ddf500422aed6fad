"""A scripted engine: a raw server on loopback that treats a connection as a test's script says.

``Hold`` is the gate of the house's tests: the stub sets ``entered`` when it gets there, and goes
on when the test sets ``opened``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from engines.protocol import Endpoint


@dataclass
class Seen:
    """One request as the engine got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


class Hold:
    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.opened = asyncio.Event()

    async def __call__(self) -> None:
        self.entered.set()
        await self.opened.wait()


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
        await self.writer.drain()

    def reset(self) -> None:
        """Gone without a goodbye, as a killed process is."""
        peer = self.writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Script = Callable[[Connection, Seen], Awaitable[None]]


@dataclass
class StubEngine:
    """Serves every request by ``script``; ``resets_heads`` resets before it has read one."""

    engine_id: str
    script: Script
    resets_heads: bool = False
    seen: list[Seen] = field(default_factory=list)
    num_connections: int = 0
    peer_closed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 26)

    @property
    def endpoint(self) -> Endpoint:
        assert self._server is not None
        return Endpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def refuse(self) -> None:
        """Stop listening: the next connection is refused."""
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        self.refuse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in list(self._writers):
            writer.close()
        assert self._server is not None
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        task = asyncio.ensure_future(self._converse(Connection(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, connection: Connection) -> None:
        try:
            if self.resets_heads:
                await connection.reader.readexactly(8)
                connection.reset()
                return
            while True:
                seen = await read_request(connection.reader)
                self.seen.append(seen)
                await self.script(connection, seen)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.peer_closed.set()
            self._writers.discard(connection.writer)
            connection.writer.close()


async def read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = [tuple(line.split(": ", 1)) for line in lines]
    sizes = [int(value) for key, value in headers if key.lower() == "content-length"]
    body = await reader.readexactly(sizes[0]) if sizes else b""
    return Seen(method, target, headers, body)


def reply(
    body: bytes = b'{"text": "ok"}', status: str = "200 OK", headers: tuple[str, ...] = ()
) -> Script:
    async def script(connection: Connection, seen: Seen) -> None:
        head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers])
        sent = b"" if seen.method == "HEAD" else body
        await connection.send(head.encode() + b"\r\n\r\n", sent)

    return script


def hold_then_reply(hold: Hold) -> Script:
    """Replies once opened; ``peer_closed`` is set if the router closes before."""

    async def script(connection: Connection, seen: Seen) -> None:
        opened = asyncio.ensure_future(hold())
        gone = asyncio.ensure_future(connection.reader.read(1))
        await asyncio.wait({opened, gone}, return_when="FIRST_COMPLETED")
        if not opened.done():
            opened.cancel()
            raise ConnectionResetError
        gone.cancel()
        await asyncio.wait({gone})
        await reply()(connection, seen)

    return script


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = CHUNKED % b"text/event-stream; charset=utf-8"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(*steps: bytes | Hold, then_reset: bool = False) -> Script:
    """Server-sent events, one chunk each, with holds between."""

    async def script(connection: Connection, seen: Seen) -> None:
        await connection.send(STREAM)
        for step in steps:
            if isinstance(step, Hold):
                await step()
            else:
                await connection.send(chunk(step))
        if then_reset:
            connection.reset()
            raise ConnectionResetError
        await connection.send(b"0\r\n\r\n")

    return script


def die_within_body(hold: Hold) -> Script:
    async def script(connection: Connection, seen: Seen) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await hold()
        connection.reset()
        raise ConnectionResetError

    return script


def die_unanswered() -> Script:
    async def script(connection: Connection, seen: Seen) -> None:
        connection.reset()
        raise ConnectionResetError

    return script
