"""Whatever bytes come, from clients or from engines: no traceback, no hang, nothing mixed up."""

import asyncio
from itertools import pairwise

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.router.http.routes import is_generation, route_of
from tests.rollout.router.raw import post
from tests.rollout.router.stub_engine import chunk

WHOLE = post(b'{"input_ids": [1]}', b"/v1/score")
CHUNKED = (
    b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(b"abc")
    + b"0\r\n\r\n"
)
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\nbody",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
]


@st.composite
def damaged(draw, originals):
    """One of these, cut into packets, with a few bytes changed, put in or left out."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        size = draw(st.integers(0, 2))
        data[at : at + size] = draw(
            st.binary(max_size=3)
            | st.sampled_from(
                [b"\r\n", b"\n", b"\r", b":", b" ", b"\x00", b"Content-Length: 1\r\n"]
            )
        )
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    edges = [0, *cuts, len(data)]
    return [bytes(data[a:b]) for a, b in pairwise(edges)]


async def talk(bench, parts):
    """What comes back within a moment, or until it closes."""
    reader, writer = await asyncio.open_connection(bench.endpoint.host, bench.endpoint.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.write(b"\r\n\r\n\x00\x00 end \x00\r\n\r\n")  # ends what is still open
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 0.3)
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.close()


async def test_damaged_requests_harm_no_other_request(make_bench, caplog):
    num = 0

    async def counts(connection, seen):
        nonlocal num
        num += 1
        body = b"%d" % len(seen.body)
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)

    bench = await make_bench(counts)
    loop = asyncio.get_running_loop()

    @settings(suppress_health_check=list(HealthCheck))
    @given(damaged([WHOLE, CHUNKED, WHOLE + CHUNKED]))
    def fuzz(parts):
        asyncio.run_coroutine_threadsafe(talk(bench, parts), loop).result(10)

    await asyncio.to_thread(fuzz)
    responses = [await bench.ask("/v1/score", data=b"abc") for _ in range(3)]
    assert [entry.body for entry in responses] == [b"3"] * 3
    assert not any(record.exc_info for record in caplog.records)
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


async def test_damaged_replies_harm_no_other_request(make_bench, caplog):
    parts: list[bytes] = []

    async def says(connection, seen):
        for part in parts:
            await connection.send(part)
        connection.writer.close()
        raise ConnectionResetError

    bench = await make_bench(says)
    loop = asyncio.get_running_loop()
    epoch = 1

    async def ask():
        nonlocal epoch
        epoch += 1
        await bench.host.set_members(epoch, [bench.member(0)])
        try:
            got = await asyncio.wait_for(bench.ask("/v1/score", data=b"abc"), 5)
        except aiohttp.ClientError:  # the client sees that the response is broken
            return
        assert got.status in range(200, 600)

    @settings(suppress_health_check=list(HealthCheck))
    @given(damaged(ANSWERS))
    def fuzz(given_parts):
        parts[:] = given_parts
        asyncio.run_coroutine_threadsafe(ask(), loop).result(10)

    await asyncio.to_thread(fuzz)
    parts[:] = ANSWERS[:1]
    await bench.host.set_members(epoch + 1, [bench.member(0)])
    assert (await bench.ask("/v1/score", data=b"abc")).body == b"body"
    assert not any(record.exc_info for record in caplog.records)


@given(st.binary(max_size=80))
def test_any_target_is_read_or_refused(url):
    route = route_of(url)
    assert route.problem or not route.is_generation or is_generation(route.path)
