"""Requests that reach no engine: those for the control application, and unparsable ones.

Always true: the control application starts when all of a request has arrived, at most
``MAX_CONTROL_BYTES`` within ``READ_WITHIN_S``, and has ``REPLY_WITHIN_S`` to get rid of its reply.
Bodies that have not ended count with those for engines.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from rollout.router.gate.gate import Refusal
from rollout.router.http import responses
from rollout.router.http.incoming_body import IncomingBody
from rollout.router.http.responses import RouterResponse
from rollout.router.proxy.client_response import ClientWriter
from rollout.router.proxy.context import Proxy

MAX_CONTROL_BYTES = 1 << 20
READ_WITHIN_S = 10.0
REPLY_WITHIN_S = 600.0
PINNED_WITHIN_S = 86400.0
"""A pin is a reply that lasts as long as its client wants."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(ClientWriter, Protocol):
    """The connection of a client, as a request that reaches no engine needs it."""

    loop: asyncio.AbstractEventLoop
    app: Any

    def abort(self) -> None: ...
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None: ...


class LocalRequest:
    """A request that reaches no engine."""

    def start(self) -> None: ...
    def feed(self, data: bytes) -> None: ...
    def end_of_request(self) -> None: ...
    def wait_for_more(self) -> None: ...
    def client_left(self) -> None: ...
    def write_paused(self) -> None: ...
    def write_resumed(self) -> None: ...
    def close_after(self) -> None: ...


class ControlRequest(LocalRequest):
    """A request for the control application, whose replies wait through uvicorn's flow control."""

    def __init__(
        self,
        connection: Connection,
        proxy: Proxy,
        client_host: str,
        cycle: RequestResponseCycle,
        reply_within_s: float,
    ) -> None:
        self._connection = connection
        self._proxy = proxy
        self._cycle = cycle
        self._reply_within_s = reply_within_s
        now_s = connection.loop.time()
        self._body: IncomingBody = proxy.bodies.begin(client_host, self._late, now_s)
        self._is_started = False
        self._whole: bytes | None = None
        self._refusal: RouterResponse | None = None
        self._timer: asyncio.TimerHandle | None = None
        cycle.on_response = self._on_response

    def start(self) -> None:
        self._is_started = True
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._whole is not None:
            self._run()
        else:
            late = responses.error(408, "timeout", f"no whole request in {READ_WITHIN_S:.0f} s")
            self._timer = self._connection.loop.call_later(READ_WITHIN_S, self._refuse, late)
            if self._cycle.waiting_for_100_continue:
                self._connection.write(_CONTINUE)

    def feed(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._body.num_bytes + len(data) > MAX_CONTROL_BYTES:
            message = f"the body is over {MAX_CONTROL_BYTES} bytes"
            self._refusal = responses.error(413, "too_large", message)
        elif why := self._body.add(data, self._connection.loop.time()):
            self._refusal = responses.refused(Refusal(why, self._proxy.gate.state))
        else:
            return
        self._body.drop()
        if self._is_started:
            self._refuse(self._refusal)

    def _late(self) -> None:
        self._refusal = self._refusal or responses.late_body()
        if self._is_started:
            self._refuse(self._refusal)

    def end_of_request(self) -> None:
        self._whole = self._body.take()
        if self._is_started and self._refusal is None:
            self._run()

    def _refuse(self, refusal: RouterResponse) -> None:
        self._refusal = refusal
        self._body.drop()
        self._connection.write(refusal.to_bytes(is_last=True))
        self._connection.finish_unread()

    def _run(self) -> None:
        self._stop_timer()
        cycle, connection = self._cycle, self._connection
        cycle.waiting_for_100_continue = cycle.more_body = False
        cycle.body, self._whole = self._whole, None  # type: ignore[assignment]  # no copy
        cycle.message_event.set()
        self._timer = connection.loop.call_later(self._reply_within_s, connection.abort)
        connection._start_asgi_task(cycle, connection.app)

    def client_left(self) -> None:
        self._body.drop()
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

    def __init__(self, connection: Connection, response: RouterResponse) -> None:
        self._connection = connection
        self._response = response

    def start(self) -> None:
        self._connection.write(self._response.to_bytes(is_last=True))
        self._connection.finish_unread()
