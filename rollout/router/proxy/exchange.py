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
- An error in here ends this request, and is raised to none of its callers: ``on`` takes what
  client, gate and clock do, and the connection to an engine hands its errors to
  ``on_router_error``.
- No token reaches a client of which its request's contract is not known to be fulfilled: a reply
  with a contract of versions is read, and checked before each event and at its end.  What breaks it
  starts over, if its client has nothing of it and served weights may fulfil it, or is a 409.
- It alone has the state of the request.  What reads an engine's reply returns an action, and knows
  nothing of it.

There is no task and no await: client, gate, engine and clock each call it when something happens.
It reads from top to bottom in the order of a request: client, gate, engine, failure, end.  What it
has at a time is its stage (``stages``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engines.http.reply_check import MOST_IDS
from engines.process.background import start_task
from engines.protocol.adapter_names import Names
from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from engines.protocol.plain_text import one_line
from rollout.router.continuation.contracts import Versions, versions_of, why_no_kind
from rollout.router.continuation.core import UNUSABLE
from rollout.router.continuation.dialects.table import ROUTES
from rollout.router.continuation.fatal_values import why_fatal_prompt
from rollout.router.gate.gate import Admission, ConnectionFailure, GateState, Refusal, Waiter
from rollout.router.http import responses
from rollout.router.http.engine_connection import SentRequest
from rollout.router.http.head_cache import ReplyHead, RequestHead
from rollout.router.http.headers import signature_lines
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
    kind_of_unread,
    read_body,
    read_checked,
    read_for_adapter,
    read_long_body,
    wanted_of,
)
from rollout.router.proxy.stages import (
    ARRIVED,
    ENDED,
    ENDED_EARLY,
    Aborted,
    AbortOver,
    Arrived,
    BodyRead,
    ClientLeft,
    Decided,
    End,
    Ended,
    Event,
    Evicted,
    Expired,
    Flow,
    Generation,
    Held,
    Late,
    OnEngine,
    Pause,
    Piece,
    Receiving,
    Stage,
    Stopped,
    Turn,
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
from rollout.rules.contract import NO_CONTRACT, Fit
from rollout.rules.routing import NO_HINT, Backend

logger = logging.getLogger(__name__)

MAX_FAILOVERS = 8
"""Engines that one request may lose before it fails."""
_WITH_BODY_UNREAD = (408, 413)
# An engine ends an aborted request in a tenth of that, unless it is busy or knows another id.
_ABORTED_WITHIN_S = 0.25
_TARGET_CHARACTERS = 200
_BASE: Names = (None,)  # no adapter answers
_NOTHING: Mapping[str, str | int] = {}
_AT_GATE, _MAY_LACK = (OnEngine, Held), (Receiving, Ended)


@dataclass(eq=False, slots=True)
class Exchange:
    """A request on its way through ``proxy``.

    An engine's reply is passed on as it is, unless a ``TokenReader`` reads its tokens.

    Attributes:
        response: what goes to the client.
        client_host: address of its client.
        stage: where it is, with what it has there.
        upstream: the request on its connection to an engine.
        is_decoding: the reply has to come without its chunks.
        began_s: when the request's turn on its connection began.
        unread: lines of its head that the router passes on.
    """

    _proxy: Proxy
    response: ClientResponse
    _head: RequestHead
    client_host: str = ""
    stage: Stage = ARRIVED
    upstream: SentRequest | None = None
    is_decoding: bool = False
    began_s: float = 0.0
    unread: bytes = b""

    def on(self, event: Event) -> None:
        """Take what has happened; an error in it ends this request, and is not raised."""
        try:
            match self.stage, event:
                case Receiving() as receiving, Turn():
                    receiving.is_turn = True
                    if self._may_start(receiving.refusal):
                        self._start(receiving)
                case Receiving() as receiving, Piece(data):
                    self._add(receiving, data)
                case Receiving() as receiving, End():
                    self._complete(receiving)
                case Receiving() as receiving, Pause():
                    self._collect(receiving)
                case Receiving() as receiving, Late():
                    self._refuse(receiving, responses.late_body())
                case Arrived(), BodyRead(body, reading):
                    self._take_reading(body, reading)
                case Held(generation, _, timer), Decided(decision):
                    if timer is not None:
                        timer.cancel()
                    if isinstance(decision, Admission):
                        self.stage = OnEngine(generation, decision)
                        self._send(self.stage)
                    else:
                        self._refused(generation, decision)
                case OnEngine() as place, Evicted(why):
                    self._evicted(place, why)
                case OnEngine(is_aborted=False) as place, Aborted():
                    place.timer = self._proxy.call_later(_ABORTED_WITHIN_S, self.on, AbortOver())
                case OnEngine(generation), AbortOver():
                    self._end_aborted(generation)
                case OnEngine(), Flow(is_paused) if self.upstream is not None:
                    if is_paused:
                        self.upstream.pause()
                    else:
                        self.upstream.resume()
                case Ended(), _:
                    pass
                case _, ClientLeft():
                    self._client_left()
                case _, Expired(after_s):
                    self._expire(after_s)
                case _, Stopped():
                    self._stop()
                case _:  # what an earlier stage has waited for
                    pass
        except Exception as error:
            self.on_router_error(error)

    # -- the client's side ------------------------------------------------------------------

    def start(self) -> None:
        """All responses before this one are complete."""
        self.on(Turn())

    def start_whole(self, body: bytes) -> None:
        """The same, with all of the request's body, as most requests come."""
        try:  # as ``on`` does, at less cost
            self.stage = ARRIVED
            if self._may_start(None):
                self._begin(body)
        except Exception as error:
            self.on_router_error(error)

    def _may_start(self, refusal: RouterResponse | None) -> bool:
        """It is this request's turn: whether it may go on, or has its response."""
        proxy = self._proxy
        self.began_s = proxy.now_s()
        proxy.live.add(self)
        if (response := self._head.refusal or refusal) is not None:
            self._end_with(response)
        elif (why := proxy.gate.would_refuse()) is not None:
            self._end_with(responses.refused(why))
        else:
            return True
        return False

    def _start(self, receiving: Receiving) -> None:
        if receiving.is_whole:
            self.stage = ARRIVED
            self._begin(receiving.body)
        elif self._head.expects_continue:
            self.response.send_continue()

    def feed(self, data: bytes) -> None:
        """More of the request's body."""
        self.on(Piece(data))

    def _add(self, receiving: Receiving, data: bytes) -> None:
        if receiving.refusal is not None:
            return
        if receiving.parts is None and not receiving.body:
            receiving.body = data  # of most requests this is all
            return
        self._collect(receiving)
        proxy, parts = self._proxy, receiving.parts
        if parts is None:
            return
        if parts.num_bytes + len(data) > proxy.config.max_body_bytes:
            self._refuse(receiving, self._too_large())
        elif why := parts.add(data, proxy.now_s()):
            self._refuse(receiving, responses.refused(Refusal(why, proxy.gate.state)))

    def wait_for_more(self) -> None:
        """What has arrived is not all of the request."""
        self.on(Pause())

    def _collect(self, receiving: Receiving) -> None:
        """Count its body with all others that have not arrived completely."""
        if receiving.parts is not None or receiving.refusal is not None:
            return
        first, receiving.body = receiving.body, b""
        bodies, now_s = self._proxy.bodies, self._proxy.now_s()
        receiving.parts = bodies.begin(self.client_host, self.late, now_s)
        if first:
            self._add(receiving, first)

    def late(self) -> None:
        """The request's body arrives too slowly."""
        self.on(Late())

    def end_of_request(self) -> None:
        """All of the request has arrived."""
        self.on(End())

    def _complete(self, receiving: Receiving) -> None:
        if receiving.parts is not None:
            receiving.body, receiving.parts = receiving.parts.take(), None
        receiving.is_whole = True
        if receiving.is_turn:
            self.stage = ARRIVED
            self._begin(receiving.body)

    def client_left(self) -> None:
        """The client has closed its connection."""
        self.on(ClientLeft())

    def _client_left(self) -> None:
        if not (isinstance(self.stage, Receiving) and not self.stage.is_turn):
            self._proxy.counts.num_clients_left += 1
        self._end()

    def close_after(self) -> None:
        self.response.is_last = True

    def write_paused(self) -> None:
        self.on(Flow(is_paused=True))

    def write_resumed(self) -> None:
        self.on(Flow(is_paused=False))

    def _too_large(self) -> RouterResponse:
        message = f"the body is over {self._proxy.config.max_body_bytes} bytes"
        return responses.error(413, "too_large", message)

    def _refuse(self, receiving: Receiving, response: RouterResponse) -> None:
        """Send this response, now or when it is this request's turn."""
        receiving.refusal = response
        receiving.drop()
        if receiving.is_turn:
            self._end_with(response)

    # -- through the gate -------------------------------------------------------------------

    def _begin(self, body: bytes) -> None:
        """All of the request has arrived, and it is its turn."""
        proxy, head = self._proxy, self._head
        wanted, is_post = wanted_of(proxy, head), head.method == b"POST"
        if len(body) > proxy.config.max_body_bytes:
            self._end_with(self._too_large())
        elif len(body) <= MOST_BYTES_ON_LOOP:
            texts = head.contract_texts
            self._has_read(body, read_body(wanted, body, is_post=is_post, texts=texts))
        else:
            arguments = (wanted, body, is_post, head.contract_texts)
            reading = proxy.reading.call(read_long_body, *arguments, client=self.client_host)
            task = start_task(reading, "router-read")
            self.stage = Arrived(task)
            task.add_done_callback(lambda reading: self.on(BodyRead(body, reading)))

    def _take_reading(self, body: bytes, reading: asyncio.Future[ReadBody]) -> None:
        if reading.cancelled():
            return
        try:
            read = reading.result()
        except ReadingFailed as error:
            self._end_with(responses.refused(Refusal(str(error), self._proxy.gate.state)))
        else:
            self._has_read(body, read)

    def _has_read(self, body: bytes, read: ReadBody) -> None:
        """The body was read: what its reply is read with, if it is, and on to the gate."""
        proxy, fields, named = self._proxy, read.fields, read.named
        whole = body if fields.body is None else fields.body
        if named.problem or read.why_not:
            is_lacking = not named.problem and read.lacks_route
            problem = responses.error(
                *((404, "not_found") if is_lacking else (400, "bad_request")),
                named.problem or read.why_not,
            )
            self._end_with(problem)
            return
        reader = None
        if read.reply is not None:
            proxy.reads_tokens.set()
            read.reply.route, read.reply.decode = ROUTES[self._head.route.path], proxy.decode
            reader = TokenReader(read.reply)
        elif proxy.gate.adapters is not None and not named.is_for_base:
            reader = read_for_adapter(whole, named)
        elif read.is_stream_checked is not None:
            reader = read_checked(whole, is_streamed=read.is_stream_checked)
        contract = read.contract
        is_checked = contract is not NO_CONTRACT and contract.has_versions
        request = Request(self._head, whole, fields, names=fields.names, unread=self.unread)
        generation = Generation(request, named, contract, is_checked, reader)
        if reader is not None and is_checked:
            reader.may_show = partial(self._may_show, generation)
        self.is_decoding = reader is not None or self._head.is_http_1_0
        self._enter(generation)

    def _enter(self, generation: Generation, excluded_engine: str = "") -> None:
        proxy, request, contract = self._proxy, generation.request, generation.contract
        decision = proxy.gate.enter(
            rid=request.fields.rid,
            num_bytes=len(request.body),
            excluded_engine=excluded_engine,
            hint=proxy.hint_of(request) if proxy.wants_hint else NO_HINT,
            names=generation.pinned or generation.named.names,
            prefers=_prefers(generation.reader),
            contract=contract,
            requires=None
            if contract.logprob_kind is None
            else partial(self._gives_kind, generation),
        )
        match decision:  # with its place in the stage, no error can lose it
            case Admission():
                self.stage = OnEngine(generation, decision)
                self._send(self.stage)
            case Waiter():
                self.stage = held = Held(generation, decision)
                decision.on_decision = self.decided
                within_s, expire = proxy.config.hold_timeout_s, proxy.gate.expire
                held.timer = proxy.call_later(within_s, expire, decision)
            case Refusal():
                self._refused(generation, decision)

    def decided(self, decision: Admission | Refusal) -> None:
        """The gate has decided on the held request."""
        self.on(Decided(decision))

    def _refused(self, generation: Generation, refusal: Refusal) -> None:
        if refusal.is_abort:
            self._end_aborted(generation, refusal)
        elif refusal.unmet:
            self._proxy.counts.refuse_contract(refusal.unmet)
            self._end_with(responses.refused(refusal))
        elif refusal.unfit and (wanted := generation.contract.logprob_kind) is not None:
            self._end_without_kind(generation, wanted, refusal.unfit)
        elif generation.failure is None:
            self._end_with(responses.refused(refusal))
        else:
            self._end_with(responses.engine_failed(generation.failure))

    # -- its contract -----------------------------------------------------------------------

    def _kind_by(self, generation: Generation, rule: LogprobRule) -> LogprobKind | None:
        """The kind of an engine's log-probs for this request, or None if it is not known."""
        request, reader = generation.request, generation.reader
        kind = None if reader is None else reader.reply.kind_by(rule)
        if kind is not None:
            return kind
        max_bytes = self._proxy.config.max_read_bytes
        path, names = self._head.route.path, request.names
        return kind_of_unread(path, request.body, rule, max_bytes, names)

    def _gives_kind(self, generation: Generation, member: Backend) -> bool:
        kind = self._kind_by(generation, member.logprobs)
        return kind is generation.contract.logprob_kind

    def _end_without_kind(
        self, generation: Generation, wanted: LogprobKind, unfit: tuple[Backend, ...]
    ) -> None:
        kinds = {
            member.engine_id: (self._kind_by(generation, member.logprobs), member.logprobs)
            for member in unfit
        }
        self._proxy.counts.refuse_contract("logprob_kind")
        self._end_with(responses.no_such_kind(why_no_kind(wanted, kinds)))

    def _served(self, generation: Generation) -> int | None:
        """The version that answers a new request with the client's names."""
        return self._proxy.gate.version_for(generation.named.names)

    def _versions(self, generation: Generation) -> Versions | None:
        """Weight versions that the tokens so far can have, or None before the first token."""
        place, reader = self.stage, generation.reader
        if reader is None or not isinstance(place, OnEngine):
            return generation.versions
        gate, pinned = self._proxy.gate, generation.pinned
        served, admitted = self._served(generation), place.admission.weight_version
        if any(pinned):  # each name is of one version
            served = gate.version_for(pinned)
            admitted = admitted if len(pinned) == 1 else None
        is_open = gate.state is GateState.OPEN
        now = versions_of(reader.reply.reported, admitted, served, is_open=is_open)
        return now.joined(generation.versions)

    def _why_broken(self, generation: Generation, versions: Versions | None) -> str:
        """Why tokens of these versions do not fulfil the contract."""
        if versions is None:
            return ""
        served = self._served_with(generation, versions)
        return generation.contract.why_broken(*versions, served)

    def _served_with(self, generation: Generation, versions: Versions | None) -> int | None:
        """The newest version: engines have it before the gate opens."""
        served, newest = self._served(generation), None if versions is None else versions.newest
        return max(served, newest) if served is not None and newest is not None else served

    def _may_show(self, generation: Generation) -> bool:
        return not self._why_broken(generation, self._versions(generation))

    def _end_if_broken(self, generation: Generation) -> None:
        """What is already broken needs no more tokens."""
        versions = self._versions(generation)
        if versions is None or None in versions:
            return
        if why := self._why_broken(generation, versions):
            self._break_contract(generation, why)

    def _keep_versions(self, generation: Generation) -> None:
        """Note those of the tokens so far, before their engine is left."""
        reader = generation.reader
        if reader is None or not generation.is_checked:
            return
        with suppress(*UNUSABLE):
            reader.reply.read_all()
        if reader.reply.has_tokens_of_engine:
            generation.versions = self._versions(generation)

    def _keeps_contract(self, generation: Generation, admission: Admission) -> bool:
        """Whether the request can go to this engine, with or without the tokens kept so far."""
        new = Versions(admission.weight_version, admission.weight_version)
        why = self._why_broken(generation, new.joined(generation.versions))
        if why and not self._why_broken(generation, new) and not self.response.has_begun:
            _forget_tokens(generation)
            return True
        if why:
            self._break_contract(generation, why)
        return not why

    def _break_contract(self, generation: Generation, why: str) -> None:
        """These tokens do not fulfil the contract: start over, or end."""
        served = self._served_with(generation, self._versions(generation))
        match self.stage:
            case OnEngine(is_aborted=False) as place if not (
                self.response.has_begun
                or generation.num_starts >= MAX_FAILOVERS
                or generation.contract.fit(served) is Fit.NEVER
            ):
                generation.num_starts += 1
                _forget_tokens(generation)
                generation.failure = self._taken_away(place, why)
                self._unpin(generation)
                self._enter(generation)
            case _:
                self._proxy.counts.refuse_contract("tokens")
                self._end_with(responses.unmet(why, served))

    def _pin(self, generation: Generation, names: Names) -> None:
        """Stay with these weights to the end, also on another engine."""
        generation.request.last = generation.named.member(names)
        generation.pinned = names
        if names != _BASE:
            self._proxy.gate.pin(names)
            if generation.reader is not None and any(names):
                generation.reader.named = replace(generation.named, names=names)

    def _unpin(self, generation: Generation) -> None:
        pinned, generation.pinned = generation.pinned, ()
        self._proxy.gate.unpin(pinned)

    # -- the engine's side ------------------------------------------------------------------

    def _send(self, place: OnEngine) -> None:
        generation, admission = place.generation, place.admission
        request, reader, member = generation.request, generation.reader, admission.member
        if not generation.pinned:
            self._pin(generation, admission.names)
        generation.engine_id = member.engine_id
        admission.on_evicted = self.evicted
        admission.on_aborted = self.aborted
        generation.num_attempts += 1
        if generation.failure is not None:
            self._proxy.counts.num_retried += 1
        if generation.is_checked and not self._keeps_contract(generation, admission):
            return
        _name_for_engine(request, reader, admission)
        pool, endpoint, kind = self._proxy.pool, member.endpoint, member.of_kind
        version, partner, more = admission.weight_version, admission.partner, _NOTHING
        namespace = self._proxy.namespace(version)
        if (partner is not None or member.needs_names) and (
            why := _why_refused(request, admission)
        ):
            self._end_with(responses.error(400, "bad_request", why))
            return
        if reader is not None:
            reader.reply.vocabulary = member.vocabulary or MOST_IDS
        if (end := self._follow(generation, member.logprobs)) is not None:
            self._end_with(end)
            return
        if partner is not None:
            more = bootstrap_fields(partner)
            place.prefill = PrefillReply(
                self._on_prefill,
                self.on_router_error,
                wants_prompt=reader is not None and reader.await_prompt(),
            )
            key = partner.access.sampling
            parts = request.parts_for(partner.endpoint, namespace, more, key=key)
            pool.send(place.prefill, partner.endpoint, parts)
        if reader is not None:
            request.body = reader.body(version, kind.dialect)
        parts = request.parts_for(endpoint, namespace, more, kind, member.access.sampling)
        pool.send(self, endpoint, parts, is_head=self._head.method == b"HEAD")

    def _follow(self, generation: Generation, rule: LogprobRule) -> RouterResponse | None:
        """Note the kind of the engine's log-probs; the client's response, if it ends that."""
        request, reader, proxy = generation.request, generation.reader, self._proxy
        if reader is None or (kind := reader.reply.kind_by(rule)) is None:
            path, max_bytes = self._head.route.path, proxy.config.max_read_bytes
            generation.logprob_kind = kind_of_unread(
                path, request.body, rule, max_bytes, request.names
            )
            return None
        if not reader.reply.goes_on_with(kind):
            proxy.counts.refuse_failover("logprob_kind")
            if self.response.has_begun and generation.failure is not None:
                why = (
                    f"the log-probs of its tokens are {reader.reply.logprob_kind}, and those of "
                    f"engine {generation.engine_id} would be {kind}"
                )
                return responses.engine_failed(generation.failure, why)
        reader.reply.follow_with(kind)
        generation.logprob_kind = kind
        return None

    def on_reply(self, head: ReplyHead, length: bytes, unread: bytes, is_alone: bool) -> None:
        place, response = self.stage, self.response
        if not isinstance(place, OnEngine):
            return
        if (reader := place.generation.reader) is not None:
            reader.begin(head)
            place.status = head.status
        else:
            response.begin(head, length, unread, self._signed(place.generation))
            if self._head.route.path in COMPLETION_PATHS:
                place.status = head.status
            # After a length the body follows at once, so the head can wait for it.
            if is_alone and (head.is_chunked or head.is_until_close):
                response.pass_on(b"", is_end=False)
                return
        if response.is_write_paused and self.upstream is not None:
            self.upstream.pause()

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        place = self.stage
        if not isinstance(place, OnEngine):
            return
        if (reader := place.generation.reader) is not None:
            self._read(place, reader, data, is_end)
            return
        if place.status:
            status, place.status = place.status, 0
            if self._is_lost_by_beginning(place, status, data):
                return
        self.response.pass_on(data, is_end=is_end)
        if is_end:
            self._finish(place.generation)

    def _read(self, place: OnEngine, reader: TokenReader, data: bytes, is_end: bool) -> None:
        action = reader.take(data, self._context(place, reader) if is_end else None)
        if place.status and reader.has_answered:
            place.status = 0
            self._note_answer(place)
        if action is not None:
            self._do(place, reader, action)
        elif reader.may_show is not None and not is_end:
            self._end_if_broken(place.generation)

    def _do(self, place: OnEngine, reader: TokenReader, action: Action) -> None:
        """What the reader of an engine's reply wants."""
        match action:
            case Write(events):
                self.response.send_events(events, self._signed(place.generation))
            case Finish():
                self._end_reply(place.generation, reader, action)
            case Again(why):
                self._continue_elsewhere(place, reader, why)
            case Unusable(why):
                self._end_unusable(place, why)
            case Broken(why):
                self._lose_engine(place, why)
            case Refused(status, error, end):
                if self._is_lost_by(place, status, error):
                    return
                if status < 400 and place.generation.is_checked:
                    why = "sent a reply of another form, whose versions are unknown"
                    self._end_unusable(place, why)
                elif end.content_type is not None and self.response.has_begun:
                    why = bytes(end.body[0])[:200].decode("latin-1")
                    self._end_with(responses.error(502, "engine_refused", why))
                else:
                    self._send_end(place.generation, end)

    def _context(self, place: OnEngine, reader: TokenReader) -> Context:
        """What the end of a reply depends on, besides the reply."""
        if place.is_aborted:
            return FINAL
        is_open, lost = self._proxy.gate.state is GateState.OPEN, place.generation.lost
        if lost is not None and not lost.may_be_aborted(
            MAX_FAILOVERS, is_open=is_open, num_kept=reader.reply.num_kept
        ):
            return FINAL
        return OPEN if is_open else Context(True, place.admission.member.of_kind.refusal_in_pause)

    def _continue_elsewhere(self, place: OnEngine, reader: TokenReader, why: str) -> None:
        """The engine was paused; the gate decides when and where the request continues."""
        generation = place.generation
        lost = generation.lost = generation.lost or LostEngines()
        is_open = self._proxy.gate.state is GateState.OPEN
        lost.add_abort(is_open=is_open, num_kept=reader.reply.num_kept)
        self._enter_again(generation, self._taken_away(place, why))

    def _end_reply(self, generation: Generation, reader: TokenReader, end: Finish) -> None:
        if generation.is_checked and (
            why := self._why_broken(generation, self._versions(generation))
        ):
            self._break_contract(generation, why)
            return
        counts = self._proxy.counts
        counts.num_tokens_recomputed += reader.reply.num_recomputed
        counts.num_tokens_kept += reader.reply.num_kept
        if end.why_not_continued:
            counts.refuse_failover(end.why_not_continued)
        self._send_end(generation, end)

    def _send_end(self, generation: Generation, end: Finish) -> None:
        signed = self._signed(generation)
        if end.content_type is None:
            self.response.send_events(end.body[0], signed, is_end=True)
        else:
            self.response.send_whole(end.status, end.content_type, end.body, signed)
        self._finish(generation)

    def _signed(self, generation: Generation) -> bytes:
        """Lines of a head that name the engine, its weights and the kind of its log-probs.

        A request that ends at the gate has tokens of engines, and weights of none.
        """
        reader, engine_id, kind = generation.reader, generation.engine_id, generation.logprob_kind
        if reader is not None and (ends := reader.reply.end_versions) is not None:
            return signature_lines(engine_id, ends[1], kind, ends[0])
        place = self.stage
        version = place.admission.weight_version if isinstance(place, OnEngine) else None
        return signature_lines(engine_id, version, kind)

    def _on_prefill(self, event: PrefillEvent) -> None:
        """What has happened at the prefill engine of a pair."""
        match self.stage, event:
            case OnEngine(Generation(reader=TokenReader() as reader)) as place, Prompt(logprobs):
                action = reader.take_prompt(logprobs, self._context(place, reader))
                if action is not None:
                    self._do(place, reader, action)
            case OnEngine() as place, Lost(why, was_sent):
                self._lose_engine(place, why, was_sent=was_sent, is_partner=True)
            case OnEngine(), NoConnection(why):
                self.on_no_connection(why)
            case OnEngine() as place, NoPrompt(why):
                self._end_unusable(place, why, is_partner=True)

    def _is_lost_by_beginning(self, place: OnEngine, status: int, data: bytes) -> bool:
        if status != 200:
            return self._is_lost_by(place, status, data)
        if (error := first_error(data)) is not None:
            return self._is_lost_by(place, status_of(error), error)
        if self._proxy.gate.members.errors:
            self._note_answer(place)
        return False

    def may_reconnect(self) -> bool:
        place = self.stage
        return isinstance(place, OnEngine) and self._proxy.gate.still_serves(place.admission)

    # -- when an engine fails ---------------------------------------------------------------

    def on_no_connection(self, why: str) -> None:
        self._end_with(responses.refused(Refusal(why, self._proxy.gate.state)))

    def on_engine_lost(self, why: str, *, was_sent: bool = True) -> None:
        place = self.stage
        if not isinstance(place, OnEngine):
            return
        reader = place.generation.reader
        if reader is None:
            self._lose_engine(place, why, was_sent=was_sent)
        elif (end := reader.take_loss(self._context(place, reader))) is not None:
            self._do(place, reader, end)
        elif not reader.waits_for_prompt:
            self._lose_engine(place, why, was_sent=was_sent)

    def _lose_engine(
        self, place: OnEngine, why: str, *, was_sent: bool = True, is_partner: bool = False
    ) -> None:
        generation, proxy = place.generation, self._proxy
        reader, target = generation.reader, self._operation
        proxy.counts.num_engine_failures += 1
        lost = generation.lost = generation.lost or LostEngines()
        has_tokens = reader is not None and reader.reply.has_tokens_of_engine
        leaves_routing = lost.add(was_sent=was_sent, has_tokens=has_tokens)
        if not was_sent:
            generation.num_attempts -= 1
        failure = proxy.gate.report_failure(
            place.admission, target, why, is_partner=is_partner, leaves_routing=leaves_routing
        )
        self._log(failure, "failed", generation)
        if place.is_aborted:
            self._end_aborted(generation)
            return
        self._leave_for_another(place)
        if lost.num_in_vain == 1 and (why := self._why_fatal(generation.request)):
            message = f"engine {failure.engine_id} was lost with this request: {why}"
            self._end_with(responses.error(400, "bad_request", message))
            return
        self._fail_over(generation, failure)

    def _why_fatal(self, request: Request) -> str:
        """What in the prompt may have ended the engine."""
        proxy = self._proxy
        if len(request.body) > proxy.config.max_read_bytes:
            return ""
        return why_fatal_prompt(request.body, proxy.gate.members.vocabulary)

    def _note_answer(self, place: OnEngine) -> None:
        """The engine has begun to answer, and not with an error."""
        self._proxy.gate.note_reply(place.admission, is_error=False)

    def _is_lost_by(self, place: OnEngine, status: int, error: bytes | Any) -> bool:
        """Judge the engine by its error; True if that means that it is lost, and was handled.

        Args:
            error: its payload, or the body that has it.
        """
        admission = place.admission
        if not is_own_error(status):
            return False
        self._proxy.gate.note_reply(admission, is_error=True)
        why = why_lost(
            read_error(error) if isinstance(error, bytes) else error,
            outlives_its_core=admission.member.of_kind.outlives_its_core,
        )
        if why:
            self._lose_engine(place, why)
        return bool(why)

    def _end_unusable(self, place: OnEngine, why: str, *, is_partner: bool = False) -> None:
        """A complete reply cannot be used.  The request may be the cause, so the engine stays."""
        admission = place.admission
        member = admission.partner if is_partner and admission.partner else admission.member
        self._proxy.counts.num_unusable_replies += 1
        failure = ConnectionFailure(member.engine_id, self._operation, why, False, 0)
        self._log(failure, "sent an unusable reply to", place.generation)
        self._end_with(responses.engine_failed(failure))

    @property
    def _operation(self) -> str:
        """Where it goes, for messages."""
        return one_line(self._head.route.target.decode("ascii", "replace"), _TARGET_CHARACTERS)

    def _log(self, failure: ConnectionFailure, what: str, generation: Generation) -> None:
        logger.warning(
            "engine %s %s %s %s: %s",
            failure.engine_id,
            what,
            self._head.method.decode(),
            failure.operation,
            failure.message,
            extra={"engine_id": failure.engine_id, "rid": one_line(generation.request.rid)},
        )

    def evicted(self, why: str) -> None:
        """The owner of the engines reports that this engine is lost."""
        self.on(Evicted(why))

    def _evicted(self, place: OnEngine, why: str) -> None:
        self._proxy.counts.num_cut += 1
        if place.is_aborted:
            self._end_aborted(place.generation)
        else:
            self._fail_over(place.generation, self._taken_away(place, why))

    def _taken_away(self, place: OnEngine, why: str) -> ConnectionFailure:
        """Leave an engine that did not fail this request, so the attempt does not count."""
        self._leave_for_another(place)
        place.generation.num_attempts -= 1
        engine_id = place.admission.member.engine_id
        return ConnectionFailure(engine_id, self._operation, why, False, 0)

    def _leave_for_another(self, place: OnEngine) -> None:
        self._keep_versions(place.generation)
        self._drop()
        self._leave()
        self.stage = Held(place.generation)

    def _fail_over(self, generation: Generation, failure: ConnectionFailure) -> None:
        """Try another engine, if this request may be sent once more."""
        most = 1 if generation.reader is None else MAX_FAILOVERS
        why_not = "" if generation.lost is None else generation.lost.why_not_again
        if generation.num_attempts > most or why_not:
            self._end_with(responses.engine_failed(failure, why_not))
        else:
            self._enter_again(generation, failure, excluded_engine=failure.engine_id)

    def _enter_again(
        self, generation: Generation, failure: ConnectionFailure, *, excluded_engine: str = ""
    ) -> None:
        generation.failure = failure
        if (why_not := self._why_not_completed(generation)) is not None:
            self._end_with(responses.engine_failed(failure, why_not))
        else:
            self.response.discard_head()
            self._enter(generation, excluded_engine)

    def _why_not_completed(self, generation: Generation) -> str | None:
        """Why no other engine can complete what its client has, in words or empty, or None if one
        can, and its tokens are kept."""
        reader, counts = generation.reader, self._proxy.counts
        if reader is None:
            return "" if self.response.has_begun else None
        why = reader.lose_engine()
        if not reader.reply.base.num:
            generation.versions = None
        if why:
            counts.refuse_failover(why)
            if reader.reply.has_shown:
                return reader.reply.in_words(why)
        counts.num_failovers += 1
        return None

    # -- deadline, abort and stop -----------------------------------------------------------

    def expire(self, after_s: float) -> None:
        """The request has taken too long."""
        self.on(Expired(after_s))

    def _expire(self, after_s: float) -> None:
        place = self.stage
        where = place.admission.member.engine_id if isinstance(place, OnEngine) else "the router"
        message = f"no complete reply after {after_s:.0f} s, the last of them on {where}"
        self._proxy.counts.num_expired += 1
        self._end_with(responses.error(504, "deadline", message))

    def aborted(self) -> None:
        """Its end was requested: its engine gets an order, and has little time for it."""
        self.on(Aborted())

    def _end_aborted(self, generation: Generation, refusal: Refusal | None = None) -> None:
        """Leave the engine, which ends its work, and then reply with the tokens so far.

        Args:
            refusal: what the client gets where there are none.
        """
        reader = generation.reader
        if reader is None or (end := reader.abort()) is None:
            self._end_with(responses.refused(refusal or self._proxy.gate.aborted("aborted")))
        else:
            self._drop()  # no client learns of an end that its engine may not know
            self._end_reply(generation, reader, end)

    def stop(self) -> None:
        """The router stops now."""
        self.on(Stopped())

    def _stop(self) -> None:
        if self.response.has_begun:
            self._end()
            self.response.cut(is_now=True)
        else:
            stopping = Refusal("the router is stopping", GateState.CLOSED)
            self._end_with(responses.refused(stopping))

    # -- how it ends ------------------------------------------------------------------------

    def _finish(self, generation: Generation) -> None:
        """The response is complete."""
        proxy, engine_id = self._proxy, generation.engine_id
        proxy.latencies.observe(self._head.route.path, engine_id, proxy.now_s() - self.began_s)
        self._end()
        self.response.finish()

    def _end_with(self, response: RouterResponse) -> None:
        """Send this response, or break off the one that has begun."""
        self._end()
        if self.response.has_begun:
            self._proxy.counts.num_broken_replies += 1
            self.response.break_off(response)
        else:
            is_unread = self.stage is ENDED_EARLY and (
                self._head.expects_continue or response.status in _WITH_BODY_UNREAD
            )
            self.response.send(response, is_unread=is_unread)

    def on_router_error(self, error: BaseException) -> None:
        """An error of the router's own: end this request, whatever state it is in."""
        stage = self.stage
        with suppress(Exception):
            log_router_error(f"{self._head.method!r} {self._operation!r}", error)
        for step in (self._drop, self._leave, self._end):
            with suppress(Exception):
                step()
        response = responses.router_error(type(error).__name__)
        if isinstance(stage, Receiving) and not stage.is_turn:  # ``start`` sends it, in its turn
            self.stage = Receiving(is_whole=stage.is_whole, refusal=response)
            return
        self.stage = _end_of(stage)
        if isinstance(stage, Ended):  # the error came as its end was written
            self._cut()
            return
        try:
            self._end_with(response)
        except Exception:
            self._cut()

    def _cut(self) -> None:
        with suppress(Exception):
            self.response.cut()

    def _drop(self) -> None:
        """Close the connections that carry the request, which ends the engines' work on it."""
        if self.upstream is not None:
            self.upstream.drop()
            self.upstream = None
        if isinstance(self.stage, OnEngine) and (prefill := self.stage.prefill) is not None:
            prefill.drop()
            self.stage.prefill = None

    def _leave(self) -> None:
        """Give its place back, on an engine or at the gate.  Idempotent."""
        place = self.stage
        if isinstance(place, OnEngine):
            admission = place.admission
            admission.on_evicted = admission.on_aborted = None
            self._proxy.gate.leave(admission)
        elif isinstance(place, Held):
            if place.waiter is not None:
                self._proxy.gate.leave(place.waiter)
        else:
            return
        if place.timer is not None:
            place.timer.cancel()

    def _end(self) -> None:
        """Give all back that its stage has."""
        stage, end = self.stage, ENDED
        self._drop()
        if isinstance(stage, _AT_GATE):
            self._leave()
            if stage.generation.pinned != _BASE:
                self._unpin(stage.generation)
        else:
            end = _end_of(stage)
            stage.drop()
        self._proxy.live.discard(self)
        self.stage = end


def _end_of(stage: Stage) -> Ended:
    return ENDED_EARLY if isinstance(stage, _MAY_LACK) and not stage.is_whole else ENDED


def _prefers(reader: TokenReader | None) -> Callable[[Backend], bool] | None:
    """Engines that can go on with the tokens so far; None: there are none."""
    if reader is None or not (reader.reply.base.num and reader.reply.wants_logprobs):
        return None
    reply = reader.reply
    return lambda member: reply.kind_by(member.logprobs) is reply.logprob_kind


def _forget_tokens(generation: Generation) -> None:
    generation.versions = None
    if generation.reader is not None:
        generation.reader.start_over()


def _name_for_engine(request: Request, reader: TokenReader | None, admission: Admission) -> None:
    """Give the request an id of its own at this engine, by which an abort names it there."""
    request.name_for_engine()
    sent_as, rids = request.sent_as, request.fields.rids
    if isinstance(sent_as, tuple):
        admission.prompts = dict(zip(rids, sent_as, strict=True))
    else:
        admission.sent_as = sent_as
        if reader is not None:
            reader.reply.rid, reader.reply.sent_as = request.rid, sent_as


def _why_refused(request: Request, admission: Admission) -> str:
    """Why this engine must not get the request, although it would answer."""
    path = request.head.route.path
    has_name = request.fields.adds_extra_key or path in TOKENIZER_PATHS
    if admission.member.needs_names and not has_name:
        return (
            f"{path}: a request there has no name of its weight version, and engine "
            f"{admission.member.engine_id} has a store of prefixes that no push clears; use "
            f"{', '.join(sorted(COMPLETION_PATHS))}, or engines without that store"
        )
    return why_not_together(request.body) if admission.partner is not None else ""
