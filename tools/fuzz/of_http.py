"""The router's two sides of HTTP, without sockets: connections of clients, and to engines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from engines.protocol import Endpoint
from rollout.config import RouterConfig
from rollout.router.gate.gate import Gate, GateState
from rollout.router.http.engine_connection import EngineConnection, OutgoingRequest
from rollout.router.http.head_cache import HeadCache, ReplyHead
from rollout.router.http.read_pacing import ReadPacing
from rollout.router.proxy import context
from rollout.router.proxy.client_connection import ClientConnection
from rollout.router.proxy.context import Proxy
from rollout.rules.routing import Backend
from tools.fuzz.reader import ANY, Reader, Refused, Violation, numbered, times

_HOST = b"host: 127.0.0.1\r\n"
_RANDOM = re.compile(rb"[0-9a-f]{32}")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TICKS = 6
_MANY_PARTS = 64


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _ticks(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


class _Transport(asyncio.Transport):
    """What a connection asks of its socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_ended = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.written += map(bytes, parts)

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def write_eof(self) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def is_closing(self) -> bool:
        return self.is_ended

    def close(self) -> None:
        self.is_ended = True

    abort = close


# -- clients ------------------------------------------------------------------------------------


class _Engines:
    """Takes the place of the pool: engines answer at once."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def open(self) -> None: ...
    def close(self) -> None: ...
    def sweep(self) -> None: ...
    def send(
        self, handler: Any, endpoint: Endpoint, parts: list[Any], *, is_head: bool = False
    ) -> None:
        self.sent.append(b"".join(map(bytes, parts)))
        handler.upstream = self
        _loop().call_soon(self._answer, handler)

    def _answer(self, handler: Any) -> None:
        if handler.upstream is self:
            head = ReplyHead(200, [(b"content-type", b"application/json")])
            handler.on_reply(head, b"2", b"", False)
            handler.upstream = None
            handler.on_reply_data(b"{}", True)

    def drop(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


async def _app(scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """The control application: it answers what it was sent."""
    message = await receive()
    what = repr(
        (scope["method"], scope["raw_path"], scope["headers"], message.get("body"))
    ).encode()
    headers = [(b"content-length", b"%d" % len(what))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": what})


@cache
def _router() -> tuple[Proxy, _Engines, Config]:
    gate, engines = Gate(), _Engines()
    gate.set_members(1, [Backend("e", Endpoint("h", 9000))])
    gate.set_state(GateState.OPEN, weight_version=7)
    proxy = Proxy(gate, engines, RouterConfig(token_failover="off"), "run")  # type: ignore[arg-type]
    proxy.now_s, proxy.call_later = _loop().time, _loop().call_later
    gate.call_soon = _loop().call_soon
    config = Config(_app, log_config=None, access_log=False, server_header=False, date_header=False)
    config.load()
    config.loaded_app = _app
    return proxy, engines, config


_FAULTS: list[BaseException] = []


def _note_fault(where: str, error: BaseException) -> None:
    _FAULTS.append(error)


def _clients(parts: Sequence[bytes]) -> Any:
    """What a client gets for what it sends, and what engines are sent."""
    return _loop().run_until_complete(_client(parts))


async def _client(parts: Sequence[bytes]) -> Any:
    from rollout.router.proxy import client_connection, exchange

    proxy, engines, config = _router()
    engines.sent = []
    _FAULTS.clear()
    for module in (client_connection, exchange, context):
        module.log_router_error = _note_fault  # type: ignore[attr-defined]
    transport = _Transport()
    connection = ClientConnection(proxy, config, ServerState(), {}, _loop())
    connection.connection_made(transport)
    for part in parts:
        connection.data_received(part)
        await _ticks(1 if len(parts) > _MANY_PARTS else _TICKS)
    await _ticks(_TICKS + sum(map(len, parts)) // 64)
    connection.connection_lost(None)
    await _ticks(2)
    if _FAULTS:
        raise Violation(f"an error of the router's own: {_FAULTS[0]!r}") from _FAULTS[0]
    if proxy.bodies.num_bytes or len(proxy.gate.in_flight) or proxy.live:
        raise Violation("a request is left behind")
    written = b"".join(transport.written).replace(_CONTINUE, b"")
    sent = [_RANDOM.sub(b"R", one) for one in engines.sent]
    if not sent and b"HTTP/1.1 200" not in written:
        raise Refused(written[:40])
    return sent, _RANDOM.sub(b"R", written)


def _requests() -> Iterator[bytes]:
    body = b'{"input_ids":[1,2],"rid":"a"}'
    post = b"POST /generate HTTP/1.1\r\n" + _HOST
    right = post + b"content-length: %d\r\n\r\n" % len(body) + body
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    yield right
    yield right + right + b"GET /engines HTTP/1.1\r\n" + _HOST + b"\r\n"
    yield post + chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) + right
    yield post + chunked + b"1;x=y\r\n{\r\n1\r\n}\r\n0\r\na: b\r\n\r\n"
    yield post + b"content-length: 2\r\n" + chunked + b"2\r\n{}\r\n0\r\n\r\n"
    yield post + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}"
    yield post + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}"
    yield b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}"
    yield b"GET /health HTTP/1.1\r\n" + _HOST + b"upgrade: websocket\r\nconnection: upgrade\r\n\r\n"
    yield b"GET /generate HTTP/1.1\r\n" + _HOST + b"\r\n"
    yield b"POST /abort_request HTTP/1.1\r\n" + _HOST + b"content-length: 2\r\n\r\n{}"
    yield b"CONNECT h:1 HTTP/1.1\r\n" + _HOST + b"\r\n"
    yield b"GET / HTTP/1.1\r\nhost: other\r\n\r\n"
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"GET /%2e%2e/x?a=%zz HTTP/1.1\r\n" + _HOST + b"x: " + b"a" * 5000 + b"\r\n\r\n"
    yield b"GET / HTTP/1.1\r\n" + _HOST + b"a: b\r\n" * 300 + b"\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01"
    yield b"\r\n" * 300
    yield b"PUT /generate HTTP/1.1\r\n" + _HOST + chunked + b"ffffffffffffffff\r\n"


# -- engines ------------------------------------------------------------------------------------


class _Pool:
    """The owner of one connection to an engine."""

    def __init__(self) -> None:
        self.head_cache: HeadCache[ReplyHead] = HeadCache()
        self.read_pacing = ReadPacing(lambda rest: None)
        self.now_s: Callable[[], float] = lambda: 0.0

    def keep(self, connection: EngineConnection) -> None: ...
    def forget(self, connection: EngineConnection) -> None: ...
    def send_on_new_connection(self, handler: Any, outgoing: OutgoingRequest) -> None: ...


class _Handler:
    """Takes the reply to one request."""

    upstream: Any = None

    def __init__(self, *, is_decoding: bool) -> None:
        self.is_decoding = is_decoding
        self.head: Any = None
        self.data: list[bytes] = []
        self.ends: list[str] = []

    def on_reply(self, head: ReplyHead, length: bytes, unread: bytes, is_alone: bool) -> None:
        if self.head is not None:
            raise Violation("two heads for one request")
        self.head = head.status, head.headers, head.is_chunked, length

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        self.data.append(bytes(data))
        if is_end:
            self.ends.append("whole")

    def on_engine_lost(self, why: str, *, was_sent: bool = True) -> None:
        self.ends.append(why)

    def on_no_connection(self, why: str) -> None:
        self.ends.append(why)

    def may_reconnect(self) -> bool:
        return False

    def on_router_error(self, error: BaseException) -> None:
        raise Violation(f"an error of the router's own: {error!r}") from error


def _engines(parts: Sequence[bytes]) -> Any:
    """What a request learns of its reply, with and without its framing."""
    flags, rest = numbered(parts, 4)
    return _loop().run_until_complete(_engine(rest, flags))


async def _engine(parts: Sequence[bytes], flags: int) -> Any:
    pool = _pool()
    transport = _Transport()
    connection = EngineConnection(pool, Endpoint("h", 1))
    connection.connection_made(transport)
    handler = _Handler(is_decoding=bool(flags & 1))
    outgoing = OutgoingRequest(Endpoint("h", 1), [b"POST / HTTP/1.1\r\n\r\n"], bool(flags & 2))
    connection.send(handler, outgoing, 0.0)
    for part in parts:
        if handler.ends:
            return ANY  # had it come earlier, it would be a part of the reply
        if part:
            connection.data_received(part)
            await _ticks(1 + len(part) // 4096)
    await _ticks(1 + sum(map(len, parts)) // 4096)
    connection.connection_lost(None)
    if len(handler.ends) != 1:
        raise Violation(f"a request learned of its end {len(handler.ends)} times")
    (end,) = handler.ends
    if end == "sent more than its reply":
        return ANY  # had it come later, another request could have been sent meanwhile
    if end != "whole":
        raise Refused(end)
    return handler.head, b"".join(handler.data)


@cache
def _pool() -> _Pool:
    return _Pool()


def _replies() -> Iterator[bytes]:
    events = b'data: {"text": "a"}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    for flags in (b"\0", b"\1", b"\2", b"\3"):
        yield flags + head + b"content-length: %d\r\n\r\n" % len(events) + events
        yield flags + head + b"content-length: %d\r\n\r\n" % len(events) + events + b"\r\n"
        yield flags + head + b"content-length: 5\r\n\r\n" + events
        yield flags + chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(events), events)
        yield flags + chunked + b"1\r\na\r\n1;x\r\nb\r\n0\r\nx: y\r\n\r\n"
        yield flags + chunked + b"1\r\na\r\n0\r\n\r\n\r\n\r\n"
        yield flags + chunked + b"zz\r\na"
        yield flags + head + b"connection: close\r\n\r\n" + events
        yield flags + b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"
        yield flags + b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n"
        yield flags + b"HTTP/1.1 999 X\r\n\r\n"
        yield flags + b"HTTP/1.1 200 OK\r\na: \0\r\n\r\n"
        yield flags + b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc"
        yield flags + b"HTTP/1.0 200 OK\r\n\r\nabc"
        yield flags + head + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab"
        yield flags + head + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
        yield flags + b"\r\n" + chunked + b"0\r\n\r\n"
        yield flags + chunked + (b"%x\r\n" % 40000) + b"data: x\n\n" * 4444 + b"\r\n0\r\n\r\n"


def readers() -> Sequence[Reader]:
    """The readers of this module."""
    return (
        Reader("http_requests", _clients, (), _requests, times(64, 2 << 20), is_split=True),
        Reader("http_replies", _engines, (), _replies, times(64, 2 << 20), is_split=True),
    )
