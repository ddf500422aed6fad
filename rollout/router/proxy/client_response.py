"""The response to one request, as it is written to the client.

Always true:
- A client gets one complete response, or a cut connection, or (in an event stream) an error event.
- The head of an engine's reply is written together with the first bytes that follow it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout.router.http.fast_json import Data
from rollout.router.http.head_cache import ReplyHead, RequestHead
from rollout.router.http.headers import Headers, reply_head, status_line
from rollout.router.http.responses import RouterResponse

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
_LAST_CHUNK = b"0\r\n\r\n"
_BETWEEN_EVENTS = (b"\n\n\r\n", b"\r\n\r\n\r\n")


class ClientWriter(Protocol):
    """The connection a request came on."""

    is_write_paused: bool

    def write(self, *parts: Data) -> None:
        """Write these parts, which are neither joined nor copied."""
        ...

    def finish(self, *, is_closing: bool) -> None:
        """The response is complete; the next request on this connection can start."""
        ...

    def cut(self, *, is_flushed: bool) -> None:
        """The response cannot be completed: close, after what was written or at once."""
        ...

    def finish_unread(self) -> None:
        """The response is complete and the rest of the request is not needed: close."""
        ...


@dataclass(eq=False, slots=True)
class ClientResponse:
    """The response to a request over HTTP with this head.

    Attributes:
        client: the connection it is written to.
        is_last: the connection closes after it.
    """

    client: ClientWriter
    _head: RequestHead
    has_begun: bool = False
    is_last: bool = False
    _pending_head: bytes = b""
    _adds_chunks: bool = False
    _is_event_stream: bool = False
    _is_close_delimited: bool = False
    _tail: bytes = b""

    def __post_init__(self) -> None:
        self.is_last = self._head.is_last

    @property
    def is_write_paused(self) -> bool:
        return self.client.is_write_paused

    def send_continue(self) -> None:
        self.client.write(_CONTINUE)

    # -- an engine's reply, passed on as it is ----------------------------------------------

    def begin(self, reply: ReplyHead, length: bytes, unread: bytes, signed: bytes) -> None:
        """Keep the head of an engine's reply until ``pass_on`` writes it; ``signed`` as below."""
        extra = [unread]
        if reply.is_chunked or reply.is_until_close:
            self._is_event_stream = _is_event_stream(reply.headers)
            self._is_close_delimited = self._head.is_http_1_0
            if self._is_close_delimited:
                self.is_last = True
            else:
                self._adds_chunks = reply.is_until_close
                extra.append(_CHUNKED)
        if self.is_last:
            extra.append(_CLOSE)
        self._pending_head = reply.for_client(signed, length, *extra)

    def discard_head(self) -> None:
        """The engine of the head that was kept is lost."""
        self._pending_head = b""

    def pass_on(self, data: bytes, *, is_end: bool) -> None:
        """Write data of the engine's reply."""
        if self._adds_chunks:
            data = chunk(data) if data else b""
            if is_end:
                data += _LAST_CHUNK
        self._tail = data
        head, self._pending_head = self._pending_head, b""
        if head or data:
            self.client.write(head, data)
            self.has_begun = True

    # -- a response that the router composes ------------------------------------------------

    def send_whole(
        self, status: int, content_type: bytes, body: Sequence[Data], signed: bytes
    ) -> None:
        lines = (status_line(status), content_type, sum(map(len, body)), signed)
        close = _CLOSE if self.is_last else b""
        head = b"%scontent-type: %s\r\ncontent-length: %d\r\n%s%s\r\n" % (*lines, close)
        self.client.write(head, *body)
        self.has_begun = True

    def send_events(self, events: bytes, signed: bytes, *, is_end: bool = False) -> None:
        """Write the events, with the stream's head before the first."""
        if self._head.is_http_1_0:
            self._is_close_delimited = self.is_last = True
            data = events
        else:
            data = chunk(events) + (_LAST_CHUNK if is_end else b"")
        if not self.has_begun:
            lines = [signed] if self._is_close_delimited else [signed, _CHUNKED]
            lines += [_CLOSE] if self.is_last else []
            data = reply_head(200, [_EVENT_STREAM], *lines) + data
        self.client.write(data)
        self.has_begun = self._is_event_stream = True

    # -- how it ends ------------------------------------------------------------------------

    def finish(self) -> None:
        self.client.finish(is_closing=self.is_last)

    def send(self, response: RouterResponse, *, is_unread: bool) -> None:
        is_last = self.is_last or is_unread
        is_head = self._head.method == b"HEAD"
        self.client.write(response.to_bytes(is_head=is_head, is_last=is_last))
        if is_unread:
            self.client.finish_unread()
        else:
            self.client.finish(is_closing=is_last)

    def break_off(self, response: RouterResponse) -> None:
        """End a response that has begun and cannot be completed.

        An event stream that stands between two events gets one more with the error, as SGLang
        does.  Anything else is cut, so that no client takes it for complete.
        """
        is_between = not self._tail or self._tail.endswith(_BETWEEN_EVENTS)
        if self._is_event_stream and not self._is_close_delimited and is_between:
            event = b"data: " + json.dumps(response.payload).encode() + b"\n\n"
            self.client.write(chunk(event) + _LAST_CHUNK)
            self.client.finish(is_closing=self.is_last)
        else:
            self.cut()

    def cut(self, *, is_now: bool = False) -> None:
        """Close the connection, after what was written or now."""
        self.client.cut(is_flushed=not (is_now or self._is_close_delimited))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _is_event_stream(headers: Headers) -> bool:
    is_event_stream = False
    for name, value in headers:
        if name == b"content-encoding":
            return False
        if name == b"content-type":
            is_event_stream = value.startswith(b"text/event-stream")
    return is_event_stream
