"""The client's connection: uvicorn's HTTP protocol, but generation goes straight to an engine.

Always true:
- Requests of one connection get their responses in order; the next one starts when the response
  before it is complete and the client reads.  Pipelined data is kept unparsed, up to a bound, past
  which the socket is not read.
- When a client closes its connection, or its half of it, its work ends at once.  (A half-closed
  connection looks like a closed one until something is written to it.)
- Data that is not HTTP gets a 400 in its turn, and the connection closes.
- An error of the router's own ends the request it came from, or this connection, and no more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

import httptools
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from rollout.core.errors import ConfigError
from rollout.router.gate.gate import Refusal
from rollout.router.http import responses
from rollout.router.http.engine_connection import MANY_BYTES
from rollout.router.http.fast_json import Data
from rollout.router.http.head_cache import RequestHead, head_key
from rollout.router.http.headers import (
    MAX_HEAD_BYTES,
    RefusedHead,
    check_head,
    check_site,
    check_size,
    header_lines,
    split_unread,
)
from rollout.router.http.routes import COMPLETION_PATHS, PINS_PATH, Route, route_of
from rollout.router.proxy.client_response import ClientResponse
from rollout.router.proxy.context import Proxy, log_router_error
from rollout.router.proxy.exchange import Exchange
from rollout.router.proxy.local_request import (
    PINNED_WITHIN_S,
    REPLY_WITHIN_S,
    ControlRequest,
    LocalRequest,
    UnparsableRequest,
)
from rollout.router.proxy.stages import Receiving

_PIECE_BYTES = 1 << 13
_MAX_UNPARSED_BYTES = 1 << 16
_EVENTS_AT_ONCE = 64
"""Heads, pieces of bodies and starts of requests; then the other connections have their turn."""
_LINGER_S = 2.0
_MAX_SURPLUS = 32
"""Connections beyond the bound, for health, state and aborts."""
_SURPLUS_IDLE_S = 5
_TRIED_BELOW = "0.55"
"""The first release of uvicorn with which the router was not tested."""

# Private to uvicorn, overridden or called here; tests/test_private_parts.py has their arguments.
_OF_UVICORN = (
    *("_start_asgi_task", "connection_lost", "connection_made", "data_received", "eof_received"),
    *("on_body", "on_header", "on_headers_complete", "on_message_begin", "on_message_complete"),
    *("on_response_complete", "on_url", "pause_writing", "resume_writing", "shutdown"),
)

PipelinedRequest = Exchange | LocalRequest


def check_uvicorn(protocol: type) -> None:
    """Check that a release of uvicorn has what is overridden and called here.

    Raises:
        ConfigError: it has moved a part; without this check requests would fail, or be served
            without a bound.
    """
    if missing := [name for name in _OF_UVICORN if not hasattr(protocol, name)]:
        raise ConfigError(
            f"uvicorn {uvicorn.__version__} has no {protocol.__name__}.{missing[0]}, which the "
            f"router needs; pip install 'uvicorn<{_TRIED_BELOW}'"
        )


check_uvicorn(HttpToolsProtocol)


class ClientConnection(HttpToolsProtocol):
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
        self._pipeline: deque[PipelinedRequest] = deque()
        self._parsing: PipelinedRequest | None = None
        self._is_started = False
        self._is_advancing = False
        self._num_events = 0  # in this turn
        self._is_in_head = False
        # The body of a request that seems to have come at once: it starts when it is whole.
        self._at_once: list[bytes] | None = None
        # Read since the last byte of a body; less a piece where they began within one.
        self._num_framing_bytes = 0
        self._begins_piece = True
        self._unparsed = bytearray()
        self._key = b""  # of a head that is being parsed and is not cached
        self._ignores_input = False
        self._linger: asyncio.TimerHandle | None = None
        # Its descriptor is of those reserved for control: one request, and no generation.
        self._is_surplus = False
        # uvicorn's timer for idle connections costs two timer calls per request.
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since_s = 0.0

    # -- bytes in ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_surplus = len(self.connections) - self._proxy.max_clients
        if num_surplus > 0:
            self._is_surplus = True
            self.timeout_keep_alive = _SURPLUS_IDLE_S
            if num_surplus > _MAX_SURPLUS:
                self._refuse(self._no_connection())
                self._advance()
        self._idle_since_s = self.loop.time()
        self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        try:
            if len(data) > MANY_BYTES:
                self.transport.pause_reading()
                self.loop.call_soon(self._read_more)
            if self._unparsed or not self._may_parse_on():
                self._keep_unparsed(data)
                return
            is_between = self._parsing is None and not self._pipeline and not self._is_in_head
            if is_between and not self._is_surplus:
                key, length, end = head_key(data)
                known = self._proxy.head_cache.get(key)
                if known is None and key:
                    known = self._proxy.head_cache.similar(key)
                is_whole = bool(key) and len(data) - end == int(length)
                if known is None:
                    self._key = key
                    self._at_once = [] if is_whole and len(data) <= _PIECE_BYTES else None
                elif is_whole:
                    head, unread = known
                    response = ClientResponse(self, head)
                    exchange = Exchange(self._proxy, response, head, unread=unread)
                    self._pipeline.append(exchange)
                    self._is_started = True
                    exchange.start_whole(data[end:])
                    return  # the request is complete, so the parser is not used
            self._num_events = 0
            self._parse(data)
            self._take_apart()
            self._advance()
            if self._parsing is not None:
                self._parsing.wait_for_more()
        except Exception as error:
            self._on_router_error(error)

    def _take_apart(self) -> None:
        """What seemed to have come at once goes on in parts."""
        parts, self._at_once = self._at_once, None
        if parts and self._parsing is not None:
            for part in parts:
                self._parsing.feed(part)

    def _read_more(self) -> None:
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    @property
    def _client_host(self) -> str:
        return self.client[0] if self.client else ""

    def _keep_unparsed(self, data: bytes) -> None:
        self._unparsed += data
        if len(self._unparsed) > _MAX_UNPARSED_BYTES:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of a request that has to wait, or of this turn, or a little more."""
        if len(data) <= _PIECE_BYTES and not (data := self._feed_parser(data)):
            return
        at = 0
        while at < len(data) and self._may_parse_on() and self._num_events < _EVENTS_AT_ONCE:
            piece = data[at : at + _PIECE_BYTES]
            at += len(piece)
            if again := self._feed_parser(piece):
                data, at = again + data[at:], 0
        if at < len(data) and not self._ignores_input:
            self._keep_unparsed(data[at:])

    def _feed_parser(self, data: bytes) -> bytes:
        """Returns what has to be parsed again."""
        self._begins_piece = self._parsing is None and not self._is_in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return self._head_without_offer() + data[offer.args[0] :]
        except httptools.HttpParserCallbackError as error:
            self._refuse_head(error.__context__ or error)
        except httptools.HttpParserError:
            self._refuse(responses.error(400, "bad_request", "Invalid HTTP request received."))
        else:
            self._num_framing_bytes += len(data)
            is_within = self._is_in_head or self._parsing is not None
            if is_within and self._num_framing_bytes > MAX_HEAD_BYTES:
                message = f"the head is over {MAX_HEAD_BYTES} bytes"
                self._refuse(responses.error(431, "bad_request", message))
        return b""

    def _head_without_offer(self) -> bytes:
        """The head that was just read, without its offer of another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = header_lines(header for header in self.headers if header[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, lines)

    def _refuse_head(self, error: BaseException) -> None:
        """An error was raised while a head was read: by its check, or by a fault of the router."""
        if isinstance(error, RefusedHead):
            self._refuse(responses.error(error.status, "bad_request", str(error)))
        else:
            log_router_error("a head", error)
            self._refuse(responses.router_error(type(error).__name__))

    def _refuse(self, response: responses.RouterResponse) -> None:
        """Refuse what cannot be parsed, and ignore all further data of this connection."""
        self._ignores_input = True
        if self._parsing is not None and self._pipeline and self._pipeline[-1] is self._parsing:
            self._pipeline.pop().client_left()
            if not self._pipeline:
                self._is_started = False
        self._parsing = None
        self._pipeline.append(UnparsableRequest(self, response))

    def eof_received(self) -> None:
        if self._pipeline:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._abandon()
        except Exception as error:
            self._on_router_error(error)
        for timer in (self._idle_timer, self._linger):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _abandon(self) -> None:
        self._ignores_input = True
        pipeline, self._pipeline = self._pipeline, deque()
        self._unparsed.clear()
        for request in pipeline:
            try:
                request.client_left()
            except Exception as error:
                log_router_error("a request whose client left", error)

    def _on_router_error(self, error: Exception, *, is_flushed: bool = False) -> None:
        """An error outside of any request: end this connection."""
        with suppress(Exception):
            log_router_error("the connection of a client", error)
        with suppress(Exception):
            self.cut(is_flushed=is_flushed)

    # -- what the parser finds --------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._num_events += 1
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_in_head = True
        self._num_framing_bytes = 0 if self._begins_piece else -_PIECE_BYTES
        self._begins_piece = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer, which no engine expects
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._num_framing_bytes > MAX_HEAD_BYTES // 2:  # before this piece
            check_size(self.url, self.headers)
        self._is_in_head = False
        self._num_framing_bytes = -_PIECE_BYTES
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if self.parser.should_upgrade():  # the parser would read the body as another protocol
            if method == b"CONNECT":
                raise RefusedHead("this is not a proxy for CONNECT")
            return  # an offer is ignored: see ``_feed_parser``
        check_head(version, self.headers)
        route, key = route_of(self.url), self._key
        self._key = b""
        if self._proxy.keys.is_open(route.path, is_generation=route.is_generation):
            check_site(self.headers, is_loopback_only=self._proxy.is_loopback_only)
        is_last = self._is_surplus or version == "1.0" or not self.parser.should_keep_alive()
        refusal = self._why_refused(method, route)
        request: PipelinedRequest
        if route.is_generation or refusal is not None:
            read, others = split_unread(self._proxy.keys.strip(self.headers))
            head = RequestHead(
                method,
                route,
                read,
                refusal=refusal,
                is_last=is_last,
                is_http_1_0=version == "1.0",
                expects_continue=self.expect_100_continue,
            )
            response = ClientResponse(self, head)
            request = Exchange(
                self._proxy,
                response,
                head,
                self._client_host,
                Receiving(),
                unread=header_lines(others),
            )
            if key and refusal is None:  # without a key there is no room in the cache
                self._proxy.head_cache.add(key, head, others)
        else:
            cycle = self._cycle(route, is_last=is_last)
            within_s = PINNED_WITHIN_S if route.path == PINS_PATH else REPLY_WITHIN_S
            request = ControlRequest(self, self._proxy, self._client_host, cycle, within_s)
        if refusal is not None or self.expect_100_continue or not route.is_generation:
            self._at_once = None
        self._parsing = request
        self._pipeline.append(request)
        if len(self._pipeline) == 1 and self._at_once is None:
            self._advance()

    def _why_refused(self, method: bytes, route: Route) -> responses.RouterResponse | None:
        """The response to a request that may not go on, or None if it may."""
        keys = self._proxy.keys
        if keys.are_needed and not keys.admit(
            self.headers, route.path, is_generation=route.is_generation
        ):
            return responses.unauthorized()
        if self._is_surplus and route.is_generation:
            return self._no_connection()
        if route.problem:
            kind = "not_found" if route.status == 404 else "bad_request"
            return responses.error(route.status, kind, route.problem)
        if route.path in COMPLETION_PATHS and method != b"POST":
            return responses.method_not_allowed(route.path)
        return None

    def _no_connection(self) -> responses.RouterResponse:
        why = f"clients have all {self._proxy.max_clients} connections that open files allow"
        return responses.refused(Refusal(why, self._proxy.gate.state))

    def on_body(self, body: bytes) -> None:
        self._num_events += 1
        self._num_framing_bytes = -_PIECE_BYTES
        if self._at_once is not None:
            self._at_once.append(body)
        elif self._parsing is not None:
            self._parsing.feed(body)

    def on_message_complete(self) -> None:
        request, self._parsing = self._parsing, None
        parts, self._at_once = self._at_once, None
        if parts is not None and isinstance(request, Exchange):
            self._is_started = True
            request.start_whole(b"".join(parts))
        elif request is not None:
            request.end_of_request()

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

    # -- the pipeline ------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start the next request, and parse the data kept meanwhile, for a turn of the loop."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._num_events < _EVENTS_AT_ONCE:
                if not self._step():
                    return
            self.loop.call_soon(self._advance_later)
        except Exception as error:
            self._on_router_error(error, is_flushed=True)
        finally:
            self._is_advancing = False

    def _advance_later(self) -> None:
        self._num_events = 0
        self._advance()

    def _step(self) -> bool:
        """Returns whether there was something to do."""
        if self.transport.is_closing() or self.is_write_paused:
            return False
        if self._pipeline and not self._is_started:
            self._is_started = True
            self._num_events += 1
            self._pipeline[0].start()
            return True
        if self._unparsed and self._may_parse_on():
            data, self._unparsed = bytes(self._unparsed), bytearray()
            self.flow.resume_reading()
            self._parse(data)
            if self._parsing is not None:
                self._parsing.wait_for_more()
            return True
        return False

    def _may_parse_on(self) -> bool:
        """Whether the next data belongs to the current request, or no request is pending."""
        return not (self._ignores_input or self.is_write_paused) and (
            not self._pipeline or self._pipeline[0] is self._parsing
        )

    def finish(self, *, is_closing: bool) -> None:
        if not self._pipeline:  # the client has left meanwhile
            return
        self.server_state.total_requests += 1
        self._pipeline.popleft()
        self._is_started = False
        self._idle_since_s = self.loop.time()
        if is_closing:
            self._abandon()
            self.transport.close()
        elif self._pipeline or self._unparsed:
            self._advance()
        else:
            self.flow.resume_reading()

    def finish_unread(self) -> None:
        # A socket closed with unread bytes is reset, and the client may lose the response: so
        # read for a while longer, and discard the data.
        self._abandon()
        self.flow.resume_reading()
        if self.transport.is_closing():
            return
        self.transport.write_eof()
        self._linger = self.loop.call_later(_LINGER_S, self.transport.abort)

    def cut(self, *, is_flushed: bool) -> None:
        self._abandon()
        if is_flushed:
            self.transport.close()
        else:
            self.transport.abort()

    def abort(self) -> None:
        """Close at once, which ends all work on the requests of this connection."""
        try:
            self.cut(is_flushed=False)
        except Exception as error:
            self._on_router_error(error)

    def write(self, *parts: Data) -> None:
        if not self.transport.is_closing():
            self.transport.writelines(parts)

    def pause_writing(self) -> None:
        self.is_write_paused = True
        try:
            self.flow.pause_writing()
            if self._pipeline:
                self._pipeline[0].write_paused()
        except Exception as error:
            self._on_router_error(error)

    def resume_writing(self) -> None:
        self.is_write_paused = False
        try:
            self.flow.resume_writing()
            if self._pipeline:
                self._pipeline[0].write_resumed()
            self._advance()
        except Exception as error:
            self._on_router_error(error)

    # -- time and stop ----------------------------------------------------------------------

    def _close_if_idle(self) -> None:
        remaining_s = float(self.timeout_keep_alive)
        if not self._pipeline:
            remaining_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
            if remaining_s <= 0:
                if self.transport.is_closing():  # the client does not read its last response
                    self.transport.abort()
                    return
                self.transport.close()
                remaining_s = _LINGER_S
        self._idle_timer = self.loop.call_later(remaining_s, self._close_if_idle)

    def shutdown(self) -> None:
        if not self._pipeline:
            self.transport.close()
        for request in self._pipeline:
            request.close_after()
