"""The client's connection: uvicorn's HTTP protocol, except that generation is spliced.

Always true:
- Requests of one connection are answered in order; the next one starts when the answer before
  it is complete.  What a client pipelines behind it is kept unparsed, up to a bound, past which
  its socket is not read.
- A client that closes, or closes its half, is gone: its work ends at once.  (A half-closed
  connection cannot be told from a closed one before something is written to it.)
- What is no HTTP gets a 400 in its turn, and the connection closes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from rollout.router import answers
from rollout.router.exchange import Exchange
from rollout.router.failover import TokenExchange, may_keep_tokens
from rollout.router.heads import RequestHead, known_by
from rollout.router.message import Route, route_of
from rollout.router.proxy import Proxy
from rollout.router.turns import AppTurn, BadRequest, Turn

MAX_HEAD_BYTES = 1 << 16
_MAX_PIPELINED_BYTES = 1 << 16
_LINGER_S = 2.0


class RouterProtocol(HttpToolsProtocol):
    """One client's connection."""

    def __init__(
        self,
        proxy: Proxy,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.is_write_paused = False
        self._proxy = proxy
        self._turns: deque[Turn] = deque()
        self._parsing: Turn | None = None
        self._is_started = False
        self._is_advancing = False
        self._is_in_head = False
        self._num_head_bytes = 0
        self._later: list[bytes] = []
        self._key = b""  # of a head that is being parsed and is not known
        self._num_later_bytes = 0
        self._is_deaf = False
        self._linger: asyncio.TimerHandle | None = None
        # uvicorn's timer for idle connections costs two timer calls per request.
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since_s = 0.0

    # -- bytes in ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if not self._may_parse_on():
            self._later.append(data)
            self._num_later_bytes += len(data)
            if self._num_later_bytes > _MAX_PIPELINED_BYTES:
                self.flow.pause_reading()
            return
        if self._parsing is None and not self._turns and not self._is_in_head:
            key, length, end = known_by(data)
            head = self._proxy.known_heads.get(key)
            if head is None:
                self._key = key
            elif len(data) - end == int(length):
                return self._take_whole(self._exchange(head), data[end:])
        self._parse(data)

    def _take_whole(self, exchange: Exchange, body: bytes) -> None:
        """A whole request with a head that came before: the parser stays as it is."""
        self._turns.append(exchange)
        self._is_started = True
        exchange.start_whole(body)

    def _exchange(self, head: RequestHead) -> Exchange:
        kind = TokenExchange if may_keep_tokens(self._proxy, head) else Exchange
        return kind(self._proxy, self, head)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse("Invalid HTTP request received.")
        else:
            if self._is_in_head:
                self._num_head_bytes += len(data)
                if self._num_head_bytes > MAX_HEAD_BYTES:
                    self._refuse(f"the head is over {MAX_HEAD_BYTES} bytes", 431)
        self._advance()

    def _refuse(self, message: str, status: int = 400) -> None:
        """Whatever else comes on this connection is not to be understood."""
        self._is_deaf = True
        if self._parsing is not None and self._turns and self._turns[-1] is self._parsing:
            self._turns.pop().client_left()
            if not self._turns:
                self._is_started = False
        self._parsing = None
        self._turns.append(BadRequest(self, answers.problem(status, "bad_request", message)))

    def eof_received(self) -> None:
        if self._turns:
            self._leave()
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        for timer in (self._idle_timer, self._linger):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _leave(self) -> None:
        self._is_deaf = True
        turns, self._turns = self._turns, deque()
        self._later.clear()
        for turn in turns:
            turn.client_left()

    # -- what the parser finds --------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self.parser.should_upgrade():  # the parser would take the body for another protocol
            raise httptools.HttpParserError("an upgrade is not supported")
        route = route_of(self.url)
        is_http_1_0 = self.parser.get_http_version() != "1.1"
        is_last = is_http_1_0 or not self.parser.should_keep_alive()
        turn: Turn
        keys = self._proxy.keys
        is_admitted = not keys.are_needed or keys.admit(
            self.headers, route.path, is_generation=route.is_generation
        )
        key, self._key = self._key, b""
        if route.is_generation or not is_admitted:
            head = RequestHead(
                self.parser.get_method(),
                route,
                keys.strip(self.headers),
                is_admitted=is_admitted,
                is_last=is_last,
                is_http_1_0=is_http_1_0,
                expects_continue=self.expect_100_continue,
            )
            turn = self._exchange(head)
            if key and is_admitted:  # who has no key takes no room
                self._proxy.known_heads.learn(key, head)
        else:
            turn = AppTurn(self, self._cycle(route, is_last=is_last))
        self._parsing = turn
        self._turns.append(turn)
        if len(self._turns) == 1:
            self._advance()

    def on_body(self, body: bytes) -> None:
        if self._parsing is not None:
            self._parsing.feed(body)

    def on_message_complete(self) -> None:
        turn, self._parsing = self._parsing, None
        if turn is not None:
            turn.end_of_request()

    def _cycle(self, route: Route, *, is_last: bool) -> RequestResponseCycle:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        raw_path, _, query = route.target.partition(b"?")
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["headers"] = headers
        self.scope["path"] = self.root_path + route.path
        self.scope["raw_path"] = self.root_path.encode("ascii") + raw_path
        self.scope["query_string"] = query
        self.url, self.headers = url, headers
        cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects,
            keep_alive=not is_last,
            on_response=self.on_response_complete,
        )
        self.cycle = cycle
        return cycle

    # -- turns ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start the next request, and parse what was kept while one was being answered."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while not self.transport.is_closing():
                if self._turns and not self._is_started:
                    self._is_started = True
                    self._turns[0].start()
                elif self._later and self._may_parse_on():
                    data = b"".join(self._later)
                    self._later.clear()
                    self._num_later_bytes = 0
                    self.flow.resume_reading()
                    self._parse(data)
                else:
                    break
        finally:
            self._is_advancing = False

    def _may_parse_on(self) -> bool:
        """What comes next belongs to the request whose turn it is, or to the next of all."""
        return not self._is_deaf and (not self._turns or self._turns[0] is self._parsing)

    def on_response_complete(self) -> None:
        self.finish(is_closing=self._turns[0].is_last if self._turns else True)

    def finish(self, *, is_closing: bool) -> None:
        if not self._turns:  # the client has left meanwhile
            return
        self.server_state.total_requests += 1
        self._turns.popleft()
        self._is_started = False
        if is_closing:
            self._leave()
            self.transport.close()
        elif self._turns or self._later:
            self._advance()
        else:
            self._idle_since_s = self.loop.time()
            self.flow.resume_reading()

    def finish_unread(self) -> None:
        # Closed with unread bytes of the request in it, a socket is reset, and the client may
        # lose the answer: so read on for a while, and throw away.
        self._leave()
        self.flow.resume_reading()
        if self.transport.is_closing():
            return
        self.transport.write_eof()
        self._linger = self.loop.call_later(_LINGER_S, self.transport.abort)

    def cut(self, *, is_flushed: bool) -> None:
        self._leave()
        if is_flushed:
            self.transport.close()
        else:
            self.transport.abort()

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self.flow.pause_writing()
        if self._turns:
            self._turns[0].write_paused()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self.flow.resume_writing()
        if self._turns:
            self._turns[0].write_resumed()

    # -- time and stop ----------------------------------------------------------------------

    def _close_if_idle(self) -> None:
        left_s = float(self.timeout_keep_alive)
        if not self._turns:
            left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
            if left_s <= 0:
                self.transport.close()
                return
        self._idle_timer = self.loop.call_later(left_s, self._close_if_idle)

    def shutdown(self) -> None:
        if not self._turns:
            self.transport.close()
        for turn in self._turns:
            turn.is_last = True
