"""What a client can make the router keep, and for how long; the attacks are in ``test_attacks``."""

import asyncio
import time
import tracemalloc

import pytest

from rollout.router.continuation.body_names import names_in
from rollout.router.http import incoming_body
from rollout.router.http.head_cache import (
    MAX_AFFINITY_CHARACTERS,
    HeadCache,
    RequestHead,
    head_key,
)
from rollout.router.http.headers import to_engine
from rollout.router.http.request import AFFINITY, BodyFields, Request, affinity_in
from rollout.router.http.routes import route_of
from rollout.router.proxy import client_connection
from rollout.router.proxy.client_connection import _MAX_UNPARSED_BYTES
from tests.rollout.router.conftest import router_config
from tests.rollout.router.raw import connect, post, response_to
from tests.rollout.router.stub_engine import chunk, reply

pytestmark = pytest.mark.clock


def kept_bytes(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_long_targets_are_not_kept():
    assert kept_bytes(lambda: [route_of(b"/%05d" % n + b"x" * 60_000) for n in range(500)]) < 2e6
    assert route_of(b"/v1/score?" + b"y" * 60_000).is_generation


def test_heads_with_many_headers_are_not_kept():
    known = HeadCache()

    def come():
        for number in range(200):
            headers = [(b"a", b"%d" % place) for place in range(300)]
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            data = b"POST /v1/%d HTTP/1.1\r\nContent-Length: 1\r\n%s\r\n" % (number, lines)
            head = RequestHead(b"POST", route_of(b"/v1/score"), headers)
            for _ in range(3):
                known.add(head_key(data)[0], head, [])

    assert kept_bytes(come) < 1e6


@pytest.mark.parametrize("num", [MAX_AFFINITY_CHARACTERS, MAX_AFFINITY_CHARACTERS + 1])
def test_an_affinity_that_is_long_counts_as_none(num: int) -> None:
    text = b"s" * num
    head = RequestHead(b"POST", route_of(b"/generate"), [(b"x-affinity", text), (b"a", b"b")])
    kept = text.decode() if num <= MAX_AFFINITY_CHARACTERS else ""
    assert head.affinity == kept
    body = b'{"affinity": "%s"}' % text
    for fields in (BodyFields(), BodyFields(keys={AFFINITY: (True, text.decode())})):
        assert affinity_in(Request(head, body, fields)) == kept
        assert affinity_in(Request(head, body, fields, names=names_in(body))) == kept
        assert affinity_in(Request(head, body, fields, names=frozenset())) == ""


@pytest.mark.slow
def test_many_connection_headers_cost_no_more_than_their_number():
    def took_s(num):
        headers = [(b"connection", b"x%d" % number) for number in range(num)]
        began_s = time.thread_time()
        to_engine(headers)
        return time.thread_time() - began_s

    took_s(8000)
    # 32 times as long if it is as their number, and 1024 times if as its square.
    assert min(took_s(8000) for _ in range(5)) < 128 * min(took_s(250) for _ in range(5))


async def test_a_body_in_tiny_chunks_takes_no_more_than_its_bytes(make_bench):
    bench = await make_bench(reply())
    num = 200_000
    head = b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await connect(bench, head, chunk(b"ab") * num)
    exchange, arrived = None, 0
    while arrived < 2 * num:
        live = await bench.host._on_loop(lambda: list(bench.host._proxy.live))
        exchange = exchange or next(iter(live), None)
        arrived = exchange.stage.parts.num_bytes if exchange else 0
    assert exchange.stage.parts._data.__sizeof__() < 1.5 * arrived
    writer.write(b"0\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_while_a_client_does_not_read_its_next_requests_wait(make_bench):
    bench = await make_bench(reply(b"x" * 100_000))
    _, writer = await connect(bench)
    writer.transport.pause_reading()
    num = 20_000
    writer.write(b"GET /v1/score HTTP/1.1\r\nHost: localhost\r\n\r\n" * num)
    state, seen, before = bench.host._thread._server.server_state, 0, -1
    while seen != before or not seen:
        await asyncio.sleep(0.2)
        before, seen = seen, state.total_requests
    (connection,) = state.connections
    assert seen < num
    assert connection.transport.get_write_buffer_size() < 1 << 20
    assert len(connection._unparsed) < _MAX_UNPARSED_BYTES + (1 << 19)
    assert len(connection._pipeline) < 1000
    writer.transport.abort()
    await bench.host.drained(5)


async def test_a_client_that_reads_late_gets_all_of_its_responses(make_bench):
    bench = await make_bench(reply(b"x" * 100_000))
    reader, writer = await connect(bench)
    writer.transport.pause_reading()
    writer.write(
        post(b"{}", b"/v1/score") * 299 + post(b"{}", b"/v1/score", b"Connection: close\r\n")
    )
    while not any(
        connection.is_write_paused
        for connection in bench.host._thread._server.server_state.connections
    ):
        await bench.host.stats()
    writer.transport.resume_reading()
    assert (await asyncio.wait_for(reader.read(), 20)).count(b"HTTP/1.1 200") == 300
    writer.close()


async def test_a_client_that_never_reads_its_last_response_is_cut(make_bench):
    bench = await make_bench(reply(b"x" * (8 << 20)), config=router_config(request_timeout_s=0.5))
    _, writer = await connect(bench)
    writer.transport.pause_reading()
    connections = bench.host._thread._server.server_state.connections
    while not connections:
        await bench.host.stats()
    (connection,) = connections
    connection.timeout_keep_alive = 0.2
    await bench.host._on_loop(connection._close_if_idle)
    writer.write(post(b"{}", b"/v1/score"))
    async with asyncio.timeout(20):
        while connections:
            await bench.host.stats()
    writer.transport.abort()


@pytest.mark.parametrize("path", [b"/v1/score", b"/figures"])
@pytest.mark.parametrize("num", [0, 10, 1 << 20])
async def test_a_body_that_stops_ends_its_request(make_bench, monkeypatch, path, num):
    monkeypatch.setattr(incoming_body, "STALLED_S", 0.3)
    bench = await make_bench(reply())
    reader, writer = await connect(bench, post(b"x" * (num + 1), path)[:-1])
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408")
    writer.close()
    while bench.host._proxy.bodies.num_bytes or bench.host._proxy.live:
        await bench.host.stats()


@pytest.mark.parametrize("path", [b"/v1/score", b"/figures"])
async def test_bodies_that_do_not_end_share_a_bound(make_bench, path):
    bench = await make_bench(reply())
    proxy = bench.host._proxy
    proxy.bodies.max_bytes = 2 << 20  # of which a client has half
    unfinished = post(b"x" * 600_000, path)[:-1]
    first = await connect(bench, unfinished)
    while proxy.bodies.num_bytes < 590_000:
        await bench.host.stats()
    second = await connect(bench, unfinished)
    head = await second[0].readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"unfinished requests of 127.0.0.1 already take" in await second[0].readuntil(b"}}")
    first[1].write(b"x")
    status = b"HTTP/1.1 200" if path == b"/v1/score" else b"HTTP/1.1 4"  # it is not JSON
    assert (await first[0].readuntil(b"\r\n\r\n")).startswith(status)
    third = await connect(bench, unfinished)
    for _, writer in (first, second, third):
        writer.transport.abort()
    while bench.host._thread._server.server_state.connections:
        await bench.host.stats()
    assert proxy.bodies.num_bytes == 0


async def test_clients_beyond_the_bound_reach_health_and_state_alone(make_bench):
    bench = await make_bench(reply())
    proxy, state = bench.host._proxy, bench.host._thread._server.server_state
    proxy.max_clients = 2
    first = [await connect(bench, post(b"{}", b"/v1/score")) for _ in range(2)]
    for reader, _ in first:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert b"connections that open files allow" in await response_to(bench, post(b"{}"))
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await response_to(bench, head)).startswith(b"HTTP/1.1 200")  # and it closes
    more = [await connect(bench) for _ in range(client_connection._MAX_SURPLUS)]
    while len(state.connections) < 2 + client_connection._MAX_SURPLUS:
        await bench.host.stats()
    assert (await response_to(bench)).startswith(b"HTTP/1.1 503")  # before it sends anything
    for _, writer in [*first, *more]:
        writer.close()
    while state.connections:
        await bench.host.stats()
    assert (await response_to(bench, post(b"{}", extra=b"Connection: close\r\n"))).startswith(
        b"HTTP/1.1 200"
    )
