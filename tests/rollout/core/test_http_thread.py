"""An HTTP server in a thread: it starts, does work on its loop, and leaves nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
import uvicorn

from engines.http.uvicorn_server import HttpServer
from engines.process import background
from engines.process.background import Then
from rollout.core.errors import ConfigError, RolloutError
from rollout.core.http_thread import HttpThread, bind
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.waits import forever


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def make_server() -> HttpServer:
    return HttpServer(uvicorn.Config(app, lifespan="off", log_config=None))


async def name_of_thread() -> str:
    return threading.current_thread().name


async def test_it_serves_and_does_work_on_its_own_loop_until_it_is_stopped() -> None:
    thread = HttpThread("page")
    endpoint = await thread.start("127.0.0.1", 0, make_server, 10)
    assert thread.is_running
    assert await thread.call(name_of_thread()) == f"page-{endpoint.port}"
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
    reply = await reader.read()
    assert reply.startswith(b"HTTP/1.1 204")
    assert b"\r\ndate: " in reply
    writer.close()
    await thread.stop(1, timeout_s=10)
    assert not thread.is_running
    assert f"page-{endpoint.port}" not in [one.name for one in threading.enumerate()]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((endpoint.host, endpoint.port), 1)
    with pytest.raises(RolloutError, match="the page is not running"):
        await thread.call(name_of_thread())
    await thread.stop(1, timeout_s=10)
    with pytest.raises(RolloutError, match="the page is started once"):
        await thread.start("127.0.0.1", 0, make_server)


async def test_it_serves_at_a_socket_that_is_bound_already() -> None:
    listener = bind("127.0.0.1", 0, what="page")
    port = listener.getsockname()[1]
    thread = HttpThread("page")
    endpoint = await thread.start("127.0.0.1", 4711, make_server, 10, listener=listener)
    assert endpoint.port == port
    reader, writer = await asyncio.open_connection(endpoint.host, port)
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 204")
    writer.close()
    await thread.stop(1, timeout_s=10)
    assert listener.fileno() == -1


async def test_a_server_without_requests_stops_without_waiting_for_a_time() -> None:
    settings = uvicorn.Config(app, lifespan="off", log_config=None, date_header=False)
    loops: list[VirtualTimeLoop] = []

    def make_loop() -> VirtualTimeLoop:
        loops.append(VirtualTimeLoop())
        return loops[0]

    thread = HttpThread("page", loop_factory=make_loop)
    await thread.start("127.0.0.1", 0, lambda: HttpServer(settings), 10)
    await thread.stop(1, timeout_s=10)
    assert loops[0].time() == 0.0


async def test_servers_are_made_one_after_the_other() -> None:
    """FastAPI changes the warning filters of the process while it builds an application."""
    entered, opened, second = threading.Event(), threading.Event(), threading.Event()

    def slow() -> HttpServer:
        entered.set()
        assert opened.wait(10)
        assert not second.is_set()
        return make_server()

    def fast() -> HttpServer:
        second.set()
        return make_server()

    threads = HttpThread("page"), HttpThread("router")
    starting = [asyncio.ensure_future(threads[0].start("127.0.0.1", 0, slow, 10))]
    await asyncio.to_thread(entered.wait, 10)
    starting.append(asyncio.ensure_future(threads[1].start("127.0.0.1", 0, fast, 10)))
    # Long enough to be made if nothing held it; too short can only miss an error.
    await asyncio.to_thread(second.wait, 0.2)
    opened.set()
    await asyncio.gather(*starting)
    assert second.is_set()
    for thread in threads:
        await thread.stop(1, timeout_s=10)


async def test_a_server_that_cannot_start_is_an_error_with_its_cause() -> None:
    def fail() -> HttpServer:
        raise ValueError("no server")

    with pytest.raises(RolloutError, match="page could not start: ValueError: no server") as caught:
        await HttpThread("page").start("127.0.0.1", 0, fail, 10)
    assert isinstance(caught.value.__cause__, ValueError)


async def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"page cannot bind 127.0.0.1:{port}") as caught:
            await HttpThread("page").start("127.0.0.1", port, make_server)
    assert caught.value.setting == "page.port"


class Failing(HttpServer):
    async def main_loop(self) -> None:
        raise ValueError("no memory")


@pytest.mark.parametrize("ends_process", [False, True])
async def test_a_server_that_fails_says_so_and_ends_a_process_that_is_nothing_without_it(
    ends_process: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(background.os, "_exit", statuses.append)
    thread = HttpThread("router")
    if ends_process:
        thread.then = Then.PROCESS_ENDS
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    await thread.start("127.0.0.1", 0, lambda: Failing(config), 10)
    assert thread._thread is not None
    await asyncio.to_thread(thread._thread.join, 20)
    assert statuses == [1] * ends_process
    (record,) = caplog.records
    assert "failed with ValueError('no memory')" in record.getMessage()
    with pytest.raises(RolloutError, match="the router is not running"):
        await thread.call(name_of_thread())


async def test_work_that_a_stop_cuts_short_is_an_error() -> None:
    thread = HttpThread("page")
    await thread.start("127.0.0.1", 0, make_server, 10)
    call = asyncio.ensure_future(thread.call(forever()))
    await asyncio.sleep(0)
    await thread.stop(0.1, timeout_s=10)
    with pytest.raises(RolloutError, match="the page stopped before it could answer"):
        await call
