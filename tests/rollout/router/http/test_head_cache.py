"""Heads that came before are not parsed again; no behaviour differs."""

import asyncio

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.protocol import Endpoint
from rollout.router.http.head_cache import (
    MAX_HEADS,
    MAX_SEEN_ONCE,
    HeadCache,
    ReplyHead,
    RequestHead,
    head_key,
)
from rollout.router.http.headers import READ, cut_unread, split_unread
from rollout.router.http.routes import route_of
from tests.rollout.router.conftest import router_config
from tests.rollout.router.raw import bodies, connect, post

CLOSE = b"Connection: close\r\n"


def at_once(body=None, header=b""):
    """Head and body in one packet; by default the request's body."""

    async def script(connection, seen):
        response = seen.body if body is None else body
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n" % (len(response), header)
        await connection.send(head + (b"" if seen.method == "HEAD" else response))

    return script


echo = at_once()


async def make_known(reader, writer, request, response):
    """The second time it comes it is kept."""
    for _ in range(2):
        writer.write(request)
        await reader.readuntil(response)


class Read:
    """What httptools makes of some bytes."""

    def __init__(self, parser_class, data):
        self.headers = []
        self.error = ""
        parser = parser_class(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.error = str(error)

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))


LINES = st.sampled_from(
    [
        *(
            b"Content-Length: 12",
            b"content-length: 0007",
            b"content-length:3",
            b"Content-Length: 5 ",
        ),
        *(b"X-Content-Length: 12", b"x-length: 4", b"x: content-length: 3", b"content-length: x"),
        *(b"Transfer-Encoding: chunked", b"Host: a", b"x: 1\rcontent-length: 4", b" folded: 2"),
    ]
)


@given(st.lists(LINES, max_size=4), st.sampled_from([b"\r\n", b"\n"]), st.integers(0, 10**9 - 1))
def test_heads_of_one_key_are_read_alike_but_for_the_length(lines, newline, length):
    known = HeadCache()
    for parser, first in (
        (httptools.HttpRequestParser, b"POST /generate HTTP/1.1"),
        (httptools.HttpResponseParser, b"HTTP/1.1 200 OK"),
    ):
        head = newline.join([first, *lines]) + b"\r\n\r\n"
        key, digits, end = head_key(head)
        if not key:
            continue
        known.add(key, head, [])
        assert known.get(key) is None
        known.add(key, head, [])
        read = Read(parser, head)
        if known.get(key) is None or read.error:
            continue  # the router learns what httptools could read, and nothing else
        assert (end, [digits]) == (len(head), dict_of_lists(read.headers)[b"content-length"])
        at = key.find(b"ength: ") + len(b"ength: ")
        other = Read(parser, key[:at] + b"%d" % length + key[at:] + b"\r\n\r\n")
        assert not other.error
        assert other.headers == [
            (name, b"%d" % length if name == b"content-length" else value)
            for name, value in read.headers
        ]


UNREAD = st.sampled_from(["x-request-id", "Traceparent", "date", "x-length", "a", "b", "cookie"])
NAMES = st.one_of(
    UNREAD,
    st.sampled_from(
        [name.decode() for name in sorted(READ - {b"content-length", b"transfer-encoding"})]
    ),
)
PLAIN = st.one_of(
    st.text("ab:, ;=/1", max_size=6), st.sampled_from(["a", "on", "close", "close, a", "7"])
)
ODD = st.sampled_from(["\t", "a\x01", "\x80", "a\r\n folded: 2", "a\r\n\tb", "a\rb", "a\nb: c"])


USUAL = st.just(": ")


def lines_of(names, values=PLAIN, between=USUAL):
    def line(name, in_upper, between, value):
        return f"{name.title() if in_upper else name}{between}{value}".encode("latin-1")

    return st.builds(line, names, st.booleans(), between, values)


LINE = st.one_of(
    lines_of(NAMES),
    lines_of(UNREAD),
    lines_of(NAMES, st.one_of(PLAIN, ODD), st.sampled_from([": ", ":", ":  ", " : "])),
    lines_of(st.just("odd name")),
)


def made_of(head, unread, is_reply):
    """What an engine or a client gets of it, and what the router knows."""
    if is_reply:
        sent = head.for_client(b"", b"5", unread)
        return sorted(Read(httptools.HttpResponseParser, sent).headers)
    where = Endpoint("127.0.0.1", 1)
    sent = [head.for_engine(where, 5, key=key, unread=unread) for key in ("", "k")]
    lines = [sorted(Read(httptools.HttpRequestParser, one).headers) for one in sent]
    return *lines, head.affinity, head.asks_failover, head.contract_texts


def parsed_head(data, is_reply, is_split=True):
    read = Read(httptools.HttpResponseParser if is_reply else httptools.HttpRequestParser, data)
    headers = [header for header in read.headers if header[0] != b"content-length"]
    headers, others = split_unread(headers) if is_split else (headers, [])
    if is_reply:
        return ReplyHead(200, headers), others, read.error
    return RequestHead(b"POST", route_of(b"/generate"), headers), others, read.error


@given(
    is_reply=st.booleans(),
    known=st.lists(st.one_of(lines_of(NAMES), lines_of(NAMES), LINE), max_size=2),
    others=st.lists(st.tuples(st.integers(0, 3), LINE), min_size=1, max_size=2),
)
@example(False, [b"Connection: close, a"], [(1, b"a: 7")])
@example(False, [], [(0, b"a: \x01")])
@example(False, [b"a:x"], [(0, b"b: y")])
@example(False, [], [(0, b"x-length: 7")])
def test_a_head_made_of_a_similar_one_is_what_a_parser_reads(is_reply, known, others):
    cache = HeadCache()
    first = b"HTTP/1.1 200 OK" if is_reply else b"POST /generate HTTP/1.1"
    known = [*known, b"Content-Length: 5"]
    for number in range(3):
        data = b"\r\n".join([first, *known, b"x-id: %d" % number, b"", b""])
        head, unread, error = parsed_head(data, is_reply)
        if error or not (key := head_key(data)[0]):
            return
        cache.add(key, head, unread)
    for place, line in others:
        known.insert(min(place, len(known)), line)
    data = b"\r\n".join([first, *known, b"", b""])
    key, digits, _ = head_key(data)
    if not key or cache.get(key) is not None:
        return
    similar = cache.similar(key)
    if similar is not None:
        parsed, _, error = parsed_head(data, is_reply, is_split=False)
        assert not error
        assert digits == b"5"
        assert made_of(*similar, is_reply) == made_of(parsed, b"", is_reply)


def test_a_line_that_is_folded_stays_with_its_head():
    """httptools refuses these; what accepts them reads the next line as a part of the value."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\na: x\r\n folded: 2\r\nb: y\r\n\r\n"
    assert cut_unread(head) == (head.replace(b"b: y\r\n", b""), [b"b: y"])


def test_a_head_with_an_id_of_its_own_is_made_of_those_before():
    cache = HeadCache()

    def data(number):
        return (
            b"POST /generate HTTP/1.1\r\nHost: a\r\nX-Request-Id: %d\r\nX-Affinity: s\r\n"
            b"traceparent: 00-%d\r\nContent-Length: %d\r\n\r\n" % (number, number, number)
        )

    for number in range(2):
        cache.add(head_key(data(number))[0], *parsed_head(data(number), False)[:2])
    head, unread = cache.similar(head_key(data(77))[0])
    assert head.affinity == "s"
    assert unread == b"X-Request-Id: 77\r\ntraceparent: 00-77\r\n"
    other = data(77).replace(b"X-Affinity: s", b"X-Affinity: t")
    assert cache.similar(head_key(other)[0]) is None


@pytest.mark.parametrize(
    ("lines", "affinity"),
    [
        (["X-Session-ID: s"], "s"),
        (["X-SMG-Routing-Key: k"], "k"),
        (["X-SMG-Routing-Key: k", "X-Session-ID: s"], "s"),
        (["X-SMG-Routing-Key: k", "X-Affinity: a", "x-session-id: s"], "a"),
        (["X-Session-ID: s", "X-Session-ID: t"], "s"),
        (["X-Affinity: ", "X-Session-ID: s"], ""),
        (["X-Sessions-ID: s"], None),
    ],
)
def test_the_affinity_is_that_of_the_first_of_three_names(lines, affinity):
    def data(*more):
        rows = ["POST /generate HTTP/1.1", "Host: a", *lines, *more, "Content-Length: 4"]
        return "\r\n".join((*rows, "\r\n")).encode()

    head, *_ = parsed_head(data(), False)
    assert head.affinity == affinity
    cache = HeadCache()
    for number in range(2):
        one = data(f"X-Request-Id: {number}")
        cache.add(head_key(one)[0], *parsed_head(one, False)[:2])
    known = cache.similar(head_key(data("X-Request-Id: 7"))[0])
    assert known.head.affinity == affinity
    # An engine that has a use for them gets them, too.
    sent = known.head.for_engine(Endpoint("127.0.0.1", 1), 4, unread=known.unread).lower()
    assert all(line.lower().encode() in sent for line in lines)


def dict_of_lists(headers):
    return {name: [value for key, value in headers if key == name] for name, _ in headers}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\ncontent-length: 4\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1234567890\r\n\r\n",
        b"POST / HTTP/1.1\r\nX: %s\r\nContent-Length: 1\r\n\r\n" % (b"x" * 5000),
    ],
)
def test_data_that_is_not_a_complete_plain_head_has_no_key(data):
    assert head_key(data) == (b"", b"", 0)


def test_the_oldest_head_makes_room():
    known = HeadCache()
    heads = [b"POST /%d HTTP/1.1\r\nContent-Length: 1\r\n\r\n" % n for n in range(MAX_HEADS + 1)]
    keys = [head_key(head)[0] for head in heads]
    for key in keys:
        known.add(key, key, [])
        known.add(key, key, [])
    assert [known.get(key) for key in keys] == [None] + [(key, b"") for key in keys[1:]]


def test_heads_that_come_once_evict_no_other():
    known = HeadCache()
    keys = [head_key(b"POST /%d HTTP/1.1\r\nContent-Length: 1\r\n\r\n" % n)[0] for n in range(9999)]
    known.add(keys[0], keys[0], [])
    known.add(keys[0], keys[0], [])
    for key in keys[1:]:
        known.add(key, key, [])
    assert [known.get(key) for key in keys] == [(keys[0], b"")] + [None] * 9998
    assert len(known._seen_once) <= MAX_SEEN_ONCE


async def test_requests_that_differ_in_body_and_length_only_are_all_themselves(make_bench):
    bench = await make_bench(echo)
    reader, writer = await connect(bench)
    sent = [b"%d" % number * (1 + number % 3) for number in range(8)]
    for body in sent[:-1]:
        writer.write(post(body, b"/v1/score"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.lower().count(b"content-length: %d\r\n" % len(body)) == 1
        assert (await reader.readexactly(len(body))) == body
    writer.write(post(sent[-1], b"/v1/score", CLOSE))
    assert bodies(await reader.read()) == sent[-1:]
    assert [seen.body for seen in bench.engines[0].seen] == sent
    assert [seen.header("content-length") for seen in bench.engines[0].seen] == [
        [str(len(body))] for body in sent
    ]
    assert bench.engines[0].num_connections == 1
    writer.close()


@pytest.mark.parametrize("split_at", [10, 60, -1, -4])
async def test_a_cached_head_may_arrive_in_pieces_or_with_more_behind_it(make_bench, split_at):
    bench = await make_bench(echo)
    reader, writer = await connect(bench)
    await make_known(reader, writer, post(b"first", b"/v1/score"), b"first")
    twice = post(b"second", b"/v1/score") + post(b"third", b"/v1/score", CLOSE)
    for part in (twice[:split_at], twice[split_at:]):
        writer.write(part)
        await writer.drain()
        await bench.host.stats()
    assert bodies(await reader.read()) == [b"second", b"third"]
    writer.close()


async def test_a_header_that_only_ends_like_the_length_is_passed_on_as_it_comes(make_bench):
    bench = await make_bench(echo)
    reader, writer = await connect(bench)
    for number in range(3):
        writer.write(
            b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\n"
            b"X-Wavelength: %d\r\nContent-Length: 2\r\n\r\nab" % number
        )
        await reader.readuntil(b"\r\n\r\nab")
    assert [seen.header("x-wavelength") for seen in bench.engines[0].seen] == [["0"], ["1"], ["2"]]
    writer.close()


async def test_a_head_without_the_key_is_refused_as_often_as_it_comes(make_bench):
    bench = await make_bench(echo, config=router_config(client_key="secret"))
    with_key = b"Authorization: Bearer secret\r\n"
    reader, writer = await connect(bench)
    for extra, status in 2 * [(b"", b"401"), (with_key, b"200"), (with_key, b"200")]:
        writer.write(post(b"ab", b"/v1/score", extra))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    assert not any(seen.header("authorization") for seen in bench.engines[0].seen)
    writer.close()


async def test_a_cached_head_switches_features_on_each_time(make_bench):
    bench = await make_bench(echo)
    on = {"x-token-failover": "on"}
    for _ in range(3):
        await bench.ask(json={"input_ids": [1]}, headers=on)
        await bench.ask(json={"input_ids": [1]})
    assert [seen.json.get("stream", False) for seen in bench.engines[0].seen] == 3 * [True, False]


async def test_the_same_head_means_another_engine_and_version_later(make_bench):
    bench = await make_bench(at_once(b"same"), at_once(b"same"))
    for version in (7, 8):
        await bench.host.set_gate("open", weight_version=version)
        responses = [await bench.ask() for _ in range(4)]
        assert {entry.headers["x-engine-id"] for entry in responses} == {"e-0", "e-1"}
        assert {entry.headers["x-weight-version"] for entry in responses} == {str(version)}
        assert {entry.body for entry in responses} == {b"same"}


async def test_bytes_after_a_cached_reply_never_reach_the_next_client(make_bench):
    async def script(connection, seen):
        surplus = b"HTTP/1.1 200 OK\r\n" if seen.body == b"odd" else b""
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood" + surplus)

    bench = await make_bench(script)
    pending = [await bench.ask("/v1/score", data=body) for body in (b"a", b"b", b"odd")]
    assert [entry.status for entry in pending] == [200, 200, 502]
    await bench.host.set_members(2, [bench.member(0)])
    assert (await bench.ask("/v1/score", data=b"c")).body == b"good"
    assert bench.engines[0].num_connections == 2


async def test_a_body_that_looks_like_a_cached_request_is_not_a_request(make_bench):
    """A refused request's body arrives after its response."""
    bench = await make_bench(echo)
    known = post(b"inner", b"/v1/score")
    reader, writer = await connect(bench)
    await make_known(reader, writer, known, b"inner")
    await bench.host.set_gate("closed")
    head, _ = post(b"x" * len(known), b"/v1/embeddings").split(b"x" * len(known))
    writer.write(head)
    refused = await reader.readuntil(b"\r\n\r\n")
    assert b" 503 " in refused
    await bench.host.set_gate("open")
    writer.write(known)
    await bench.host.stats()
    writer.write(post(b"last", b"/v1/responses", CLOSE))
    assert (await reader.read()).endswith(b"last")
    assert [seen.target for seen in bench.engines[0].seen] == [
        "/v1/score",
        "/v1/score",
        "/v1/responses",
    ]
    writer.close()


async def test_data_within_a_head_that_looks_like_a_cached_request_is_not_a_request(make_bench):
    bench = await make_bench(echo)
    known = post(b"inner", b"/v1/score")
    reader, writer = await connect(bench)
    await make_known(reader, writer, known, b"inner")
    writer.write(b"POST /v1/embeddings HTTP/1.1\r\n")
    await writer.drain()
    await bench.host.stats()
    writer.write(known)
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    assert len(bench.engines[0].seen) == 2
    writer.close()


async def test_a_connection_that_its_engine_will_close_is_not_used_again(make_bench):
    bench = await make_bench(at_once(header=CLOSE))
    for _ in range(6):
        assert (await bench.ask("/v1/score")).status == 200
    assert bench.engines[0].num_connections == 6


async def test_a_body_sent_after_a_reply_to_head_is_not_passed_on(make_bench):
    async def script(connection, seen):
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfour")

    bench = await make_bench(script)
    for _ in range(2):
        await bench.ask("/v1/score")
    reader, writer = await connect(
        bench, b"HEAD /v1/score HTTP/1.1\r\nHost: localhost\r\n" + CLOSE + b"\r\n"
    )
    assert (await reader.read()).endswith(b"\r\n\r\n")
    writer.close()


async def test_a_reply_to_head_has_the_length_and_no_body_though_its_head_is_cached(make_bench):
    bench = await make_bench(at_once(b"four"))
    for _ in range(3):
        assert (await bench.ask("/v1/score")).body == b"four"
    response = await asyncio.wait_for(bench.ask("/v1/score", method="HEAD"), 5)
    assert (response.headers["content-length"], response.body) == ("4", b"")
    assert (await bench.ask("/v1/score")).body == b"four"


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_a_length_that_does_not_hold_is_not_passed_on(make_bench, status):
    async def script(connection, seen):
        await connection.send(f"HTTP/1.1 {status}\r\nContent-Length: 9\r\n\r\n".encode())

    bench = await make_bench(script)
    for _ in range(3):
        response = await bench.ask("/v1/score")
        assert "content-length" not in response.headers
        assert response.status == int(status[:3])


async def test_an_answer_with_a_length_and_chunks_is_a_502_as_often_as_it_comes(make_bench):
    both = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"

    async def script(connection, seen):
        await connection.send(both)

    bench = await make_bench(script)
    for epoch in range(2, 5):
        assert (await bench.ask("/v1/score")).status == 502
        await bench.host.set_members(epoch, [bench.member(0)])
