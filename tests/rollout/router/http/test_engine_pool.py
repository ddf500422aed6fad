"""Connections to engines that are idle, on real sockets: one that an engine has closed is not used,
however late this process is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from engines.protocol import Endpoint
from rollout.router.http.engine_pool import KEEPALIVE_S, EnginePool
from tests.rollout.router.http.reply_handler import Handler
from tests.support.waits import until

REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LATE_S = 1.5
"""A request whose connection is closed within a second of its sending goes to another one."""


class Engine:
    """What answers, as a test says."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.endpoint = Endpoint("127.0.0.1", self.listener.getsockname()[1])
        self.num_connections = 0

    async def accepted(self) -> socket.socket:
        found: list[socket.socket] = []

        def accept() -> bool:
            try:
                found.append(self.listener.accept()[0])
            except BlockingIOError:
                return False
            return True

        assert await until(accept, 10)
        self.num_connections += 1
        found[0].setblocking(False)
        return found[0]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    with made.listener:
        yield made


class Clock:
    now_s = 100.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def pool(clock: Clock) -> AsyncIterator[EnginePool]:
    made = EnginePool(connect_timeout_s=10, max_connections=8)
    made.open()
    made.now_s = lambda: clock.now_s
    yield made
    made.close()


def send(pool: EnginePool, engine: Engine) -> Handler:
    handler = Handler(True)
    pool.send(handler, engine.endpoint, [b"GET / HTTP/1.1\r\n\r\n"])
    return handler


async def answered(handler: Handler, connection: socket.socket) -> None:
    assert await asyncio.get_running_loop().sock_recv(connection, 1 << 10)
    connection.sendall(REPLY)
    assert await until(lambda: handler.end is not None, 10)
    assert handler.end == "end"


async def test_a_connection_is_used_again(pool: EnginePool, engine: Engine, clock: Clock) -> None:
    handler = send(pool, engine)
    with await engine.accepted() as connection:
        await answered(handler, connection)
        clock.now_s += KEEPALIVE_S / 2
        await answered(send(pool, engine), connection)
    assert engine.num_connections == 1


@pytest.mark.parametrize("idle_s", [KEEPALIVE_S / 2, 2 * KEEPALIVE_S])
async def test_one_that_the_engine_closed_is_not_though_its_end_was_not_read(
    pool: EnginePool, engine: Engine, clock: Clock, idle_s: float
) -> None:
    handler = send(pool, engine)
    with await engine.accepted() as connection:
        await answered(handler, connection)
    # Nothing runs on the loop from here to the next request, as in a process that is late.
    clock.now_s += idle_s
    handler = send(pool, engine)
    clock.now_s += LATE_S
    with await engine.accepted() as connection:
        await answered(handler, connection)
    assert engine.num_connections == 2
    assert pool.num_open == 1


async def test_one_that_was_idle_for_too_long_is_not_used_before_it_is_swept(
    pool: EnginePool, engine: Engine, clock: Clock
) -> None:
    handler = send(pool, engine)
    with await engine.accepted() as first:
        await answered(handler, first)
        clock.now_s += KEEPALIVE_S + 0.1
        handler = send(pool, engine)
        with await engine.accepted() as connection:
            await answered(handler, connection)
        assert await asyncio.get_running_loop().sock_recv(first, 1) == b""
