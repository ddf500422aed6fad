"""Requests that reach no engine: those for the control application, and unparsable ones.

Always true: the control application starts when all of a request has arrived, at most
``MAX_CONTROL_BYTES`` within ``READ_WITHIN_S``, and has ``REPLY_WITHIN_S`` to get rid of its reply.
Bodies that have not ended count with those for engines.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from rollout.router.http import responses
from rollout.router.http.responses import RouterResponse

if TYPE_CHECKING:
    from rollout.router.proxy.client_connection import ClientConnection
    from rollout.router.proxy.context import Proxy

MAX_CONTROL_BYTES = 1 << 20
"""For all but chats of sessions, which have ``router.max_read_bytes``."""
READ_WITHIN_S = 10.0
REPLY_WITHIN_S = 600.0
"""Chats of sessions have also as long as other generation requests, and then their error."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class LocalRequest:
    """A request that reaches no engine."""

    def start(self) -> None: ...
    def feed(self, data: bytes) -> None: ...
    def end_of_request(self) -> None: ...
    def client_left(self) -> None: ...
    def write_paused(self) -> None: ...
    def write_resumed(self) -> None: ...
    def close_after(self) -> None: ...


class ControlRequest(LocalRequest):
    """A request for the control application, whose replies wait through uvicorn's flow control."""

    def __init__(
        self,
        connection: ClientConnection,
        proxy: Proxy,
        cycle: RequestResponseCycle,
        max_bytes: int,
        reply_within_s: float,
    ) -> None:
        self._connection = connection
        self._proxy = proxy
        self._max_bytes = max_bytes
        self._cycle = cycle
        self._reply_within_s = reply_within_s
        self._body = bytearray()
        self._is_started = False
        self._is_whole = False
        self._num_receiving_bytes = 0
        self._refusal: RouterResponse | None = None
        self._timer: asyncio.TimerHandle | None = None
        cycle.on_response = self._on_response

    def start(self) -> None:
        self._is_started = True
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._is_whole:
            self._run()
        else:
            late = responses.error(408, "timeout", f"no whole request in {READ_WITHIN_S:.0f} s")
            self._timer = self._connection.loop.call_later(READ_WITHIN_S, self._refuse, late)
            if self._cycle.waiting_for_100_continue:
                self._connection.write(_CONTINUE)

    def feed(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        num = len(data)
        if len(self._body) + num > self._max_bytes:
            message = f"the body is over {self._max_bytes} bytes"
            self._refusal = responses.error(413, "too_large", message)
        elif (full := self._proxy.receive(num)) is not None:
            self._refusal = responses.refused(full)
        else:
            self._body += data
            self._num_receiving_bytes += num
            return
        self._stop_receiving()
        self._body.clear()
        if self._is_started:
            self._refuse(self._refusal)

    def end_of_request(self) -> None:
        self._stop_receiving()
        self._is_whole = True
        if self._is_started and self._refusal is None:
            self._run()

    def _refuse(self, refusal: RouterResponse) -> None:
        self._refusal = refusal
        self._stop_receiving()
        self._connection.write(refusal.to_bytes(is_last=True))
        self._connection.finish_unread()

    def _stop_receiving(self) -> None:
        self._proxy.num_receiving_bytes -= self._num_receiving_bytes
        self._num_receiving_bytes = 0

    def _run(self) -> None:
        self._stop_timer()
        cycle, connection = self._cycle, self._connection
        cycle.waiting_for_100_continue = cycle.more_body = False
        cycle.body, self._body = self._body, bytearray()
        cycle.message_event.set()
        self._timer = connection.loop.call_later(self._reply_within_s, connection.abort)
        connection._start_asgi_task(cycle, connection.app)

    def client_left(self) -> None:
        self._stop_receiving()
        self._stop_timer()
        if not self._cycle.response_complete:
            self._cycle.disconnected = True
        self._cycle.message_event.set()

    def close_after(self) -> None:
        self._cycle.keep_alive = False

    def _on_response(self) -> None:
        self._stop_timer()
        self._connection.finish(is_closing=not self._cycle.keep_alive)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class UnparsableRequest(LocalRequest):
    """Data that could not be parsed, refused when its turn comes."""

    def __init__(self, connection: ClientConnection, response: RouterResponse) -> None:
        self._connection = connection
        self._response = response

    def start(self) -> None:
        self._connection.write(self._response.to_bytes(is_last=True))
        self._connection.finish_unread()
