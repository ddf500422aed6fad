"""The spliced data path, with raw sockets on both sides."""

import asyncio
import socket
import time

import pytest

from engines.protocol import Endpoint
from rollout.router import Member

from .conftest import Settings
from .raw import answer, bodies, connect, post
from .stub_engine import CHUNKED, Hold, chunk, die_unanswered, hold_then_reply, reply, stream

CLOSE = b"Connection: close\r\n"


async def echo(connection, seen):
    await reply(seen.target.encode() + b"|" + seen.body)(connection, seen)


def sends(*parts: bytes, then_closes: bool = False):
    """Each part in a packet of its own, as far as a drained writer can tell."""

    async def script(connection, seen):
        for part in parts:
            await connection.send(part)
            await asyncio.sleep(0)
        if then_closes:
            connection.writer.close()
            raise ConnectionResetError

    return script


# -- requests in any packets ----------------------------------------------------------------


async def test_a_request_may_come_byte_by_byte(make_bench):
    bench = await make_bench(echo)
    reader, writer = await connect(bench)
    for byte in post(b"abc", b"/v1/x", CLOSE):
        writer.write(bytes([byte]))
        await writer.drain()
    assert bodies(await reader.read()) == [b"/v1/x|abc"]
    writer.close()


async def test_a_chunked_request_split_within_its_framing_is_one_body(make_bench):
    bench = await make_bench(echo)
    head = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"\r\n"
    reader, writer = await connect(bench, head)
    for part in (
        b"3",
        b"\r\nab",
        b"c\r",
        b"\n2;ext=1\r\nde\r\n0",
        b"\r\nX-Trailer: 1\r\n",
        b"\r\n",
    ):
        writer.write(part)
        await writer.drain()
        await bench.host.stats()
    assert bodies(await reader.read()) == [b"/v1/x|abcde"]
    writer.close()


async def test_pipelined_requests_to_engines_and_to_the_router_keep_their_order(make_bench):
    bench = await make_bench(echo)
    whole = await answer(
        bench,
        post(b"1", b"/v1/a"),
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        post(b"2", b"/v1/b"),
        b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
        post(b"3", b"/v1/c", CLOSE),
    )
    assert bodies(whole) == [
        b"/v1/a|1",
        b'{"status":"ok"}',
        b"/v1/b|2",
        b'{"detail":"Not Found"}',
        b"/v1/c|3",
    ]


async def test_a_pipelined_request_reaches_an_engine_only_when_it_has_its_turn(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    reader, writer = await connect(bench, post(b"{}"))
    await hold.entered.wait()
    writer.write(post(b"{}", extra=CLOSE))
    assert (await bench.host.stats())["num_in_flight"] == 1
    hold.opened.set()
    assert len(bodies(await reader.read())) == 2
    assert len(bench.engines[0].seen) == 2
    writer.close()


async def test_a_pipelined_request_may_come_in_pieces_while_the_one_before_is_answered(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    half = post(b"second", extra=CLOSE)
    reader, writer = await connect(bench, post(b"first") + half[:-3])
    await hold.entered.wait()
    for byte in half[-3:]:
        writer.write(bytes([byte]))
        await writer.drain()
        await bench.host.stats()
    hold.opened.set()
    assert len(bodies(await asyncio.wait_for(reader.read(), 5))) == 2
    assert [seen.body for seen in bench.engines[0].seen] == [b"first", b"second"]
    writer.close()


async def test_a_thousand_refused_requests_in_one_packet_are_all_answered(make_bench):
    bench = await make_bench()
    await bench.host.set_gate("closed")
    whole = await answer(bench, *[post(b"{}")] * 999, post(b"{}", extra=CLOSE))
    assert whole.count(b"HTTP/1.1 503") == 1000


async def test_garbage_behind_a_request_is_refused_after_its_answer(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    reader, writer = await connect(bench, post(b"{}"))
    await hold.entered.wait()
    writer.write(b"\x00\x01 what\r\n\r\n")
    hold.opened.set()
    first, second = (await reader.read()).split(b"HTTP/1.1 ")[1:]
    assert (first[:3], second[:3]) == (b"200", b"400")
    writer.close()


async def test_garbage_behind_a_request_in_the_same_packet_is_refused_after_its_answer(make_bench):
    bench = await make_bench(reply())
    whole = await answer(bench, post(b"{}"), b"\x00\x01 what\r\n\r\n")
    assert [part[:3] for part in whole.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]


@pytest.mark.parametrize(
    "head",
    [
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1,1\r\n\r\na",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\na",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\n X-Fold: 1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nX-A: a\rb\r\n\r\n",
        b"POST /generate HTTP/1.1\nHost: x\n\n\x00",
        b"POST /gen\xffrate HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT engine:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
async def test_framing_that_two_parsers_could_read_differently_reaches_no_engine(make_bench, head):
    bench = await make_bench(reply())
    whole = await answer(bench, head)
    assert whole.startswith(b"HTTP/1.1 400"), whole
    assert bench.engines[0].seen == []


async def test_a_head_without_end_is_refused(make_bench):
    bench = await make_bench(reply())
    reader, writer = await connect(bench, b"POST /generate HTTP/1.1\r\nX: " + b"x" * 70_000)
    assert (await reader.read()).startswith(b"HTTP/1.1 431")
    writer.close()


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_long_gets_a_413_that_arrives(make_bench, is_announced):
    bench = await make_bench(reply(), settings=Settings(max_body_bytes=1000))
    body = b"x" * 2_000_000
    framed = post(body) if is_announced else None
    if framed is None:
        framed = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        framed += chunk(body) + b"0\r\n\r\n"
    whole = await answer(bench, framed)
    assert whole.startswith(b"HTTP/1.1 413")
    assert b"over 1000 bytes" in whole
    assert bench.engines[0].seen == []


async def test_a_refused_client_that_asked_to_continue_is_not_told_to(make_bench):
    bench = await make_bench(reply())
    await bench.host.set_gate("closed")
    whole = await answer(bench, post(b"{}", extra=b"Expect: 100-continue\r\n")[:-2])
    assert whole.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in whole


async def test_an_http_1_0_client_gets_a_stream_without_chunks_and_a_closed_connection(make_bench):
    bench = await make_bench(stream(b"data: 1\n\n", b"data: 2\n\n"))
    whole = await answer(bench, post(b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b"transfer-encoding" not in whole
    assert bodies(whole) == [b"data: 1\n\ndata: 2\n\n"]


# -- answers in any packets -----------------------------------------------------------------


async def test_an_answer_may_come_byte_by_byte(make_bench):
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    bench = await make_bench(sends(*(bytes([byte]) for byte in whole)))
    for _ in range(2):
        assert (await bench.ask()).body == b"abc"
    assert bench.engines[0].num_connections == 1


async def test_a_chunked_answer_split_within_its_framing_is_passed_on(make_bench):
    parts = CHUNKED % b"x/y", b"3\r", b"\nab", b"c\r\n2;e=1\r\nde\r", b"\n0\r\n", b"X-T: 1\r\n\r\n"
    bench = await make_bench(sends(*parts))
    for _ in range(2):
        assert (await bench.ask()).body == b"abcde"
    assert bench.engines[0].num_connections == 1


async def test_an_answer_that_ends_with_its_connection_is_whole(make_bench):
    head = b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\n"
    bench = await make_bench(sends(head, b"abc", b"def", then_closes=True))
    got = await bench.ask()
    assert (got.body, got.headers["transfer-encoding"]) == (b"abcdef", "chunked")
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


async def test_an_engines_100_continue_is_not_the_answer(make_bench):
    bench = await make_bench(
        sends(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n",
              b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    )  # fmt: skip
    for _ in range(2):
        assert (await bench.ask()).body == b"x"


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_that_has_no_body_leaves_the_connection_usable(make_bench, status):
    bench = await make_bench(sends(f"HTTP/1.1 {status}\r\n\r\n".encode()))
    for _ in range(2):
        assert (await bench.ask()).status == int(status[:3])
    assert bench.engines[0].num_connections == 1


async def test_bytes_after_an_answer_never_reach_the_next_client(make_bench):
    one = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    poison = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    bench = await make_bench(sends(one + poison), reply(b"good"))
    answers = [await bench.ask() for _ in range(3)]
    assert b"evil" not in b"".join(one.body for one in answers)
    assert {one.body for one in answers[1:]} == {b"good"}


async def test_an_idle_engine_that_speaks_loses_its_connection(make_bench):
    hold = Hold()

    async def speaks_later(connection, seen):
        await reply()(connection, seen)
        await hold()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        assert await connection.reader.read() == b""
        raise ConnectionResetError

    bench = await make_bench(speaks_later)
    await bench.ask()
    hold.opened.set()
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 2)
    bench.engines[0].script = reply(b"good")
    assert (await bench.ask()).body == b"good"


async def test_answers_are_kept_apart_over_many_clients_and_few_connections(make_bench):
    bench = await make_bench(echo, echo)
    asked = [bench.begin(f"/v1/{n}", data=b"%d" % n) for n in range(200)]
    assert [one.body for one in await asyncio.gather(*asked)] == [
        b"/v1/%d|%d" % (n, n) for n in range(200)
    ]
    again = [bench.begin(f"/v1/{n}", data=b"") for n in range(50)]
    before = sum(engine.num_connections for engine in bench.engines)
    await asyncio.gather(*again)
    assert sum(engine.num_connections for engine in bench.engines) == before


# -- connections that close -----------------------------------------------------------------


async def test_an_idle_connection_closed_under_a_request_is_no_failure(make_bench):
    num = 0

    async def closes_under_the_second(connection, seen):
        nonlocal num
        num += 1
        if num == 2:
            connection.writer.close()
            raise ConnectionResetError
        await reply()(connection, seen)

    bench = await make_bench(closes_under_the_second)
    assert [(await bench.ask()).status for _ in range(2)] == [200, 200]
    stats = await bench.host.stats()
    assert (stats["engines"][0]["num_failures"], stats["num_retried"]) == (0, 0)
    first, second = bench.engines[0].seen[1:]
    assert first.body == second.body


async def test_an_engine_that_closes_fresh_connections_too_has_failed(make_bench):
    bench = await make_bench(reply())
    await bench.ask()
    bench.engines[0].script = die_unanswered()
    assert (await bench.ask()).status == 502
    assert len(bench.engines[0].seen) == 3


async def test_no_connection_left_is_a_503_and_no_engines_fault(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), settings=Settings(max_connections=1))
    first = bench.begin()
    await hold.entered.wait()
    second = await bench.ask()
    assert (second.status, "connections" in second.json["error"]["message"]) == (503, True)
    hold.opened.set()
    assert (await first).status == 200
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


async def test_an_idle_connection_makes_room_for_another_engine(make_bench):
    bench = await make_bench(reply(b"a"), reply(b"b"), settings=Settings(max_connections=1))
    assert {(await bench.ask()).body for _ in range(4)} == {b"a", b"b"}


async def test_a_request_past_its_deadline_is_a_504_that_names_the_engine(make_bench):
    hold = Hold()
    settings = Settings(request_timeout_s=0.3)
    bench = await make_bench(hold_then_reply(hold), settings=settings)
    got = await bench.ask()
    assert (got.status, "e-0" in got.json["error"]["message"]) == (504, True)
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 2)
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


# -- clients that leave, at every stage -----------------------------------------------------


async def waits(connection, seen):
    assert await connection.reader.read() == b""
    raise ConnectionResetError


async def begins_a_body(connection, seen):
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    await waits(connection, seen)


async def begins_a_stream(connection, seen):
    await connection.send(CHUNKED % b"text/event-stream", chunk(b"data: 1\n\n"))
    await waits(connection, seen)


async def floods(connection, seen):
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
    while True:
        await connection.send(b"x" * 65536)


@pytest.mark.parametrize("how", ["close", "reset", "half-close", "while pipelining"])
@pytest.mark.parametrize("stage", [waits, begins_a_body, begins_a_stream, floods])
async def test_a_client_that_leaves_ends_the_engines_work_within_a_tenth(make_bench, stage, how):
    bench = await make_bench(stage)
    reader, writer = await connect(bench, post(b"{}"))
    if stage is not waits:
        await reader.readuntil(b"\r\n\r\n")
    while not bench.engines[0].seen:
        await bench.host.stats()
    if how == "while pipelining":
        writer.write(post(b"{}") * 3)
        await writer.drain()
    began = time.perf_counter()
    if how == "reset":
        writer.transport.abort()
    elif how == "half-close":
        writer.write_eof()
    else:
        writer.close()
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 2)
    assert time.perf_counter() - began < 0.1
    assert (await bench.host.stats())["num_clients_left"] == 1
    assert bench.failures == []
    writer.close()


async def test_a_client_that_leaves_while_the_connection_is_made_costs_nothing(make_bench):
    bench = await make_bench()
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())
        await bench.host.set_members(2, [Member("e-0", Endpoint(*full.getsockname()))])
        _, writer = await connect(bench, post(b"{}"))
        while (await bench.host.stats())["num_in_flight"] != 1:
            pass
        writer.close()
        await bench.host.drained(1)
    assert bench.failures == []
