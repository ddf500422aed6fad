"""One generation request, from its client through the gate to an engine, and to another if needed.

Always true:
- An admitted request leaves the gate exactly once: at its last byte, error or disconnect.
- An engine's failure is never an error of the router, and it names the engine.
- A request is sent a second time only if no byte of a response has reached its client, once, and
  to another engine, through the gate like any other.  A complete reply is final, unless it says
  that the engine is dead.  An engine that refuses the connection never got the request, so that
  does not count.
  (With token failover, a request also continues after its first bytes: see ``token_reader``.)
- Nothing is written before ``start``: earlier requests get their responses first.
- An error in here ends this request, and is raised to none of its callers (``_handle``).
- No token reaches a client of which its request's contract is not known to be fulfilled: a reply
  with a contract of versions is read, and checked before each event and at its end.  What breaks it
  starts over, if its client has nothing of it and served weights may fulfil it, or is a 409.
- It alone has the state of the request.  What reads an engine's reply returns an action, and knows
  nothing of it.

There is no task and no await: client, gate, engine and clock each call it when something happens.
It reads from top to bottom in the order of a request: client, gate, engine, failure, end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVarTuple

from engines.http.reply_check import MOST_IDS
from engines.process.background import start_task
from engines.protocol.adapter_names import Names
from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from engines.protocol.plain_text import one_line
from rollout.router.continuation.contracts import Versions, versions_of, why_no_kind
from rollout.router.continuation.core import UNUSABLE
from rollout.router.continuation.dialects.table import ROUTES
from rollout.router.continuation.fatal_values import why_fatal_prompt
from rollout.router.continuation.named_weights import NOT_NAMED, NamedWeights
from rollout.router.gate.gate import Admission, ConnectionFailure, GateState, Refusal, Waiter
from rollout.router.http import responses
from rollout.router.http.engine_connection import SentRequest
from rollout.router.http.head_cache import ReplyHead, RequestHead
from rollout.router.http.headers import signature_lines
from rollout.router.http.incoming_body import IncomingBody
from rollout.router.http.reading_process import MOST_BYTES_ON_LOOP, ReadingFailed
from rollout.router.http.request import Request
from rollout.router.http.responses import RouterResponse
from rollout.router.http.routes import COMPLETION_PATHS, TOKENIZER_PATHS
from rollout.router.proxy.client_response import ClientResponse
from rollout.router.proxy.context import Proxy, log_router_error
from rollout.router.proxy.engine_errors import (
    first_error,
    is_own_error,
    read_error,
    status_of,
    why_lost,
)
from rollout.router.proxy.lost_engines import LostEngines
from rollout.router.proxy.prefill_decode import (
    Lost,
    NoConnection,
    NoPrompt,
    PrefillEvent,
    PrefillReply,
    Prompt,
    bootstrap_fields,
    why_not_together,
)
from rollout.router.proxy.reader_choice import (
    ReadBody,
    is_read,
    kind_of_unread,
    read_body,
    read_checked,
    read_for_adapter,
    read_long_body,
    wanted_of,
)
from rollout.router.proxy.token_reader import (
    FINAL,
    OPEN,
    Action,
    Again,
    Broken,
    Context,
    Finish,
    Refused,
    TokenReader,
    Unusable,
    Write,
)
from rollout.rules.contract import NO_CONTRACT, Contract, Fit
from rollout.rules.routing import NO_HINT, Backend

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")
MAX_FAILOVERS = 8
"""Engines that one request may lose before it fails."""
_WITH_BODY_UNREAD = (408, 413)
# An engine ends an aborted request in a tenth of that, unless it is busy or knows another id.
_ABORTED_WITHIN_S = 0.25
_TARGET_CHARACTERS = 200
_NOTHING: Mapping[str, str | int] = {}


@dataclass(eq=False, slots=True)
class Exchange:
    """A request on its way through ``proxy``.

    An engine's reply is passed on as it is, unless a ``TokenReader`` reads its tokens.

    Attributes:
        response: what goes to the client.
        client_host: address of its client.
        admission: the request's place on an engine, while it has one.
        engine_id: of the last engine it was sent to.
        upstream: the request on its connection to an engine.
        is_decoding: the reply has to come without its chunks.
        began_s: when the request's turn on its connection began.
        is_aborted: its end was requested, so it is sent to no further engine.
    """

    _proxy: Proxy
    response: ClientResponse
    _head: RequestHead
    client_host: str = ""
    is_decoding: bool = False
    began_s: float = 0.0
    is_aborted: bool = False
    admission: Admission | None = None
    engine_id: str = ""
    upstream: SentRequest | None = None
    _incoming: IncomingBody | None = None
    _body: bytes = b""
    _is_started: bool = False
    _is_whole: bool = False
    _is_done: bool = False
    _is_over: bool = False
    _refusal: responses.RouterResponse | None = None
    _reading: asyncio.Future[ReadBody] | None = None
    _request: Request | None = None
    _named: NamedWeights = NOT_NAMED
    _pinned: Names = ()
    _contract: Contract = NO_CONTRACT
    _is_checked: bool = False  # the contract limits versions
    _kept: Versions | None = None  # of the tokens of earlier engines
    _num_starts: int = 0  # because tokens did not fulfil the contract
    _tokens: TokenReader | None = None
    _entered: Admission | Refusal | Waiter | None = None  # until it is ``admission``
    _timer: asyncio.TimerHandle | None = None
    _num_attempts: int = 0
    _failure: ConnectionFailure | None = None
    _logprob_kind: LogprobKind | None = None  # of the current engine's reply
    _status: int = 0  # of a reply that says nothing of its engine so far
    _why_ended: str = ""  # its client has a part that no engine can go on with
    _lost: LostEngines | None = None
    _prefill: PrefillReply | None = None

    def __post_init__(self) -> None:
        self.is_decoding = self._head.is_http_1_0

    # -- the client's side ------------------------------------------------------------------

    def _handle(self, step: Callable[[*Ts], None], *arguments: *Ts) -> None:
        """Do what has happened; an error in it ends this request, and is not raised."""
        try:
            step(*arguments)
        except Exception as error:
            self.on_router_error(error)

    def start(self) -> None:
        """All responses before this one are complete."""
        self._is_started = True
        self._handle(self._start)

    def start_whole(self, body: bytes) -> None:
        """The same, with all of the request's body."""
        self._body = body
        self._is_started = self._is_whole = True
        try:  # as ``_handle`` does, at less cost for each request
            self._start()
        except Exception as error:
            self.on_router_error(error)

    def _start(self) -> None:
        self.began_s = self._proxy.now_s()
        self._proxy.live.add(self)
        if (response := self._head.refusal or self._refusal) is not None:
            self._end_with(response)
        elif (refusal := self._proxy.gate.would_refuse()) is not None:
            self._end_with(responses.refused(refusal))
        elif self._is_whole:
            self._begin()
        elif self._head.expects_continue:
            self.response.send_continue()

    def feed(self, data: bytes) -> None:
        """More of the request's body."""
        self._handle(self._feed, data)

    def _feed(self, data: bytes) -> None:
        if self._is_done or self._refusal is not None:
            return
        if self._incoming is None and not self._body:
            self._body = data  # of most requests this is all
            return
        self._wait_for_more()
        proxy, body = self._proxy, self._incoming
        if body is None:
            return
        if body.num_bytes + len(data) > proxy.config.max_body_bytes:
            self._refuse(self._too_large())
        elif why := body.add(data, proxy.now_s()):
            self._refuse(responses.refused(Refusal(why, proxy.gate.state)))

    def wait_for_more(self) -> None:
        """What has arrived is not all of the request."""
        self._handle(self._wait_for_more)

    def _wait_for_more(self) -> None:
        if self._incoming is not None or self._is_done or self._refusal is not None:
            return
        first, self._body = self._body, b""
        bodies, now_s = self._proxy.bodies, self._proxy.now_s()
        self._incoming = bodies.begin(self.client_host, self.late, now_s)
        if first:
            self._feed(first)

    def late(self) -> None:
        """The request's body arrives too slowly."""
        self._handle(self._refuse, responses.late_body())

    def end_of_request(self) -> None:
        """All of the request has arrived."""
        self._handle(self._end_of_request)

    def _end_of_request(self) -> None:
        if self._incoming is not None:
            self._body, self._incoming = self._incoming.take(), None
        self._is_whole = True
        if self._is_started and not self._is_done:
            self._begin()

    def client_left(self) -> None:
        """The client has closed its connection."""
        self._handle(self._client_left)

    def _client_left(self) -> None:
        if self._is_done:
            return
        if self._is_started:
            self._proxy.counts.num_clients_left += 1
        self._end()

    def close_after(self) -> None:
        self.response.is_last = True

    def write_paused(self) -> None:
        if self.upstream is not None:
            self._handle(self.upstream.pause)

    def write_resumed(self) -> None:
        if self.upstream is not None:
            self._handle(self.upstream.resume)

    def _too_large(self) -> responses.RouterResponse:
        message = f"the body is over {self._proxy.config.max_body_bytes} bytes"
        return responses.error(413, "too_large", message)

    def _refuse(self, response: responses.RouterResponse) -> None:
        """Send this response, now or when it is this request's turn."""
        self._refusal = response
        self._stop_receiving()
        if self._is_started:
            self._end_with(response)

    # -- through the gate -------------------------------------------------------------------

    def _begin(self) -> None:
        """All of the request has arrived, and it is its turn."""
        body, self._body = self._body, b""
        proxy, head = self._proxy, self._head
        wanted, is_post = wanted_of(proxy, head), head.method == b"POST"
        if len(body) > proxy.config.max_body_bytes:
            self._refuse(self._too_large())
        elif len(body) <= MOST_BYTES_ON_LOOP or not is_read(wanted, body):
            texts = head.contract_texts
            self._has_read(body, read_body(wanted, body, is_post=is_post, texts=texts))
        else:
            arguments = (wanted, body, is_post, head.contract_texts)
            reading = proxy.reading.call(read_long_body, *arguments, client=self.client_host)
            self._reading = start_task(reading, "router-read")
            self._reading.add_done_callback(
                lambda reading: self._handle(self._has_read_long, body, reading)
            )

    def _has_read_long(self, body: bytes, reading: asyncio.Future[ReadBody]) -> None:
        if self._is_done or reading.cancelled():
            return
        self._reading = None
        try:
            read = reading.result()
        except ReadingFailed as error:
            self._end_with(responses.refused(Refusal(str(error), self._proxy.gate.state)))
        else:
            self._has_read(body, read)

    def _has_read(self, body: bytes, read: ReadBody) -> None:
        """The body was read: what its reply is read with, if it is, and on to the gate."""
        proxy, self._named = self._proxy, read.named
        if read.contract is not NO_CONTRACT:
            self._contract, self._is_checked = read.contract, read.contract.has_versions
        whole = body if read.fields.body is None else read.fields.body
        if read.named.problem or read.why_not:
            is_lacking = not read.named.problem and read.lacks_route
            problem = responses.error(
                *((404, "not_found") if is_lacking else (400, "bad_request")),
                read.named.problem or read.why_not,
            )
            self._end_with(problem)
            return
        tokens, fields = None, read.fields
        if read.reply is not None:
            proxy.reads_tokens.set()
            read.reply.route, read.reply.decode = ROUTES[self._head.route.path], proxy.decode
            tokens = TokenReader(read.reply)
        if tokens is None and proxy.gate.adapters is not None and not self._named.is_for_base:
            tokens = read_for_adapter(whole, self._named)
        elif tokens is None and read.is_stream_checked is not None:
            tokens = read_checked(whole, is_streamed=read.is_stream_checked)
        if tokens is not None:
            if self._is_checked:
                tokens.may_show = self._may_show
            self.is_decoding = True
        self._tokens = tokens
        self._request = Request(self._head, whole, fields, names=fields.names)
        self._enter("")

    def _enter(self, excluded_engine: str) -> None:
        request = self._request
        assert request is not None
        proxy = self._proxy
        self._entered = decision = proxy.gate.enter(
            rid=request.fields.rid,
            num_bytes=len(request.body),
            excluded_engine=excluded_engine,
            hint=proxy.hint_of(request) if proxy.wants_hint else NO_HINT,
            names=self._pinned or self._named.names,
            prefers=self._prefers(),
            contract=self._contract,
            requires=None if self._contract.logprob_kind is None else self._gives_kind,
        )
        if isinstance(decision, Waiter):
            decision.on_decision = self.decided
            self._timer = proxy.call_later(proxy.config.hold_timeout_s, proxy.gate.expire, decision)
        else:
            self._decided(decision)

    def _prefers(self) -> Callable[[Backend], bool] | None:
        """Engines that can go on with the tokens so far; None: there are none."""
        reply = None if self._tokens is None else self._tokens.reply
        if reply is None or not (reply.base.num and reply.wants_logprobs):
            return None
        return lambda member: reply.kind_by(member.logprobs) is reply.logprob_kind

    def decided(self, decision: Admission | Refusal) -> None:
        """The gate has decided on the held request."""
        self._handle(self._decided, decision)

    def _decided(self, decision: Admission | Refusal) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if isinstance(decision, Admission):
            self.admission, self._entered = decision, None
            if not self._pinned:
                self._pin(decision.names)
            self._send(decision)
        elif decision.is_abort:
            self._end_aborted(decision)
        elif decision.unmet:
            self._proxy.counts.refuse_contract(decision.unmet)
            self._end_with(responses.refused(decision))
        elif decision.unfit:
            self._end_without_kind(decision.unfit)
        elif self._failure is None:
            self._end_with(responses.refused(decision))
        else:
            self._end_with(responses.engine_failed(self._failure))

    # -- its contract -----------------------------------------------------------------------

    def _kind_by(self, rule: LogprobRule) -> LogprobKind | None:
        """The kind of an engine's log-probs for this request; None if it is not known."""
        request, reply = self._request, None if self._tokens is None else self._tokens.reply
        kind = None if reply is None else reply.kind_by(rule)
        if kind is not None or request is None:
            return kind
        max_bytes = self._proxy.config.max_read_bytes
        path, names = self._head.route.path, request.names
        return kind_of_unread(path, request.body, rule, max_bytes, names)

    def _gives_kind(self, member: Backend) -> bool:
        return self._kind_by(member.logprobs) is self._contract.logprob_kind

    def _end_without_kind(self, unfit: tuple[Backend, ...]) -> None:
        wanted = self._contract.logprob_kind
        assert wanted is not None
        kinds = {to.engine_id: (self._kind_by(to.logprobs), to.logprobs) for to in unfit}
        self._proxy.counts.refuse_contract("logprob_kind")
        self._end_with(responses.no_such_kind(why_no_kind(wanted, kinds)))

    def _served(self) -> int | None:
        """The version that answers a new request with the client's names."""
        return self._proxy.gate.version_for(self._named.names)

    def _versions(self) -> Versions | None:
        """Those that the tokens so far can have; None without any."""
        tokens, admission = self._tokens, self.admission
        if tokens is None or admission is None:
            return self._kept
        is_open = self._proxy.gate.state is GateState.OPEN
        served, admitted = self._served(), admission.weight_version
        if any(self._pinned):  # each name is of one version
            served = self._proxy.gate.version_for(self._pinned)
            admitted = admitted if len(self._pinned) == 1 else None
        now = versions_of(tokens.reply.reported, admitted, served, is_open=is_open)
        return now.joined(self._kept)

    def _why_broken(self, versions: Versions | None) -> str:
        """Why tokens of these versions do not fulfil the contract; empty if they do."""
        if versions is None:
            return ""
        return self._contract.why_broken(*versions, self._served_with(versions))

    def _served_with(self, versions: Versions | None) -> int | None:
        """The newest version: engines have it before the gate opens."""
        served, newest = self._served(), None if versions is None else versions.newest
        return max(served, newest) if served is not None and newest is not None else served

    def _may_show(self) -> bool:
        return not self._why_broken(self._versions())

    def _end_if_broken(self) -> None:
        """What is already broken needs no more tokens."""
        versions = self._versions()
        if versions is None or None in versions:
            return
        if why := self._why_broken(versions):
            self._break_contract(why)

    def _keep_versions(self) -> None:
        """Note those of the tokens so far, before their engine is left."""
        tokens = self._tokens
        if tokens is None or not self._is_checked:
            return
        with suppress(*UNUSABLE):
            tokens.reply.read_all()
        if tokens.reply.has_tokens_of_engine:
            self._kept = self._versions()

    def _keeps_contract(self, admission: Admission) -> bool:
        """Whether the request can go to this engine, with or without the tokens kept so far."""
        new = Versions(admission.weight_version, admission.weight_version)
        why = self._why_broken(new.joined(self._kept))
        if why and not self._why_broken(new) and not self.response.has_begun:
            self._forget_tokens()
            return True
        if why:
            self._break_contract(why)
        return not why

    def _forget_tokens(self) -> None:
        self._kept = None
        if self._tokens is not None:
            self._tokens.start_over()

    def _break_contract(self, why: str) -> None:
        """These tokens do not fulfil the contract: start over, or end."""
        served = self._served_with(self._versions())
        if (
            self.is_aborted
            or self.admission is None
            or self.response.has_begun
            or self._num_starts >= MAX_FAILOVERS
            or self._contract.fit(served) is Fit.NEVER
        ):
            self._proxy.counts.refuse_contract("tokens")
            self._end_with(responses.unmet(why, served))
            return
        self._num_starts += 1
        self._forget_tokens()
        self._failure = self._taken_away(why)
        self._proxy.gate.unpin(self._pinned)
        self._pinned = ()
        self._enter("")

    def _pin(self, names: Names) -> None:
        """Stay with these weights to the end, also on another engine."""
        assert self._request is not None
        self._request.last = self._named.member(names)
        self._pinned, gate = names, self._proxy.gate
        gate.pin(names)
        if self._tokens is not None and any(names):
            self._tokens.named = replace(self._named, names=names)

    # -- the engine's side ------------------------------------------------------------------

    def _send(self, admission: Admission) -> None:
        request, tokens = self._request, self._tokens
        assert request is not None
        self.engine_id = admission.member.engine_id
        admission.on_evicted = self.evicted
        admission.on_aborted = self.aborted
        self._num_attempts += 1
        if self._failure is not None:
            self._proxy.counts.num_retried += 1
        if self._is_checked and not self._keeps_contract(admission):
            return
        self._name_for_engine(request, admission)
        pool, endpoint, kind = self._proxy.pool, admission.member.endpoint, admission.member.of_kind
        version, more = admission.weight_version, _NOTHING
        namespace = self._proxy.namespace(version)
        is_one_of_pair = admission.partner is not None
        if (is_one_of_pair or admission.member.needs_names) and (
            why := _why_refused(request, admission)
        ):
            self._end_with(responses.error(400, "bad_request", why))
            return
        if tokens is not None:
            tokens.reply.vocabulary = admission.member.vocabulary or MOST_IDS
        if (end := self._follow(request, admission.member.logprobs)) is not None:
            self._end_with(end)
            return
        if admission.partner is not None:
            more = bootstrap_fields(admission.partner)
            self._prefill = PrefillReply(
                self._on_prefill,
                self.on_router_error,
                wants_prompt=tokens is not None and tokens.await_prompt(),
            )
            place, key = admission.partner.endpoint, admission.partner.access.sampling
            parts = request.parts_for(place, namespace, more, key=key)
            pool.send(self._prefill, place, parts)
        if tokens is not None:
            request.body = tokens.body(version, kind.dialect)
        key = admission.member.access.sampling
        parts = request.parts_for(endpoint, namespace, more, kind, key)
        pool.send(self, endpoint, parts, is_head=self._head.method == b"HEAD")

    def _name_for_engine(self, request: Request, admission: Admission) -> None:
        """Give the request an id of its own at this engine, by which an abort names it there."""
        request.name_for_engine()
        sent_as, rids = request.sent_as, request.fields.rids
        if isinstance(sent_as, tuple):
            admission.prompts = dict(zip(rids, sent_as, strict=True))
        else:
            admission.sent_as = sent_as
            if self._tokens is not None:
                self._tokens.reply.rid, self._tokens.reply.sent_as = request.rid, sent_as

    def _follow(self, request: Request, rule: LogprobRule) -> RouterResponse | None:
        """Note the kind of the engine's log-probs; the client's response, if it ends that."""
        reply, proxy = None if self._tokens is None else self._tokens.reply, self._proxy
        if reply is None or (kind := reply.kind_by(rule)) is None:
            path, max_bytes = self._head.route.path, proxy.config.max_read_bytes
            self._logprob_kind = kind_of_unread(path, request.body, rule, max_bytes, request.names)
            return None
        if not reply.goes_on_with(kind):
            proxy.counts.refuse_failover("logprob_kind")
            if self.response.has_begun:
                why = (
                    f"the log-probs of its tokens are {reply.logprob_kind}, and those of engine "
                    f"{self.engine_id} would be {kind}"
                )
                assert self._failure is not None  # it has had another engine
                return responses.engine_failed(self._failure, why)
        reply.follow_with(kind)
        self._logprob_kind = kind
        return None

    def on_reply(self, head: ReplyHead, length: bytes, is_alone: bool) -> None:
        admission, response, tokens = self.admission, self.response, self._tokens
        assert admission is not None
        if tokens is not None:
            tokens.begin(head)
            self._status = head.status
        else:
            assert response is not None
            response.begin(head, length, self._signed())
            if self._head.route.path in COMPLETION_PATHS:
                self._status = head.status
            # After a length the body follows at once, so the head can wait for it.
            if is_alone and (head.is_chunked or head.is_until_close):
                response.pass_on(b"", is_end=False)
                return
        if self.response.is_write_paused and self.upstream is not None:
            self.upstream.pause()

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        if self._tokens is not None:
            self._read(self._tokens, data, is_end)
            return
        if self._status:
            status, self._status = self._status, 0
            if self._is_lost_by_beginning(status, data):
                return
        self.response.pass_on(data, is_end=is_end)
        if is_end:
            self.finish()

    def _read(self, tokens: TokenReader, data: bytes, is_end: bool) -> None:
        action = tokens.take(data, self._context() if is_end else None)
        if self._status and tokens.has_answered:
            self._status = 0
            self._note_answer()
        if action is not None:
            self._do(action)
        elif tokens.may_show is not None and not is_end:
            self._end_if_broken()

    def _do(self, action: Action) -> None:
        """What the reader of an engine's reply wants."""
        match action:
            case Write(events):
                self.response.send_events(events, self._signed())
            case Finish():
                self._end_reply(action)
            case Again(why):
                self._continue_elsewhere(why)
            case Unusable(why):
                self._end_unusable(why)
            case Broken(why):
                self._lose_engine(why)
            case Refused(status, error, end):
                if self._is_lost_by(status, error):
                    return
                if status < 400 and self._is_checked:
                    self._end_unusable("sent a reply of another form, whose versions are unknown")
                    return
                if end.content_type is not None and self.response.has_begun:
                    why = bytes(end.body[0])[:200].decode("latin-1")
                    self._end_with(responses.error(502, "engine_refused", why))
                else:
                    self._send_end(end)

    def _context(self) -> Context:
        """What the end of a reply depends on, besides the reply."""
        admission, tokens, lost = self.admission, self._tokens, self._lost
        if admission is None or tokens is None or self.is_aborted:
            return FINAL
        is_open = self._proxy.gate.state is GateState.OPEN
        if lost is not None and not lost.may_be_aborted(
            MAX_FAILOVERS, is_open=is_open, num_kept=tokens.reply.num_kept
        ):
            return FINAL
        return OPEN if is_open else Context(True, admission.member.of_kind.refusal_in_pause)

    def _continue_elsewhere(self, why: str) -> None:
        """The engine was paused; the gate decides when and where the request continues."""
        assert self._tokens is not None
        self._lost = self._lost or LostEngines()
        is_open = self._proxy.gate.state is GateState.OPEN
        self._lost.add_abort(is_open=is_open, num_kept=self._tokens.reply.num_kept)
        self._enter_again(self._taken_away(why), excluded_engine="")

    def _end_reply(self, end: Finish) -> None:
        tokens, counts = self._tokens, self._proxy.counts
        assert tokens is not None
        if self._is_checked and (why := self._why_broken(self._versions())):
            self._break_contract(why)
            return
        counts.num_tokens_recomputed += tokens.reply.num_recomputed
        counts.num_tokens_kept += tokens.reply.num_kept
        if end.why_not_continued:
            counts.refuse_failover(end.why_not_continued)
        self._send_end(end)

    def _send_end(self, end: Finish) -> None:
        if end.content_type is None:
            self.response.send_events(end.body[0], self._signed(), is_end=True)
        else:
            self.response.send_whole(end.status, end.content_type, end.body, self._signed())
        self.finish()

    def _signed(self) -> bytes:
        """Lines of a head that name the engine, its weights and the kind of its log-probs.

        A request that ends at the gate has tokens of engines, and weights of none.
        """
        tokens = self._tokens
        if tokens is not None and (ends := tokens.reply.end_versions) is not None:
            return signature_lines(self.engine_id, ends[1], self._logprob_kind, ends[0])
        version = None if self.admission is None else self.admission.weight_version
        return signature_lines(self.engine_id, version, self._logprob_kind)

    def _on_prefill(self, event: PrefillEvent) -> None:
        """What has happened at the prefill engine of a pair."""
        match event:
            case Prompt(logprobs):
                if self._tokens is not None:
                    action = self._tokens.take_prompt(logprobs, self._context())
                    if action is not None:
                        self._do(action)
            case Lost(why, was_sent):
                self._lose_engine(why, was_sent=was_sent, is_partner=True)
            case NoConnection(why):
                self.on_no_connection(why)
            case NoPrompt(why):
                self._end_unusable(why, is_partner=True)

    def _is_lost_by_beginning(self, status: int, data: bytes) -> bool:
        if status != 200:
            return self._is_lost_by(status, data)
        if (error := first_error(data)) is not None:
            return self._is_lost_by(status_of(error), error)
        self._note_answer()
        return False

    def may_reconnect(self) -> bool:
        return self.admission is not None and self._proxy.gate.still_serves(self.admission)

    # -- when an engine fails ---------------------------------------------------------------

    def on_no_connection(self, why: str) -> None:
        self._end_with(responses.refused(Refusal(why, self._proxy.gate.state)))

    def on_engine_lost(self, why: str, *, was_sent: bool = True) -> None:
        tokens = self._tokens
        end = None if tokens is None else tokens.take_loss(self._context())
        if end is not None:
            self._do(end)
        elif tokens is None or not tokens.waits_for_prompt:
            self._lose_engine(why, was_sent=was_sent)

    def _lose_engine(self, why: str, *, was_sent: bool = True, is_partner: bool = False) -> None:
        admission, tokens = self.admission, self._tokens
        assert admission is not None
        proxy, target = self._proxy, self._operation
        proxy.counts.num_engine_failures += 1
        self._lost = self._lost or LostEngines()
        has_tokens = tokens is not None and tokens.reply.has_tokens_of_engine
        leaves_routing = self._lost.add(was_sent=was_sent, has_tokens=has_tokens)
        if not was_sent:
            self._num_attempts -= 1
        failure = proxy.gate.report_failure(
            admission, target, why, is_partner=is_partner, leaves_routing=leaves_routing
        )
        self._log(failure, "failed")
        if self.is_aborted:
            self._end_aborted()
            return
        self._keep_versions()
        self.drop()
        self._leave()
        if self._lost.num_in_vain == 1 and (why := self._why_fatal()):
            message = f"engine {failure.engine_id} was lost with this request: {why}"
            self._end_with(responses.error(400, "bad_request", message))
            return
        self._fail_over(failure)

    def _why_fatal(self) -> str:
        """What in the prompt may have ended the engine; empty for nothing."""
        request, proxy = self._request, self._proxy
        if request is None or len(request.body) > proxy.config.max_read_bytes:
            return ""
        return why_fatal_prompt(request.body, proxy.gate.members.vocabulary)

    def _note_answer(self) -> None:
        """The engine has begun to answer, and not with an error."""
        if self.admission is not None:
            self._proxy.gate.note_reply(self.admission, is_error=False)

    def _is_lost_by(self, status: int, error: bytes | Any) -> bool:
        """Judge the engine by its error; True if that means that it is lost, and was handled.

        Args:
            error: its payload, or the body that has it.
        """
        admission = self.admission
        if admission is None or not is_own_error(status):
            return False
        self._proxy.gate.note_reply(admission, is_error=True)
        why = why_lost(
            read_error(error) if isinstance(error, bytes) else error,
            outlives_its_core=admission.member.of_kind.outlives_its_core,
        )
        if why:
            self._lose_engine(why)
        return bool(why)

    def _end_unusable(self, why: str, *, is_partner: bool = False) -> None:
        """A complete reply cannot be used.  The request may be the cause, so the engine stays."""
        admission = self.admission
        assert admission is not None
        member = admission.partner if is_partner and admission.partner else admission.member
        self._end_with(self.unusable(why, member.engine_id))

    def unusable(self, why: str, engine_id: str = "") -> RouterResponse:
        """What the client of an unusable reply gets, which is counted.

        Args:
            engine_id: empty for the last engine.
        """
        self._proxy.counts.num_unusable_replies += 1
        target = self._operation
        failure = ConnectionFailure(engine_id or self.engine_id, target, why, False, 0)
        self._log(failure, "sent an unusable reply to")
        return responses.engine_failed(failure)

    @property
    def _operation(self) -> str:
        """Where it goes, for messages."""
        return one_line(self._head.route.target.decode("ascii", "replace"), _TARGET_CHARACTERS)

    def _log(self, failure: ConnectionFailure, what: str) -> None:
        method, rid = self._head.method.decode(), self._request.rid if self._request else ""
        logger.warning(
            "engine %s %s %s %s: %s",
            failure.engine_id,
            what,
            method,
            failure.operation,
            failure.message,
            extra={"engine_id": failure.engine_id, "rid": one_line(rid)},
        )

    def evicted(self, why: str) -> None:
        """The owner of the engines reports that this engine is lost."""
        self._handle(self._evicted, why)

    def _evicted(self, why: str) -> None:
        self._proxy.counts.num_cut += 1
        if self.is_aborted:
            self._end_aborted()
        else:
            self._fail_over(self._taken_away(why))

    def _taken_away(self, why: str) -> ConnectionFailure:
        """Leave an engine that did not fail this request, so the attempt does not count."""
        admission = self.admission
        assert admission is not None
        engine_id, target = admission.member.engine_id, self._operation
        self._keep_versions()
        self.drop()
        self._leave()
        self._num_attempts -= 1
        return ConnectionFailure(engine_id, target, why, False, 0)

    def _fail_over(self, failure: ConnectionFailure) -> None:
        """Try another engine, if this request may be sent once more."""
        most = 1 if self._tokens is None else MAX_FAILOVERS
        why_not = "" if self._lost is None else self._lost.why_not_again
        if self._num_attempts > most or why_not:
            self._end_with(responses.engine_failed(failure, why_not))
        else:
            self._enter_again(failure, excluded_engine=failure.engine_id)

    def _enter_again(self, failure: ConnectionFailure, *, excluded_engine: str) -> None:
        self._failure = failure
        if not self._may_go_on():
            self._end_with(responses.engine_failed(failure, self._why_ended))
        else:
            self.response.discard_head()
            self._enter(excluded_engine)

    def _may_go_on(self) -> bool:
        """Whether another engine can complete what its client has; its tokens are kept, if so."""
        tokens, counts = self._tokens, self._proxy.counts
        if tokens is None:
            return not self.response.has_begun
        why = tokens.lose_engine()
        if not tokens.reply.base.num:
            self._kept = None
        if why:
            counts.refuse_failover(why)
            if tokens.reply.has_shown:
                self._why_ended = tokens.reply.in_words(why)
                return False
        counts.num_failovers += 1
        return True

    # -- deadline and stop ------------------------------------------------------------------

    def expire(self, after_s: float) -> None:
        """The request has taken too long."""
        self._handle(self._expire, after_s)

    def _expire(self, after_s: float) -> None:
        if self._is_done:
            return
        where = self.admission.member.engine_id if self.admission is not None else "the router"
        message = f"no complete reply after {after_s:.0f} s, the last of them on {where}"
        self._proxy.counts.num_expired += 1
        self._end_with(responses.error(504, "deadline", message))

    # -- an abort ---------------------------------------------------------------------------

    def aborted(self) -> None:
        """Its end was requested: its engine gets an order, and has little time for it."""
        self._handle(self._aborted)

    def _aborted(self) -> None:
        if not (self._is_done or self.is_aborted):
            self.is_aborted = True
            self._timer = self._proxy.call_later(_ABORTED_WITHIN_S, self._handle, self._end_aborted)

    def _end_aborted(self, refusal: Refusal | None = None) -> None:
        """Leave the engine, which ends its work, and then reply with the tokens so far.

        Args:
            refusal: what the client gets where there are none.
        """
        if self._is_done:
            return
        end = None if self._tokens is None else self._tokens.abort()
        if end is None:
            self._end_with(responses.refused(refusal or self._proxy.gate.aborted("aborted")))
        else:
            self.drop()  # no client learns of an end that its engine may not know
            self._end_reply(end)

    def stop(self) -> None:
        """The router stops now."""
        self._handle(self._stop)

    def _stop(self) -> None:
        if self._is_done:
            return
        if self.response.has_begun:
            self._end()
            self._is_over = True
            self.response.cut(is_now=True)
        else:
            stopping = Refusal("the router is stopping", GateState.CLOSED)
            self._end_with(responses.refused(stopping))

    # -- how it ends ------------------------------------------------------------------------

    def finish(self) -> None:
        """The response is complete."""
        self._proxy.latencies.observe(
            self._head.route.path, self.engine_id, self._proxy.now_s() - self.began_s
        )
        self._end()
        self._is_over = True
        self.response.finish()

    def _end_with(self, response: responses.RouterResponse) -> None:
        """Send this response, or break off the one that has begun."""
        self._end()
        self._is_over = True
        if self.response.has_begun:
            self._proxy.counts.num_broken_replies += 1
            self.response.break_off(response)
        else:
            is_unread = not self._is_whole and (
                self._head.expects_continue or response.status in _WITH_BODY_UNREAD
            )
            self.response.send(response, is_unread=is_unread)

    def on_router_error(self, error: BaseException) -> None:
        """An error of the router's own: end this request, whatever state it is in."""
        was_over, self._is_over = self._is_over, True
        with suppress(Exception):
            log_router_error(f"{self._head.method!r} {self._operation!r}", error)
        for step in (self.drop, self._leave, self._end):
            with suppress(Exception):
                step()
        self._refusal = responses.router_error(type(error).__name__)
        if was_over:  # the error came as its end was written
            self._cut()
        elif self._is_started:  # else ``start`` sends it, in its turn
            try:
                self._end_with(self._refusal)
            except Exception:
                self._cut()

    def _cut(self) -> None:
        with suppress(Exception):
            self.response.cut()

    def drop(self) -> None:
        """Close the connections that carry the request, which ends the engines' work on it."""
        if self.upstream is not None:
            self.upstream.drop()
            self.upstream = None
        if self._prefill is not None:
            self._prefill.drop()
            self._prefill = None

    def _leave(self) -> None:
        """Give the place on the engine back."""
        if (admission := self.admission) is not None:
            admission.on_evicted = admission.on_aborted = None
            self._proxy.gate.leave(admission)
            self.admission = None

    def _stop_receiving(self) -> None:
        self._body = b""
        if self._incoming is not None:
            self._incoming.drop()
            self._incoming = None

    def _end(self) -> None:
        self._is_done = True
        self.drop()
        self._leave()
        self._tokens = None
        pinned, self._pinned = self._pinned, ()
        self._proxy.gate.unpin(pinned)
        if self._timer is not None:
            self._timer.cancel()
        if self._entered is not None and not isinstance(self._entered, Refusal):
            self._proxy.gate.leave(self._entered)
        self._entered = None
        self._body = b""
        if self._incoming is not None:
            self._stop_receiving()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._request = None
        self._proxy.live.discard(self)


def _why_refused(request: Request, admission: Admission) -> str:
    """Why this engine must not get the request, although it would answer; empty if it may."""
    path = request.head.route.path
    has_name = request.fields.adds_extra_key or path in TOKENIZER_PATHS
    if admission.member.needs_names and not has_name:
        return (
            f"{path}: a request there has no name of its weight version, and engine "
            f"{admission.member.engine_id} has a store of prefixes that no push clears; use "
            f"{', '.join(sorted(COMPLETION_PATHS))}, or engines without that store"
        )
    return why_not_together(request.body) if admission.partner is not None else ""
