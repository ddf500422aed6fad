"""Connections to engines, on which requests are written and answers handed on as they come.

Always true:
- A connection carries one request at a time, and is used again only if the answer before it was
  whole, nothing came after it and the engine keeps the connection.
- Whoever sent hears of each request exactly once how it ended: by the end of its answer, or by
  ``on_upstream_lost``; nothing after ``drop``.
- A request written onto a kept connection that the engine closes without a byte (it was closing
  it just then) goes out again on a fresh one, silently, if its sender still wants that.

Framing is read by httptools, never by hand, and not again in heads that came before.  Bodies are
passed on with the framing they have; only ``is_decoding`` senders get them without.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from engines.protocol import Endpoint
from rollout.router.headers import Headers
from rollout.router.heads import ReplyHead, known_by

if TYPE_CHECKING:
    from rollout.router.pool import Pool

MAX_HEAD_BYTES = 1 << 16
_JOINED_UP_TO_BYTES = 1 << 16
_RECONNECT_WITHIN_S = 1.0
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_WITHOUT_BODY = frozenset({204, 304})


class Sender(Protocol):
    """Whoever sends a request and takes its answer."""

    upstream: Sending | None
    is_decoding: bool

    def on_reply(self, head: ReplyHead, length: bytes, is_alone: bool) -> None:
        """The head of the answer.

        Args:
            length: of the body, in digits; empty if the head does not tell.
            is_alone: nothing came with it.
        """
        ...

    def on_reply_data(self, data: bytes, is_end: bool) -> None: ...
    def on_upstream_lost(self, why: str) -> None:
        """The engine did not answer, or not to the end."""
        ...

    def on_no_connection(self, why: str) -> None:
        """This process cannot open another connection; the engine has no part in it."""
        ...

    def may_reconnect(self) -> bool:
        """The engine may still be sent this request."""
        ...


class Sending(Protocol):
    """A request that has been sent, or waits for its connection."""

    def drop(self) -> None:
        """Its sender has lost interest: close the connection, which ends the engine's work."""
        ...

    def pause(self) -> None: ...
    def resume(self) -> None: ...


@dataclass(slots=True)
class Outgoing:
    """A request as it is written, and to whom."""

    endpoint: Endpoint
    parts: list[bytes]
    is_head: bool


class _Reader:
    """What httptools tells of an answer.  Without ``on_body``, so that no body is copied."""

    def __init__(self) -> None:
        self.headers: Headers = []
        self.is_over = False
        self.is_kept = False
        self.num_begun = 0
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.num_begun += 1
        self.headers = []
        self.is_over = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_kept = self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self.is_over = True


class _DecodingReader(_Reader):
    """The same, which also keeps the body."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        super().__init__()

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)


class Connection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pool: Pool, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.idle_since_s = 0.0
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._sender: Sender | None = None
        self._outgoing: Outgoing | None = None
        self._sent_at_s = 0.0
        self._is_reused = False
        self._is_paused = False
        self._raw = _Reader()
        self._decoding: _DecodingReader | None = None
        self._reader: _Reader = self._raw
        self._head = b""
        self._has_head = False
        self._is_until_close = False
        self._is_head_request = False

    # -- its sender's side ------------------------------------------------------------------

    def send(self, sender: Sender, outgoing: Outgoing, now_s: float) -> None:
        """Write a request; the connection is idle."""
        assert self._transport is not None
        sender.upstream = self
        self._sender = sender
        self._outgoing = outgoing
        self._sent_at_s = now_s
        if sender.is_decoding:
            self._decoding = self._decoding or _DecodingReader()
            self._reader = self._decoding
        else:
            self._reader = self._raw
        self._reader.num_begun = 0
        self._has_head = False
        self._is_head_request = outgoing.is_head
        parts = outgoing.parts
        if len(parts) > 1 and sum(map(len, parts)) <= _JOINED_UP_TO_BYTES:
            self._transport.write(b"".join(parts))
        else:
            for part in parts:
                self._transport.write(part)

    def drop(self) -> None:
        self._sender = None
        self.close()

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def pause(self) -> None:
        if not self._is_paused and self._transport is not None and self._sender is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- the engine's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not one by class

    def data_received(self, data: bytes) -> None:
        if self._sender is None:  # an idle engine has nothing to say
            self.close()
            return
        try:
            if self._has_head:
                self._read_body(data)
            else:
                self._read_head(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"answered what is no HTTP: {error}")

    def _read_head(self, data: bytes) -> None:
        if self._outgoing is not None:
            self._outgoing = None  # from the first byte on, it is never sent again
        if self._head:
            data = self._head + data
            self._head = b""
        key, length, end = known_by(data)
        known = self._pool.known_heads.get(key)
        if known is not None and len(data) - end == int(length) and not self._is_head_request:
            return self._pass_on_whole(known, length, data[end:])
        end = data.find(b"\r\n\r\n") + 4
        if end == 3:
            if len(data) > MAX_HEAD_BYTES:
                return self._fail(f"answered with a head of over {MAX_HEAD_BYTES} bytes")
            if not b"HTTP/1.".startswith(data[:7]):
                return self._fail("answered what is no HTTP")
            self._head = data
            return None
        head, rest = data[:end], data[end:]
        reader = self._reader
        reader.parser.feed_data(head)
        status: int = reader.parser.get_status_code()
        if reader.num_begun != 1 or end > MAX_HEAD_BYTES or _CONTROL.search(head):
            return self._fail("answered with a head that is no HTTP")
        if 100 <= status < 200 and status != 101:
            reader.num_begun = 0
            return self._read_head(rest) if rest else None
        if not 200 <= status <= 599:
            return self._fail(f"answered with status {status}")
        self._has_head = True
        return self._pass_on_head(status, rest, key)

    def _pass_on_whole(self, head: ReplyHead, length: bytes, body: bytes) -> None:
        """A whole answer with a head that came before."""
        sender = self._sender
        assert sender is not None
        self._has_head = True
        sender.on_reply(head, length, False)
        if sender.upstream is self:  # else it dropped the request on hearing this
            self._end(body, is_kept=True)

    def _pass_on_head(self, status: int, rest: bytes, key: bytes) -> None:
        sender, reader = self._sender, self._reader
        assert sender is not None
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
                    return self._fail("answered with a transfer encoding other than chunked")
        may_have_body = status not in _WITHOUT_BODY
        has_body = may_have_body and not self._is_head_request
        if is_chunked or not may_have_body:
            length = b""
        self._is_until_close = has_body and not is_chunked and not length
        head = ReplyHead(status, headers, is_chunked and has_body, self._is_until_close)
        if key and length and reader.is_kept:
            self._pool.known_heads.learn(key, head)
        sender.on_reply(head, length, has_body and not rest and not reader.is_over)
        if sender.upstream is not self:  # it dropped the request on hearing this
            return None
        if not has_body:
            # After an answer to HEAD the parser would wait for the body: take a new connection.
            self._end(b"", is_kept=reader.is_over and not rest)
        elif rest or reader.is_over:
            self._read_body(rest)
        return None

    def _read_body(self, data: bytes) -> None:
        reader, sender = self._reader, self._sender
        assert sender is not None
        if data:
            reader.parser.feed_data(data)
        if reader.num_begun != 1:
            return self._fail("sent more than its answer")
        if sender.is_decoding:
            assert isinstance(reader, _DecodingReader)
            data = reader.parts[0] if len(reader.parts) == 1 else b"".join(reader.parts)
            reader.parts.clear()
        if reader.is_over:
            self._end(data, is_kept=reader.is_kept)
        elif data:
            self._pool.pace.more_comes()
            sender.on_reply_data(data, False)
        return None

    def _end(self, data: bytes, *, is_kept: bool) -> None:
        sender, self._sender = self._sender, None
        assert sender is not None
        assert self._transport is not None
        sender.upstream = None
        if is_kept and not self._transport.get_write_buffer_size():
            self.resume()
            self._is_reused = True
            self._pool.keep(self)
        else:
            self.close()
        sender.on_reply_data(data, True)

    def _fail(self, why: str) -> None:
        sender, self._sender = self._sender, None
        self.close()
        if sender is not None:
            sender.upstream = None
            sender.on_upstream_lost(why)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        sender = self._sender
        if sender is None:
            return
        if self._has_head and self._is_until_close and error is None:
            return self._end(b"", is_kept=False)
        outgoing = self._outgoing
        is_closed_as_we_wrote = (
            outgoing is not None
            and self._is_reused
            and self._pool.now_s() - self._sent_at_s < _RECONNECT_WITHIN_S
        )
        if outgoing is not None and is_closed_as_we_wrote and sender.may_reconnect():
            self._sender = None
            self._pool.send_anew(sender, outgoing)
            return None
        broke_off = "broke off its reply" if self._has_head or self._head else "gave no answer"
        why = describe(error) if error is not None else "connection closed"
        return self._fail(f"{broke_off}: {why}")


def describe(error: BaseException) -> str:
    """The error in words; several of them print as nothing."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
