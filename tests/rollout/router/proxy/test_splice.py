"""The spliced data path, with raw sockets on both sides."""

import asyncio
import socket
import time

import pytest

from engines.protocol import Endpoint
from rollout.router import Backend
from tests.rollout.router.conftest import router_config
from tests.rollout.router.raw import bodies, connect, post, response_to
from tests.rollout.router.stub_engine import (
    CHUNKED,
    Hold,
    chunk,
    die_unanswered,
    hold_then_reply,
    reply,
    stream,
)

CLOSE = b"Connection: close\r\n"


async def echo(connection, seen):
    await reply(seen.target.encode() + b"|" + seen.body)(connection, seen)


def sends(*parts: bytes, then_closes: bool = False):
    """Each part in a packet of its own, as far as a drained writer allows."""

    async def script(connection, seen):
        for part in parts:
            await connection.send(part)
            await asyncio.sleep(0)
        if then_closes:
            connection.writer.close()
            raise ConnectionResetError

    return script


# -- requests in any packets ----------------------------------------------------------------


async def test_a_request_may_arrive_byte_by_byte(make_bench):
    bench = await make_bench(echo)
    reader, writer = await connect(bench)
    for byte in post(b"abc", b"/v1/score", CLOSE):
        writer.write(bytes([byte]))
        await writer.drain()
    assert bodies(await reader.read()) == [b"/v1/score|abc"]
    writer.close()


async def test_a_chunked_request_split_within_its_framing_is_one_body(make_bench):
    bench = await make_bench(echo)
    head = (
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        + CLOSE
        + b"\r\n"
    )
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
    assert bodies(await reader.read()) == [b"/v1/score|abcde"]
    writer.close()


async def test_pipelined_requests_to_engines_and_to_the_router_keep_their_order(make_bench):
    bench = await make_bench(echo)
    whole = await response_to(
        bench,
        post(b"1", b"/v1/score"),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        post(b"2", b"/v1/rerank"),
        b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n",
        post(b"3", b"/v1/tokenize", CLOSE),
    )
    assert bodies(whole) == [
        b"/v1/score|1",
        b'{"status":"ok"}',
        b"/v1/rerank|2",
        b'{"detail":"Not Found"}',
        b"/v1/tokenize|3",
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


async def test_a_pipelined_request_may_arrive_in_pieces_during_the_response_before_it(make_bench):
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


async def test_a_thousand_refused_requests_in_one_packet_all_get_responses(make_bench):
    bench = await make_bench()
    await bench.host.set_gate("closed")
    whole = await response_to(bench, *[post(b"{}")] * 999, post(b"{}", extra=CLOSE))
    assert whole.count(b"HTTP/1.1 503") == 1000


async def test_garbage_behind_a_request_is_refused_after_its_response(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    reader, writer = await connect(bench, post(b"{}"))
    await hold.entered.wait()
    writer.write(b"\x00\x01 what\r\n\r\n")
    hold.opened.set()
    first, second = (await reader.read()).split(b"HTTP/1.1 ")[1:]
    assert (first[:3], second[:3]) == (b"200", b"400")
    writer.close()


async def test_garbage_in_the_packet_of_a_request_is_refused_after_its_response(make_bench):
    bench = await make_bench(reply())
    whole = await response_to(bench, post(b"{}"), b"\x00\x01 what\r\n\r\n")
    assert [part[:3] for part in whole.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]


@pytest.mark.parametrize(
    "head",
    [
        (
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na"
        ),
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1,1\r\n\r\na",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\na",
        (
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"
        ),
        (
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"
        ),
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\n X-Fold: 1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-A: a\rb\r\n\r\n",
        b"POST /generate HTTP/1.1\nHost: localhost\n\n\x00",
        b"POST /gen\xffrate HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT engine:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
async def test_framing_that_two_parsers_could_read_differently_reaches_no_engine(make_bench, head):
    bench = await make_bench(reply())
    whole = await response_to(bench, head)
    assert whole.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), whole
    assert bench.engines[0].seen == []


HOST = b"Host: localhost\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /generate HTTP/2.0\r\n" + HOST + b"\r\n", 400),
        (b"POST /generate HTTP/0.9\r\n" + HOST + b"\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost/flush_cache?\r\n\r\n", 400),
        (b"POST /v1/score HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (
            b"POST /v1/score HTTP/1.1\r\n" + HOST + 2 * b"Transfer-Encoding: chunked\r\n" + b"\r\n",
            400,
        ),
        (b"POST /v1/score HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/score HTTP/1.1\r\n" + HOST + 300 * b"a: b\r\n" + b"\r\n", 431),
        (b"POST /v1/score HTTP/1.1\r\n" + HOST + b"a: " + b"b" * 70_000 + b"\r\n\r\n", 431),
    ],
)
async def test_heads_that_another_server_may_read_differently_are_refused(make_bench, head, status):
    bench = await make_bench(reply())
    whole = await asyncio.wait_for(response_to(bench, head), 5)
    assert whole.startswith(b"HTTP/1.1 %d " % status), whole[:200]
    assert b"connection: close" in whole
    assert bench.engines[0].seen == []


async def test_a_host_is_not_needed_in_http_1_0(make_bench):
    bench = await make_bench(reply())
    whole = await response_to(bench, b"POST /v1/score HTTP/1.0\r\nContent-Length: 1\r\n\r\nx")
    assert whole.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("method", ["PUT", "GET", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_completions_take_only_post(make_bench, method, path):
    bench = await make_bench(reply())
    got = await bench.ask(path, method, json={})
    assert (got.status, got.headers["allow"]) == (405, "POST")
    assert bench.engines[0].seen == []


async def test_trailers_are_not_headers(make_bench):
    bench = await make_bench(reply())
    head = (
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        + CLOSE
        + b"\r\n"
    )
    trailers = b"Authorization: Bearer a\r\nX-Affinity: b\r\nContent-Type: c\r\n"
    assert b"200 OK" in await response_to(bench, head, b"1\r\na\r\n0\r\n", trailers, b"\r\n")
    (seen,) = bench.engines[0].seen
    assert {name.lower() for name, _ in seen.headers} == {"host", "content-length"}


@pytest.mark.parametrize("part", [b"x: %s\r\n" % (b"y" * 100), b"1;%s\r\na\r\n" % (b"y" * 90_000)])
async def test_trailers_and_extensions_of_chunks_without_end_are_refused(make_bench, part):
    bench = await make_bench(reply())
    head = (
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    )
    last = b"0\r\n" if part.startswith(b"x") else b""
    whole = await asyncio.wait_for(response_to(bench, head, last, part * (2000 if last else 2)), 10)
    assert whole.startswith(b"HTTP/1.1 431")
    assert bench.engines[0].seen == []


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize("is_split", [False, True])
async def test_an_offer_of_another_protocol_is_ignored(make_bench, offer, is_split):
    bench = await make_bench(echo)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: A\r\n" % offer
    reader, writer = await connect(bench)
    for part in (post(b"abc", b"/v1/score", upgrade), post(b"de", b"/v1/rerank", CLOSE + upgrade)):
        for piece in (part[:-2], part[-2:]) if is_split else (part,):
            writer.write(piece)
            await bench.host.stats()
    assert bodies(await asyncio.wait_for(reader.read(), 5)) == [b"/v1/score|abc", b"/v1/rerank|de"]
    writer.close()
    for seen in bench.engines[0].seen:
        assert (seen.header("upgrade"), seen.header("http2-settings")) == ([], [])


async def test_many_offers_in_one_packet_are_ignored(make_bench):
    bench = await make_bench()
    await bench.host.set_gate("closed")
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    whole = await response_to(bench, *[post(b"", extra=offer)] * 999, post(b"", extra=CLOSE))
    assert whole.count(b"HTTP/1.1 503") == 1000


@pytest.mark.parametrize("num_bytes", [70_000, 300_000])
async def test_a_long_body_and_a_piece_of_the_next_head_may_come_together(make_bench, num_bytes):
    bench = await make_bench(echo)
    second = post(b"second", b"/v1/rerank", CLOSE)
    reader, writer = await connect(bench, post(b"x" * num_bytes, b"/v1/score"), second[:40])
    await bench.host.stats()
    writer.write(second[40:])
    whole = await asyncio.wait_for(reader.read(), 5)
    assert (whole.count(b"200 OK"), whole.endswith(b"/v1/rerank|second")) == (2, True)
    writer.close()


async def test_a_head_without_end_is_refused(make_bench):
    bench = await make_bench(reply())
    reader, writer = await connect(bench, b"POST /generate HTTP/1.1\r\nX: " + b"x" * 70_000)
    assert (await reader.read()).startswith(b"HTTP/1.1 431")
    writer.close()


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_long_gets_a_413_that_arrives(make_bench, is_announced):
    bench = await make_bench(reply(), config=router_config(max_body_bytes=1000))
    body = b"x" * 2_000_000
    framed = post(body) if is_announced else None
    if framed is None:
        framed = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        framed += chunk(body) + b"0\r\n\r\n"
    whole = await response_to(bench, framed)
    assert whole.startswith(b"HTTP/1.1 413")
    assert b"over 1000 bytes" in whole
    assert bench.engines[0].seen == []


async def test_a_refused_client_that_expects_continue_does_not_get_it(make_bench):
    bench = await make_bench(reply())
    await bench.host.set_gate("closed")
    whole = await response_to(bench, post(b"{}", extra=b"Expect: 100-continue\r\n")[:-2])
    assert whole.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in whole


async def test_an_http_1_0_client_gets_a_stream_without_chunks_and_a_closed_connection(make_bench):
    bench = await make_bench(stream(b"data: 1\n\n", b"data: 2\n\n"))
    whole = await response_to(bench, post(b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b"transfer-encoding" not in whole
    assert bodies(whole) == [b"data: 1\n\ndata: 2\n\n"]


# -- replies in any packets -----------------------------------------------------------------


async def test_a_reply_may_arrive_byte_by_byte(make_bench):
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    bench = await make_bench(sends(*(bytes([byte]) for byte in whole)))
    for _ in range(2):
        assert (await bench.ask()).body == b"abc"
    assert bench.engines[0].num_connections == 1


async def test_a_chunked_reply_split_within_its_framing_is_passed_on(make_bench):
    parts = CHUNKED % b"x/y", b"3\r", b"\nab", b"c\r\n2;e=1\r\nde\r", b"\n0\r\n", b"X-T: 1\r\n\r\n"
    bench = await make_bench(sends(*parts))
    for _ in range(2):
        assert (await bench.ask()).body == b"abcde"
    assert bench.engines[0].num_connections == 1


async def test_a_reply_that_ends_with_its_connection_is_complete(make_bench):
    head = b"HTTP/1.1 200 OK\r\nX-A: 1\r\n\r\n"
    bench = await make_bench(sends(head, b"abc", b"def", then_closes=True))
    got = await bench.ask()
    assert (got.body, got.headers["transfer-encoding"]) == (b"abcdef", "chunked")
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


async def test_an_engines_100_continue_is_not_the_reply(make_bench):
    bench = await make_bench(
        sends(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n",
              b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    )  # fmt: skip
    for _ in range(2):
        assert (await bench.ask()).body == b"x"


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_a_reply_without_a_body_leaves_the_connection_usable(make_bench, status):
    bench = await make_bench(sends(f"HTTP/1.1 {status}\r\n\r\n".encode()))
    for _ in range(2):
        assert (await bench.ask()).status == int(status[:3])
    assert bench.engines[0].num_connections == 1


async def test_bytes_after_a_reply_never_reach_the_next_client(make_bench):
    entry = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    poison = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    bench = await make_bench(sends(entry + poison), reply(b"good"))
    responses = [await bench.ask() for _ in range(3)]
    assert b"evil" not in b"".join(entry.body for entry in responses)
    assert {entry.body for entry in responses[1:]} == {b"good"}


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 6, 7, 8, 9, 10, 11])  # of 4, the rest comes late
@pytest.mark.parametrize(
    "entry",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nok\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nok\r\n\r\n0\r\nx: y\r\n\r\n",
    ],
)
async def test_line_ends_after_a_reply_are_not_passed_on(make_bench, entry, cut):
    async def says(connection, seen):
        whole = entry + b"\r\n\r\n"
        await connection.send(whole[:-cut])
        await bench.host.stats()
        await connection.send(whole[-cut:])

    bench = await make_bench(says)
    kept = entry.partition(b"\r\n\r\n")[2]
    assert (await response_to(bench, post(b"{}", extra=CLOSE))).endswith(b"\r\n\r\n" + kept)
    await bench.ask()
    assert bench.engines[0].num_connections == 2


async def test_line_ends_at_the_end_of_a_body_are_part_of_it(make_bench):
    chunked = CHUNKED % b"x/y", b"8\r\n" + b"\r\n" * 4 + b"\r\n0\r", b"\n\r", b"\n"
    bench = await make_bench(sends(*chunked))
    for _ in range(2):
        assert (await bench.ask()).body == b"\r\n" * 4
    assert bench.engines[0].num_connections == 1


async def test_a_204_that_closes_is_not_used_again(make_bench):
    bench = await make_bench(sends(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"))
    for _ in range(2):
        assert (await bench.ask()).status == 204
    assert bench.engines[0].num_connections == 2


async def test_an_idle_engine_that_sends_data_loses_its_connection(make_bench):
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


async def test_replies_are_kept_apart_over_many_clients_and_few_connections(make_bench):
    bench = await make_bench(echo, echo)
    pending = [bench.begin(f"/v1/score?{n}", data=b"%d" % n) for n in range(200)]
    assert [entry.body for entry in await asyncio.gather(*pending)] == [
        b"/v1/score?%d|%d" % (n, n) for n in range(200)
    ]
    again = [bench.begin(f"/v1/score?{n}", data=b"") for n in range(50)]
    before = sum(engine.num_connections for engine in bench.engines)
    await asyncio.gather(*again)
    assert sum(engine.num_connections for engine in bench.engines) == before


# -- connections that close -----------------------------------------------------------------


async def test_an_idle_connection_closed_under_a_request_is_not_a_failure(make_bench):
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


async def test_no_free_connection_is_a_503_and_no_failure_of_an_engine(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), config=router_config(max_connections=1))
    first = bench.begin()
    await hold.entered.wait()
    second = await bench.ask()
    assert (second.status, "connections" in second.json["error"]["message"]) == (503, True)
    hold.opened.set()
    assert (await first).status == 200
    assert (await bench.host.stats())["engines"][0]["state"] == "serving"


async def test_an_idle_connection_makes_room_for_another_engine(make_bench):
    bench = await make_bench(reply(b"a"), reply(b"b"), config=router_config(max_connections=1))
    assert {(await bench.ask()).body for _ in range(4)} == {b"a", b"b"}


async def test_a_request_past_its_deadline_is_a_504_that_names_the_engine(make_bench):
    hold = Hold()
    config = router_config(request_timeout_s=0.3)
    bench = await make_bench(hold_then_reply(hold), config=config)
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
        await bench.host.set_members(2, [Backend("e-0", Endpoint(*full.getsockname()))])
        _, writer = await connect(bench, post(b"{}"))
        while (await bench.host.stats())["num_in_flight"] != 1:
            pass
        writer.close()
        await bench.host.drained(1)
    assert bench.failures == []
