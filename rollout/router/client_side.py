"""One request as its client sees it: how it comes, and the answer it gets.

Always true:
- A client gets one whole answer, or a cut connection, or (in an event stream) an error event.
- Nothing is written before ``start``: until then answers to earlier requests are on their way.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from rollout.router import answers
from rollout.router.heads import RequestHead
from rollout.router.upstream import Sending

if TYPE_CHECKING:
    from rollout.router.proxy import Proxy

_JOINED_UP_TO_BYTES = 1 << 16
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BETWEEN_EVENTS = (b"\n\n\r\n", b"\r\n\r\n\r\n")


class Client(Protocol):
    """The connection a request came on."""

    is_write_paused: bool

    def write(self, data: bytes) -> None: ...
    def finish(self, *, is_closing: bool) -> None:
        """The answer is complete; the next request on this connection has its turn."""
        ...

    def cut(self, *, is_flushed: bool) -> None:
        """The answer cannot be completed: close, after what was written or at once."""
        ...

    def finish_unread(self) -> None:
        """The answer is complete and the rest of the request is not wanted: close."""
        ...


class ClientSide(ABC):
    """A request of ``client`` that ``proxy`` takes care of."""

    __slots__ = (
        "_asked",
        "_client",
        "_engine_id",
        "_has_written",
        "_is_close_delimited",
        "_is_done",
        "_is_event_stream",
        "_is_on",
        "_is_whole",
        "_num_bytes",
        "_parts",
        "_proxy",
        "_reply_head",
        "_tail",
        "began_s",
        "is_decoding",
        "is_last",
        "upstream",
    )

    def __init__(
        self,
        proxy: Proxy,
        client: Client,
        asked: RequestHead,
    ) -> None:
        self._proxy = proxy
        self._client = client
        self._asked = asked
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_on = False
        self._is_whole = False
        self._is_done = False
        self._engine_id = ""
        self._reply_head = b""
        self._has_written = False
        self._is_event_stream = False
        self._is_close_delimited = False
        self._tail = b""
        self.began_s = 0.0
        self.is_last = asked.is_last
        self.is_decoding = asked.is_http_1_0
        self.upstream: Sending | None = None
        self._prepare()

    # -- what is done for it ----------------------------------------------------------------

    @abstractmethod
    def _prepare(self) -> None:
        """The last part of ``__init__``."""

    @abstractmethod
    def _begin(self) -> None:
        """The whole request has come, and is in ``_parts``."""

    @abstractmethod
    def _end(self) -> None:
        """Nothing more will be done for it."""

    @abstractmethod
    def expire(self, after_s: float) -> None:
        """The request has taken too long."""

    @abstractmethod
    def stop(self) -> None:
        """The router stops now."""

    # -- how it comes -----------------------------------------------------------------------

    def start(self) -> None:
        """All answers before this one are complete."""
        self._is_on = True
        self.began_s = self._proxy.now_s()
        self._proxy.live.add(self)
        if not self._asked.is_admitted:
            self._answer(answers.unauthorized())
        elif problem := self._asked.route.problem:
            self._answer(answers.problem(400, "bad_request", problem))
        elif (refusal := self._proxy.gate.would_refuse()) is not None:
            self._answer(answers.refused(refusal))
        elif self._num_bytes > self._proxy.max_body_bytes:
            self._refuse_size()
        elif self._is_whole:
            self._begin()
        elif self._asked.expects_continue:
            self._client.write(_CONTINUE)

    def start_whole(self, body: bytes) -> None:
        """The same, with all of the request's body."""
        self._parts.append(body)
        self._num_bytes = len(body)
        self._is_whole = True
        self.start()

    def feed(self, data: bytes) -> None:
        """More of the request's body."""
        if self._is_done:
            return
        self._num_bytes += len(data)
        if self._num_bytes <= self._proxy.max_body_bytes:
            self._parts.append(data)
        else:
            self._parts.clear()
            if self._is_on:
                self._refuse_size()

    def end_of_request(self) -> None:
        """The whole request has come."""
        self._is_whole = True
        if self._is_on and not self._is_done:
            self._begin()

    def client_left(self) -> None:
        """Nobody is there to be answered."""
        if self._is_done:
            return
        if self._is_on:
            self._proxy.counts.num_clients_left += 1
        self._end()

    def write_paused(self) -> None:
        if self.upstream is not None:
            self.upstream.pause()

    def write_resumed(self) -> None:
        if self.upstream is not None:
            self.upstream.resume()

    def _refuse_size(self) -> None:
        message = f"the body is over {self._proxy.max_body_bytes} bytes"
        self._answer(answers.problem(413, "too_large", message))

    # -- how it ends ------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        client = self._client
        if self._reply_head:
            head, self._reply_head = self._reply_head, b""
            self._has_written = True
            if len(data) <= _JOINED_UP_TO_BYTES:
                data = head + data
            else:
                client.write(head)
        if data:
            client.write(data)

    def _end_with(self, answer: answers.Answer) -> None:
        if self._has_written:
            self._break_off(answer)
        else:
            self._answer(answer)

    def _answer(self, answer: answers.Answer) -> None:
        """End with an answer of the router's own."""
        is_unread = not self._is_whole and (self._asked.expects_continue or answer.status == 413)
        is_last = self.is_last or is_unread
        is_head = self._asked.method == b"HEAD"
        self._client.write(answer.to_bytes(is_head=is_head, is_last=is_last))
        self._end()
        if is_unread:
            self._client.finish_unread()
        else:
            self._client.finish(is_closing=is_last)

    def _break_off(self, answer: answers.Answer) -> None:
        """End an answer that has begun and cannot be completed.

        An event stream that stands between two events gets one more that tells why, as SGLang
        does.  Anything else is cut, so that no client takes it for whole.
        """
        self._proxy.counts.num_broken_replies += 1
        is_between = not self._tail or self._tail.endswith(_BETWEEN_EVENTS)
        self._end()
        if self._is_event_stream and not self._is_close_delimited and is_between:
            event = b"data: " + json.dumps(answer.payload).encode() + b"\n\n"
            self._client.write(chunk(event) + b"0\r\n\r\n")
            self._client.finish(is_closing=self.is_last)
        else:
            self._client.cut(is_flushed=not self._is_close_delimited)

    def _finish(self) -> None:
        self._proxy.latencies.observe(
            self._asked.route.path, self._engine_id, self._proxy.now_s() - self.began_s
        )
        self._end()
        self._client.finish(is_closing=self.is_last)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
