"""A connection to an engine: long replies are read in pieces, and long bodies written in pieces."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import Endpoint
from rollout.router.http.engine_connection import EngineConnection, OutgoingRequest
from rollout.router.http.head_cache import HeadCache
from rollout.router.http.read_pacing import ReadPacing
from tests.rollout.router.http.reply_handler import Handler

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b"".join(b"data: %d\n\n" % number for number in range(20_000))
REPLY = HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SENT = [b"POST / HTTP/1.1\r\n\r\n"]


class Transport:
    """What a connection asks of its socket."""

    def __init__(self):
        self.is_reading = True
        self.is_closed = False
        self.written = []

    def writelines(self, parts):
        self.written += parts

    def write(self, data):
        self.written.append(bytes(data))

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return self.is_closed

    def abort(self):
        self.is_closed = True


class Pool:
    """The owner of one connection."""

    def __init__(self):
        self.head_cache = HeadCache()
        self.read_pacing = ReadPacing(lambda rest: None)
        self.now_s = lambda: 0.0
        self.is_kept = False
        self.transport = Transport()
        self.connection = EngineConnection(self, Endpoint("127.0.0.1", 1))
        self.connection.connection_made(self.transport)

    def keep(self, connection):
        self.is_kept = True

    def forget(self, connection):
        pass

    def send(self, *parts, is_decoding=True):
        handler = Handler(is_decoding)
        self.is_kept = False
        outgoing = OutgoingRequest(Endpoint("127.0.0.1", 1), list(parts) or SENT, False)
        self.connection.send(handler, outgoing, 0.0)
        return handler


async def ticks(num=99):
    for _ in range(num):
        await asyncio.sleep(0)


async def test_a_long_reply_is_read_in_pieces_and_its_connection_used_again():
    pool = Pool()
    for _ in range(2):
        handler = pool.send()
        pool.connection.data_received(REPLY)
        assert len(handler.pieces) == 1
        assert handler.end is None
        assert not pool.transport.is_reading
        await ticks()
        assert (b"".join(handler.pieces), handler.end) == (BODY, "end")
        assert max(map(len, handler.pieces)) <= 1 << 15
        assert pool.is_kept
        assert pool.transport.is_reading


async def test_a_long_reply_of_few_events_is_read_at_once():
    pool, body = Pool(), b"data: %s\n\n" % (b"x" * (1 << 16))
    handler = pool.send()
    pool.connection.data_received(HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert (handler.pieces, handler.end) == ([body], "end")
    assert pool.is_kept
    assert pool.transport.is_reading


@pytest.mark.parametrize("num_missing", [0, 9])
async def test_what_came_before_the_end_of_a_connection_is_read(num_missing):
    pool = Pool()
    handler = pool.send()
    pool.connection.data_received(REPLY[: len(REPLY) - num_missing])
    pool.transport.is_closed = True
    pool.connection.connection_lost(None)
    assert handler.end is None
    await ticks()
    assert b"".join(handler.pieces) == BODY[: len(BODY) - max(0, num_missing - 7)]
    assert handler.end == ("broke off its reply: connection closed" if num_missing else "end")
    assert not pool.is_kept


async def test_what_follows_a_reply_that_was_read_in_pieces_ends_the_connection():
    pool = Pool()
    handler = pool.send()
    pool.connection.data_received(REPLY + REPLY)
    await ticks()
    assert handler.end is not None
    assert pool.transport.is_closed
    assert not pool.is_kept


async def test_a_request_that_was_dropped_gets_no_further_piece():
    pool = Pool()
    handler = pool.send()
    pool.connection.data_received(REPLY)
    pool.connection.drop()
    await ticks()
    assert (len(handler.pieces), handler.end) == (1, None)


async def test_of_a_reply_that_is_passed_on_the_socket_is_read_once_in_a_round():
    pool = Pool()
    handler = pool.send(is_decoding=False)
    pool.connection.data_received(REPLY[:-1000])
    assert not pool.transport.is_reading
    await ticks(2)
    assert pool.transport.is_reading
    pool.connection.data_received(REPLY[-1000:])
    assert b"".join(handler.pieces) == REPLY[len(HEAD) :]
    assert pool.is_kept


async def test_a_long_body_is_written_in_pieces_as_the_socket_takes_them():
    pool, body = Pool(), bytes(range(256)) * 4096 * 3
    pool.send(b"head", memoryview(body))
    await ticks(2)
    pool.connection.pause_writing()
    num = len(pool.transport.written)
    assert 1 < num < 5
    await ticks()
    assert len(pool.transport.written) == num
    pool.connection.resume_writing()
    await ticks()
    assert b"".join(pool.transport.written) == b"head" + body
    assert max(map(len, pool.transport.written)) <= 1 << 18


async def test_a_reply_before_the_end_of_the_body_ends_the_connection():
    pool = Pool()
    handler = pool.send(b"head", bytes(1 << 20))
    pool.connection.data_received(HEAD + b"0\r\n\r\n")
    assert handler.end == "end"
    assert pool.transport.is_closed
    assert not pool.is_kept
    await ticks()
    assert len(b"".join(pool.transport.written)) < 1 << 20


@given(
    st.lists(st.integers(1, len(REPLY) - 1), max_size=6),
    st.lists(st.sampled_from(["pause", "resume", "tick"]), max_size=12),
)
def test_any_cut_and_any_pause_give_the_reply(cuts, actions):
    async def run():
        pool = Pool()
        handler = pool.send()
        places = [0, *sorted(set(cuts)), len(REPLY)]
        parts = [REPLY[begin:end] for begin, end in pairwise(places)]
        waiting = list(actions)
        while parts:
            if pool.transport.is_reading:
                pool.connection.data_received(parts.pop(0))
            action = waiting.pop(0) if waiting else "resume"
            if action == "tick":
                await ticks(1)
            else:
                getattr(pool.connection, action)()
                await ticks(1)
        pool.connection.resume()
        await ticks()
        assert (b"".join(handler.pieces), handler.end) == (BODY, "end")
        assert pool.is_kept
        assert pool.transport.is_reading

    asyncio.run(run())
