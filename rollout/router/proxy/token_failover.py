"""The engine's reply read as tokens, so that its request can continue on another engine.

The request is sent streaming even if its client wants one complete response, so that the tokens so
far are known when the engine dies.  A reply that breaks, an engine that is reported as lost and an
abort that the client did not request lead to the same: the exchange enters the gate again, and the
next engine gets the prompt and the tokens so far.

Always true: no event or reply of an engine raises an error here; one that cannot be used ends its
request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engines.protocol.plain_text import describe
from rollout.router.continuation.core import UNUSABLE
from rollout.router.continuation.dialects.table import ROUTES
from rollout.router.continuation.fast_path import Event
from rollout.router.continuation.forwarded_reply import ForwardedReply
from rollout.router.continuation.named_weights import NOT_NAMED, NamedWeights
from rollout.router.continuation.reply import END, Reading, Reply
from rollout.router.gate.gate import GateState
from rollout.router.http import responses
from rollout.router.http.engine_connection import SentRequest
from rollout.router.http.fast_json import Data, dumps, loads
from rollout.router.http.head_cache import ReplyHead, RequestHead
from rollout.router.http.headers import Headers, signature, signature_lines
from rollout.router.http.request import may_want_prompt_logprobs
from rollout.router.proxy.context import Proxy
from rollout.router.proxy.engine_errors import status_of
from rollout.router.proxy.prefill_decode import PromptLogprobs

if TYPE_CHECKING:
    from rollout.router.proxy.exchange import Exchange

_FAIL_OVER = b"x-token-failover"
_DONE = b"data: [DONE]\n\n"
_LONGEST_DONE = 16
_LACKING = (
    "not all engines that serve here have %s; send /generate, which engines of both kinds take"
)
_UNREAD = (
    "vLLM engines take /generate with one prompt and n=1, fields of the documented types, and a "
    "body of at most router.max_read_bytes"
)


def may_keep_tokens(proxy: Proxy, head: RequestHead) -> bool:
    """The tokens of a request with this head may have to be read."""
    route = ROUTES.get(head.route.path)
    if route is None:
        return False
    dialects = proxy.gate.members.dialects
    if route.is_lacking(dialects) or route.is_translated(dialects):
        return True
    if proxy.config.token_failover == "on" or proxy.gate.members.prefill.members:
        return True
    return proxy.config.token_failover == "asked" and _FAIL_OVER in head.switched_on


def read_tokens(
    proxy: Proxy, exchange: Exchange, head: RequestHead, body: bytes
) -> TokenFailover | responses.RouterResponse | None:
    """The reader of this request's replies; None if they are passed on as they are.

    Returns:
        The error response instead, where the engines that serve here cannot take the request.
    """
    route, config = ROUTES[head.route.path], proxy.config
    dialects = proxy.gate.members.dialects
    if route.is_lacking(dialects):
        return responses.error(404, "not_found", _LACKING % head.route.path)
    is_translated = route.is_translated(dialects)
    is_kept = is_translated or config.token_failover == "on"
    if config.token_failover == "asked" and _FAIL_OVER in head.switched_on:
        is_kept = True
    if not is_kept and not may_want_prompt_logprobs(body):
        return None
    reply = None
    if len(body) <= config.max_read_bytes:
        reply = route.reply(body, Reading(config.failover_interval, dialects))
    if is_translated and (why := _UNREAD if reply is None else reply.why_not_taken(dialects)):
        return responses.error(400, "bad_request", why)
    if reply is None or not (is_kept or reply.lacks_prompt_logprobs):
        return None
    reply.decode = proxy.decode
    return TokenFailover(proxy, exchange, reply)


def read_for_base(
    proxy: Proxy,
    exchange: Exchange,
    tokens: TokenFailover | None,
    body: bytes,
    named: NamedWeights,
) -> TokenFailover:
    """The reader of replies of the base under an adapter, which get the base's version.

    Args:
        tokens: the reader of this request's tokens, if they are read anyway.
    """
    if tokens is None:
        forwarded = ForwardedReply(body, is_streamed=named.is_streamed)
        tokens = TokenFailover(proxy, exchange, forwarded)
    tokens.named = named
    return tokens


@dataclass(eq=False, slots=True)
class TokenFailover:
    """Takes the engine's reply for ``exchange``, keeps its tokens and writes the response.

    Attributes:
        named: the weights that the request names, if the base is one of them.
    """

    _proxy: Proxy
    _exchange: Exchange
    _reply: Reply
    upstream: SentRequest | None = None
    is_decoding: bool = True
    named: NamedWeights = NOT_NAMED
    _buffer: list[bytes] = field(default_factory=list)
    _status: int = 0
    _content_type: bytes = b""
    _is_unexpected: bool = False
    _is_unjudged: bool = True
    _waits_for_prompt: bool = False
    _num_aborts: int = 0
    _num_kept: int = 0

    # -- to the engine ----------------------------------------------------------------------

    def body(self, weight_version: int | None, dialect: str) -> bytes:
        """The request's body for the next engine, which holds this weight version."""
        return self._reply.body(weight_version, dialect)

    def prompt_logprobs_handler(self) -> Callable[[PromptLogprobs], None] | None:
        """What takes the prompt's log-probs from the prefill engine, where they are wanted."""
        if not self._reply.lacks_prompt_logprobs:
            return None
        self._reply.awaits_prompt_logprobs = True
        return self._on_prompt_logprobs

    def _on_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        self._reply.add_prompt_logprobs(logprobs)
        if self._waits_for_prompt:
            self._waits_for_prompt = False
            self._on_reply_end()

    def lose_engine(self) -> bool:
        """Go back to the last safe token; False if what the client has cannot be continued."""
        reply, counts = self._reply, self._proxy.counts
        if why := reply.lose_engine():
            counts.refuse_failover(why)
            if reply.has_shown:
                return False
        counts.num_failovers += 1
        return True

    @property
    def has_tokens_of_engine(self) -> bool:
        """Whether the current engine has sent tokens."""
        return self._reply.has_tokens_of_engine

    # -- the engine's reply -----------------------------------------------------------------

    def on_reply(self, head: ReplyHead, length: bytes, is_alone: bool) -> None:
        self._buffer = []
        self._is_unjudged = True
        content_type = next((value for name, value in head.headers if name == b"content-type"), b"")
        is_whole = self._reply.wants_whole_reply
        expected = b"application/json" if is_whole else b"text/event-stream"
        self._is_unexpected = head.status != 200 or not content_type.startswith(expected)
        if self._is_unexpected:
            self._status = head.status
            self._content_type = content_type
        elif self._exchange.response.client.is_write_paused and self.upstream is not None:
            self.upstream.pause()

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        self._buffer.append(data)
        if self._is_unexpected:
            if is_end and self._is_of_pause():
                self._exchange.continue_after_abort()
            elif is_end:
                self._on_refusal()
        elif self._reply.wants_whole_reply:
            if is_end:
                self._absorb_whole()
        else:
            self._absorb_events(is_end)

    def on_engine_lost(self, why: str, *, was_sent: bool = True) -> None:
        if self._reply.is_finished:
            self._on_reply_end()
        else:
            self._exchange.on_engine_lost(why, was_sent=was_sent)

    def on_no_connection(self, why: str) -> None:
        self._exchange.on_no_connection(why)

    def may_reconnect(self) -> bool:
        return self._exchange.may_reconnect()

    def on_router_error(self, error: BaseException) -> None:
        self._exchange.on_router_error(error)

    def _absorb_events(self, is_end: bool) -> None:
        reply, events, news, refusal = self._reply, self._whole_events(), b"", None
        try:
            if events:
                refusal = self._read(events)
            if is_end and not reply.is_finished:
                reply.read_all()
            if events and refusal is None and not is_end:
                news = self._new_events()
        except UNUSABLE as error:
            return self._end_unusable(error)
        if refusal is not None:
            return self._on_error(refusal)
        if events and self._is_unjudged:
            self._is_unjudged = False
            self._exchange.note_answer()
        if reply.is_finished:  # what follows is the stream's end, and the connection is kept
            return self._on_reply_end() if is_end else None
        if is_end:
            return self._exchange.end_unusable("ended its stream without a finish reason")
        if news:
            self._exchange.response.send_events(news, self._signature())
        return None

    def _read(self, events: list[Event]) -> dict[str, Any] | None:
        """Take these events, up to the first that is an error, which is returned."""
        for data, begin, end in events:
            if end - begin <= _LONGEST_DONE and data[begin:end].strip() == b"[DONE]":
                continue
            if self.named.has_base:
                data, begin, end = dumps(self._stamped(loads(data[begin:end]))), 0, END
            if (error := self._reply.take(data, begin, end)) is not None:
                return error
        return None

    def _stamped(self, payload: Any) -> Any:
        """A payload of the engine, in which the base has its own version."""
        admission = self._exchange.admission
        if admission is None or not self.named.has_base:
            return payload
        return self.named.stamped(payload, admission.base_version)

    def _new_events(self) -> bytes:
        """The events for a streaming client, as far as the text is final."""
        reply = self._reply
        if not reply.is_streamed or reply.is_finished or not reply.is_safe:
            return b""
        if reply.awaits_prompt_logprobs:
            return b""
        return _as_events(reply.new_payloads())

    def _absorb_whole(self) -> None:
        try:
            self._reply.absorb(self._stamped(loads(b"".join(self._buffer))))
        except UNUSABLE as error:
            return self._end_unusable(error)
        self._exchange.note_answer()
        return self._on_reply_end()

    def _end_unusable(self, error: Exception) -> None:
        self._exchange.end_unusable(f"its reply cannot be used: {describe(error, with_type=True)}")

    def _whole_events(self) -> list[Event]:
        """Take the data of complete events out of the buffer; engines write it in one line."""
        if self._buffer[-1].rfind(b"\n") < 0:
            return []
        data = b"".join(self._buffer)
        begin, events = 0, []
        while (end := data.find(b"\n", begin)) >= 0:
            if data.startswith(b"data:", begin):
                events.append((data, begin + 5, end))
            begin = end + 1
        self._buffer = [data[begin:]] if begin < len(data) else []
        return events

    # -- the reply has ended ----------------------------------------------------------------

    def _on_reply_end(self) -> None:
        reply, admission = self._reply, self._exchange.admission
        if reply.awaits_prompt_logprobs and not reply.is_aborted:
            self._waits_for_prompt = True  # its prefill engine will reply, or be lost
        elif (
            reply.is_aborted
            and admission is not None
            and not admission.is_aborted
            and not self._is_stuck()
            and self._may_continue()
        ):
            self._exchange.continue_after_abort()
        else:
            self._complete()

    def _is_stuck(self) -> bool:
        """Whether its client has a part that no engine can continue: it gets the abort."""
        why = self._reply.why_refused() if self._reply.has_shown else ""
        if why:
            self._proxy.counts.refuse_failover(why)
        return bool(why)

    def _may_continue(self) -> bool:
        """Whether the abort can come from a pause.

        With an open gate it is the engine's own.  One that aborts again and again, and adds no
        tokens, has a reason that its client has to see.
        """
        num_kept = self._reply.num_kept
        if self._proxy.gate.state is not GateState.OPEN or num_kept > self._num_kept:
            self._num_aborts = 0
        self._num_aborts += 1
        self._num_kept = num_kept
        return self._num_aborts <= self._proxy.config.max_failovers

    def _complete(self) -> None:
        reply = self._reply
        counts = self._proxy.counts
        counts.num_tokens_recomputed += reply.num_recomputed
        counts.num_tokens_kept += reply.num_kept
        try:
            if reply.is_streamed:
                events = _as_events(reply.new_payloads())
            else:
                whole = reply.written()
        except UNUSABLE as error:
            return self._end_unusable(error)
        if reply.is_streamed:
            return self._finish_stream(events)
        return self._send_whole(200, b"application/json", whole)

    def _is_of_pause(self) -> bool:
        """Whether it came after a pause, though the gate let it through before."""
        admission = self._exchange.admission
        if admission is None or self._status != admission.member.of_kind.refusal_in_pause:
            return False
        is_open = self._proxy.gate.state is GateState.OPEN
        return not is_open and not admission.is_aborted and self._may_continue()

    def _on_refusal(self) -> None:
        """Forward a refusal or an unexpected kind of reply of the engine, which is final, unless it
        means that the engine is lost."""
        body = b"".join(self._buffer)
        if self._exchange.is_lost_by(self._status, body):
            return
        if self._exchange.response.has_begun:
            refused = responses.error(502, "engine_refused", body[:200].decode("latin-1"))
            self._exchange.end_with(refused)
        else:
            self._send_whole(self._status, self._content_type, [body])

    def _on_error(self, payload: dict[str, Any]) -> None:
        """The same for an error event."""
        status = status_of(payload)
        if self._exchange.is_lost_by(status, payload):
            return
        if self._reply.is_streamed:
            self._finish_stream(_as_events([payload]))
        else:
            self._send_whole(status, b"application/json", [dumps(payload)])

    # -- to the client ----------------------------------------------------------------------

    def _signature(self) -> Headers:
        admission = self._exchange.admission
        if admission is None:
            return []
        return list(signature(admission.member.engine_id, admission.weight_version))

    def _send_whole(self, status: int, content_type: bytes, body: list[Data]) -> None:
        lines = b"content-type: %s\r\ncontent-length: %d\r\n" % (
            content_type,
            sum(map(len, body)),
        )
        if (admission := self._exchange.admission) is not None:
            lines += signature_lines(admission.member.engine_id, admission.weight_version)
        self._exchange.response.send_whole(status, lines, body)
        self._exchange.finish()

    def _finish_stream(self, events: bytes) -> None:
        self._exchange.response.send_events(events + _DONE, self._signature(), is_end=True)
        self._exchange.finish()


def _as_events(payloads: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + dumps(payload) + b"\n\n" for payload in payloads)
