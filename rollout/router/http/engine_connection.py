"""Connections to engines: they write requests and pass replies on as they arrive.

Always true:
- A connection carries one request at a time, and is used again only if the reply before was
  complete, nothing came after it and the engine keeps the connection.
- The handler of a request learns exactly once how it ended: by the end of the reply, or by
  ``on_engine_lost``; it gets no call after ``drop``.
- If the engine closes a kept connection without sending a byte (it was closing while the request
  was written), the request is sent again on a new connection, unless its handler refuses.
- An error in a handler ends that handler's request, and is not counted as the engine's.

- A long body is written in pieces, and a decoded reply of many events is read in pieces; between
  two of them the other connections have their turn.

httptools reads the framing, except in heads that were read before.  Bodies are passed on with the
framing they have; only ``is_decoding`` handlers get them without.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from engines.protocol import Endpoint
from engines.protocol.plain_text import describe
from rollout.router.http.fast_json import Data
from rollout.router.http.head_cache import HeadCache, Known, ReplyHead, head_key
from rollout.router.http.headers import Headers, header_lines, split_unread
from rollout.router.http.read_pacing import ReadPacing

MAX_HEAD_BYTES = 1 << 16
_RECONNECT_WITHIN_S = 1.0
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_WITHOUT_BODY = frozenset({204, 304})
_LINE_END = (b"\r", b"\n")
_CR = 13
MANY_BYTES = 1 << 17
"""Most bytes of one read; then the other connections have their turn."""
_MOST_WRITTEN = 1 << 18
_MOST_READ = 1 << 15
# Each event takes time to read, and its bytes take hardly any.
_MANY_LINES = 128


class ReplyHandler(Protocol):
    """Takes the engine's reply to one request."""

    upstream: SentRequest | None
    is_decoding: bool

    def on_reply(self, head: ReplyHead, length: bytes, unread: bytes, is_alone: bool) -> None:
        """The head of the reply.

        Args:
            length: of the body, in digits, or empty if the head does not state it.
            unread: lines of headers that the router passes on.
            is_alone: no data of the body came with it.
        """
        ...

    def on_reply_data(self, data: bytes, is_end: bool) -> None: ...
    def on_engine_lost(self, why: str, *, was_sent: bool = True) -> None:
        """The engine did not reply, or not completely; or there was no connection to it."""
        ...

    def on_no_connection(self, why: str) -> None:
        """This process cannot open another connection; the engine did not fail."""
        ...

    def may_reconnect(self) -> bool:
        """The request may be sent to this engine again."""
        ...

    def on_router_error(self, error: BaseException) -> None:
        """The router failed while it handled the reply; the engine did not."""
        ...


class SentRequest(Protocol):
    """A request that was sent, or waits for its connection."""

    def drop(self) -> None:
        """Close the connection, which ends the engine's work on it."""
        ...

    def pause(self) -> None: ...
    def resume(self) -> None: ...


@dataclass(slots=True)
class OutgoingRequest:
    """A request as it is written, and the engine it goes to."""

    endpoint: Endpoint
    parts: list[Data]
    is_head: bool


class ConnectionOwner(Protocol):
    """The pool, as its connections call it."""

    head_cache: HeadCache[ReplyHead]
    read_pacing: ReadPacing
    now_s: Callable[[], float]

    def keep(self, connection: EngineConnection) -> None: ...
    def forget(self, connection: EngineConnection) -> None: ...
    def send_on_new_connection(self, handler: ReplyHandler, outgoing: OutgoingRequest) -> None: ...


class _ReplyReader:
    """What httptools reads of a reply.  There is no ``on_body``, so no body is copied."""

    def __init__(self) -> None:
        self.headers: Headers = []
        self.is_finished = False
        self.stays_open = False
        self.num_begun = 0
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.num_begun += 1
        self.headers = []
        self.is_finished = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.stays_open = self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self.is_finished = True


class _DecodingReplyReader(_ReplyReader):
    """The same, and it keeps the body."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        super().__init__()

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)


class EngineConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pool: ConnectionOwner, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.idle_since_s = 0.0
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._handler: ReplyHandler | None = None
        self._outgoing: OutgoingRequest | None = None
        self._sent_at_s = 0.0
        self._is_reused = False
        self._is_paused = False
        self._is_full = False  # what was written has not left this process
        self._unwritten: deque[memoryview] = deque()
        self._unread = b""
        self._end_of_data: tuple[Exception | None] | None = None  # behind what is unread
        self._raw = _ReplyReader()
        self._decoding: _DecodingReplyReader | None = None
        self._reader: _ReplyReader = self._raw
        self._head = b""
        self._has_head = False
        self._is_until_close = False
        self._is_head_request = False
        self._num_left = 0  # bytes of the body, where the head states its length
        self._last = b""  # what came last of a body in chunks

    # -- the request -------------------------------------------------------------------------

    def send(self, handler: ReplyHandler, outgoing: OutgoingRequest, now_s: float) -> None:
        """Write a request; the connection is idle."""
        assert self._transport is not None
        handler.upstream = self
        self._handler = handler
        self._outgoing = outgoing
        self._sent_at_s = now_s
        if handler.is_decoding:
            self._decoding = self._decoding or _DecodingReplyReader()
            self._reader = self._decoding
        else:
            self._reader = self._raw
        self._reader.num_begun = 0
        self._has_head = False
        self._is_head_request = outgoing.is_head
        if max(map(len, outgoing.parts)) > _MOST_WRITTEN:
            self._unwritten = deque(_pieces(outgoing.parts))
            self._write_on()
        else:
            self._transport.writelines(outgoing.parts)

    def _write_on(self) -> None:
        if not self._unwritten or self._is_full or not self.is_usable:
            return
        assert self._transport is not None
        self._transport.write(self._unwritten.popleft())
        if self._unwritten:
            asyncio.get_running_loop().call_soon(self._handle, self._write_on)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._handle(self._write_on)

    def _handle(self, step: Callable[[], None]) -> None:
        """Do what the loop has called for; an error in it ends the request."""
        handler = self._handler
        try:
            step()
        except Exception as error:
            if handler is None:
                self.close()
            else:
                self._on_router_error(handler, error)

    def drop(self) -> None:
        self._handler = None
        self.close()

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_something_to_read(self) -> bool:
        """Whether an idle connection has bytes that nothing has asked for, or its end."""
        assert self._transport is not None
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def pause(self) -> None:
        if not self._is_paused and self._transport is not None and self._handler is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            if self._unread:
                asyncio.get_running_loop().call_soon(self._handle, self._read_on)
            elif not self._transport.is_closing():
                self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- the engine's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not one by class

    def data_received(self, data: bytes) -> None:
        handler = self._handler
        if handler is None:  # an idle engine must not send
            self.close()
            return
        try:
            if self._unread:
                self._unread += data
            elif len(data) > _MOST_READ and handler.is_decoding and _has_many_lines(data):
                assert self._transport is not None
                self._transport.pause_reading()
                self._unread = data
                self._read_on()
            else:
                if len(data) > MANY_BYTES:  # the loop would read on until the socket is empty
                    assert self._transport is not None
                    self._transport.pause_reading()
                    asyncio.get_running_loop().call_soon(self._handle, self._read_more)
                self._parse(data)
        except Exception as error:
            self._on_router_error(handler, error)

    def _read_more(self) -> None:
        if not self._is_paused and not self._unread and self.is_usable:
            assert self._transport is not None
            self._transport.resume_reading()

    def _read_on(self) -> None:
        """Read a piece of what has arrived."""
        handler = self._handler
        if self._is_paused or not self._unread or handler is None:
            return
        data, self._unread = self._unread[:_MOST_READ], self._unread[_MOST_READ:]
        self._read_more()
        self._parse(data)
        if self._handler is None:
            self._unread = b""
        elif self._unread:
            asyncio.get_running_loop().call_soon(self._handle, self._read_on)
        elif self._end_of_data is not None:
            self.connection_lost(*self._end_of_data)

    def _parse(self, data: bytes) -> None:
        try:
            if self._has_head:
                self._read_body(data)
            else:
                self._read_head(data)
        except httptools.HttpParserCallbackError:
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"sent a reply that is not HTTP: {error}")

    def _on_router_error(self, handler: ReplyHandler, error: Exception) -> None:
        if self._handler is None or self._handler is handler:  # else another request has it now
            self.drop()
        is_of_parser = isinstance(error, httptools.HttpParserCallbackError)
        cause = error.__context__ if is_of_parser else None
        handler.on_router_error(cause or error)

    def _read_head(self, data: bytes) -> None:
        if self._outgoing is not None:
            self._outgoing = None  # after the first byte of a reply it is never sent again
        if self._head:
            data = self._head + data
            self._head = b""
        key, length, end = head_key(data)
        known = self._pool.head_cache.get(key)
        if known is None and key:
            known = self._pool.head_cache.similar(key)
        if known is not None and len(data) - end == int(length) and not self._is_head_request:
            return self._pass_on_whole(known, length, data[end:])
        if not b"HTTP/1.".startswith(data[:7]):
            return self._fail("sent a reply that is not HTTP")
        end = data.find(b"\r\n\r\n") + 4
        if end == 3:
            if len(data) > MAX_HEAD_BYTES:
                return self._fail(f"sent a head of over {MAX_HEAD_BYTES} bytes")
            self._head = data
            return None
        head, rest = data[:end], data[end:]
        reader = self._reader
        reader.parser.feed_data(head)
        status: int = reader.parser.get_status_code()
        if reader.num_begun != 1 or end > MAX_HEAD_BYTES or _CONTROL.search(head):
            return self._fail("sent a head that is not HTTP")
        if 100 <= status < 200 and status != 101:
            reader.num_begun = 0
            return self._read_head(rest) if rest else None
        if not 200 <= status <= 599:
            return self._fail(f"replied with status {status}")
        self._has_head = True
        return self._pass_on_head(status, rest, key)

    def _pass_on_whole(self, known: Known[ReplyHead], length: bytes, body: bytes) -> None:
        """A complete reply whose head was read before."""
        handler = self._handler
        assert handler is not None
        self._has_head = True
        handler.on_reply(known.head, length, known.unread, False)
        if handler.upstream is self:  # else it has dropped the request
            self._end(body, stays_open=True)

    def _pass_on_head(self, status: int, rest: bytes, key: bytes) -> None:
        handler, reader = self._handler, self._reader
        assert handler is not None
        headers, length, is_chunked = [], b"", False
        for header in reader.headers:
            name, value = header
            if name == b"content-length":
                length = value
                continue
            headers.append(header)
            if name == b"transfer-encoding":
                is_chunked = True
                if value.lower() != b"chunked":
                    return self._fail("replied with a transfer encoding other than chunked")
        may_have_body = status not in _WITHOUT_BODY
        has_body = may_have_body and not self._is_head_request
        if is_chunked or not may_have_body:
            length = b""
        self._is_until_close = has_body and not is_chunked and not length
        self._num_left = int(length) if length else -1
        self._last = b""
        read, others = split_unread(headers)
        head = ReplyHead(status, read, is_chunked and has_body, self._is_until_close)
        if key and length and reader.stays_open:
            self._pool.head_cache.add(key, head, others)
        is_alone = has_body and not rest and not reader.is_finished
        handler.on_reply(head, length, header_lines(others), is_alone)
        if handler.upstream is not self:  # it has dropped the request
            return None
        if not has_body:
            # After a reply to HEAD the parser would wait for the body: take a new connection.
            self._end(b"", stays_open=reader.is_finished and reader.stays_open and not rest)
        elif rest or reader.is_finished:
            self._read_body(rest)
        return None

    def _read_body(self, data: bytes) -> None:
        reader, handler = self._reader, self._handler
        assert handler is not None
        if data:
            reader.parser.feed_data(data)
        if reader.num_begun != 1:
            return self._fail("sent more than its reply")
        num_surplus = 0
        if reader.is_finished:
            if num_surplus := self._count_surplus(data):
                data = data[:-num_surplus]
        elif self._num_left >= 0:
            self._num_left -= len(data)
        elif data[0] > _CR:
            self._last = data
        else:  # it may be a part of the end, after other parts
            self._last = self._last[-4:] + data
        if handler.is_decoding:
            assert isinstance(reader, _DecodingReplyReader)
            data = reader.parts[0] if len(reader.parts) == 1 else b"".join(reader.parts)
            reader.parts.clear()
        if reader.is_finished:
            self._end(data, stays_open=reader.stays_open and not num_surplus)
        elif data:
            self._pool.read_pacing.reply_continues()
            handler.on_reply_data(data, False)
        return None

    def _count_surplus(self, data: bytes) -> int:
        """The line ends after the reply, which the parser skips, in its last ``data``.

        Chunks end with two line ends after a line that is not empty.
        """
        if self._num_left >= 0:
            return max(0, len(data) - self._num_left)
        whole = self._last[-4:] + data
        if whole[-5:-4] not in _LINE_END:
            return 0
        return len(whole) - len(whole.rstrip(b"\r\n")) - 4

    def _end(self, data: bytes, *, stays_open: bool) -> None:
        handler, self._handler = self._handler, None
        assert handler is not None
        assert self._transport is not None
        handler.upstream = None
        is_used = self._end_of_data or self._unread or self._unwritten
        if stays_open and not is_used and not self._transport.get_write_buffer_size():
            self.resume()
            self._is_reused = True
            self._pool.keep(self)
        else:
            self.close()
        handler.on_reply_data(data, True)

    def _fail(self, why: str) -> None:
        handler, self._handler = self._handler, None
        self.close()
        if handler is not None:
            handler.upstream = None
            handler.on_engine_lost(why)

    def connection_lost(self, error: Exception | None) -> None:
        handler = self._handler
        self._unwritten.clear()
        try:
            self._pool.forget(self)
            if handler is None:
                self._unread = b""
            elif self._unread:
                self._end_of_data = (error,)
            else:
                self._end_lost(handler, error)
        except Exception as router_error:
            self._pool.forget(self)
            if handler is not None:
                self._on_router_error(handler, router_error)

    def _end_lost(self, handler: ReplyHandler, error: Exception | None) -> None:
        """The connection was lost under a request."""
        if self._has_head and self._is_until_close and error is None:
            return self._end(b"", stays_open=False)
        outgoing = self._outgoing
        is_closed_as_we_wrote = (
            outgoing is not None
            and self._is_reused
            and self._pool.now_s() - self._sent_at_s < _RECONNECT_WITHIN_S
        )
        if outgoing is not None and is_closed_as_we_wrote and handler.may_reconnect():
            self._handler = None
            self._pool.send_on_new_connection(handler, outgoing)
            return None
        broke_off = "broke off its reply" if self._has_head or self._head else "sent no reply"
        why = describe(error, with_type=True) if error is not None else "connection closed"
        return self._fail(f"{broke_off}: {why}")


def _has_many_lines(data: bytes) -> bool:
    end = -1  # a search is faster than a count, where lines are long
    return all((end := data.find(b"\n", end + 1)) >= 0 for _ in range(_MANY_LINES))


def _pieces(parts: list[Data]) -> Iterator[memoryview]:
    for part in parts:
        whole = memoryview(part)
        for at in range(0, len(whole), _MOST_WRITTEN):
            yield whole[at : at + _MOST_WRITTEN]
