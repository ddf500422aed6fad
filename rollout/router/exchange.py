"""One generation request on its way to an engine, and to another if that one is lost.

Always true:
- An admitted request leaves the gate exactly once: at its last byte, error or disconnect.
- An engine's failure is never an error of the router, and it names the engine.
- A request is sent a second time only if no byte of an answer has reached its client, once, and
  to another engine, through the gate like any other.  Whatever an engine answers is final.

There is no task and no await: client, gate, engine and clock each call it when something happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rollout.router import answers
from rollout.router.client_side import ClientSide, chunk
from rollout.router.gate import Admission, ConnectionFailure, GateState, Refusal, Waiter
from rollout.router.headers import Headers, signature
from rollout.router.heads import ReplyHead
from rollout.router.message import Request, read_request
from rollout.router.pairs import PrefillSide, PromptLogprobs, bootstrap_fields
from rollout.routing import NO_HINT

logger = logging.getLogger(__name__)

_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"


class Exchange(ClientSide):
    """A request of ``client`` on its way through ``proxy``."""

    __slots__ = (
        "_admission",
        "_failure",
        "_is_chunking",
        "_num_attempts",
        "_prefill",
        "_request",
        "_timer",
        "_waiter",
    )

    def _prepare(self) -> None:
        self._request: Request | None = None
        self._waiter: Waiter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._admission: Admission | None = None
        self._failure: ConnectionFailure | None = None
        self._prefill: PrefillSide | None = None
        self._num_attempts = 0
        self._is_chunking = False

    # -- through the gate -------------------------------------------------------------------

    def _begin(self) -> None:
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._request = read_request(self._asked, body)
        self._enter("")

    def _enter(self, not_on: str) -> None:
        request = self._request
        assert request is not None
        proxy = self._proxy
        decision = proxy.gate.enter(
            rid=request.rid,
            num_bytes=len(request.body),
            not_on=not_on,
            hint=proxy.hint_of(request, self._asked.headers) if proxy.wants_hint else NO_HINT,
        )
        if isinstance(decision, Waiter):
            self._waiter = decision
            decision.on_decision = self._decided
            self._timer = self._proxy.call_later(
                self._proxy.hold_timeout_s, self._proxy.gate.expire, decision
            )
        else:
            self._decided(decision)

    def _decided(self, decision: Admission | Refusal) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiter = None
        if isinstance(decision, Admission):
            self._send(decision)
        elif self._failure is None or decision.is_abort:
            self._end_with(answers.refused(decision))
        else:
            self._end_with(answers.engine_failed(self._failure))

    def _send(self, admission: Admission) -> None:
        request = self._request
        assert request is not None
        self._admission = admission
        self._engine_id = admission.member.engine_id
        admission.on_cut = self._cut_off
        self._num_attempts += 1
        if self._failure is not None:
            self._proxy.counts.num_retried += 1
        pool, endpoint = self._proxy.pool, admission.member.endpoint
        version, more = admission.weight_version, {}
        if admission.partner is not None:
            more = bootstrap_fields(admission.partner)
            self._prefill = PrefillSide(
                self._on_prefill_lost, self.on_no_connection, self._prompt_taker()
            )
            place = admission.partner.endpoint
            pool.send(self._prefill, place, request.parts_for(place, version, more))
        if (body := self._body()) is not None:
            request.body = body
        parts = request.parts_for(endpoint, version, more)
        pool.send(self, endpoint, parts, is_head=self._asked.method == b"HEAD")

    def _prompt_taker(self) -> Callable[[PromptLogprobs], None] | None:
        """What takes the prompt's log-probs from the prefill engine, where they are wanted."""
        return None

    def _body(self) -> bytes | None:
        """The body for the next engine, where it is not the client's."""
        return None

    # -- the engine's side ------------------------------------------------------------------

    def on_reply(self, head: ReplyHead, length: bytes, is_alone: bool) -> None:
        admission = self._admission
        assert admission is not None
        extra = []
        if head.is_chunked or head.is_until_close:
            self._is_event_stream = _is_event_stream(head.headers)
            self._is_close_delimited = self.is_decoding
            if self.is_decoding:
                self.is_last = True
            else:
                self._is_chunking = head.is_until_close
                extra.append(_CHUNKED)
        if self.is_last:
            extra.append(_CLOSE)
        self._reply_head = head.for_client(
            self._engine_id, admission.weight_version, length, *extra
        )
        # A length says that more comes at once: it can go with the head.
        if is_alone and (head.is_chunked or head.is_until_close):
            self._write(b"")
        elif self._client.is_write_paused and self.upstream is not None:
            self.upstream.pause()

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        if self._is_chunking:
            data = chunk(data) if data else b""
            if is_end:
                data += b"0\r\n\r\n"
        if is_end:
            self._leave()
        self._write(data)
        if is_end:
            self._finish()
        else:
            self._tail = data

    def on_upstream_lost(self, why: str) -> None:
        self._lost(why, is_partner=False)

    def _on_prefill_lost(self, why: str) -> None:
        self._lost(why, is_partner=True)

    def _lost(self, why: str, *, is_partner: bool) -> None:
        admission = self._admission
        assert admission is not None
        proxy, target = self._proxy, self._asked.route.target.decode()
        proxy.counts.num_engine_failures += 1
        failure = proxy.gate.report_failure(admission, target, why, is_partner=is_partner)
        method = self._asked.method.decode()
        logger.warning(
            "engine %s failed %s %s: %s",
            failure.engine_id,
            method,
            target,
            why,
            extra={"engine_id": failure.engine_id, "rid": admission.rid},
        )
        self._drop()
        self._leave()
        self._fail_over(failure)

    def on_no_connection(self, why: str) -> None:
        self._drop()
        self._leave()
        self._end_with(answers.refused(Refusal(why, self._proxy.gate.state)))

    def may_reconnect(self) -> bool:
        return self._admission is not None and self._proxy.gate.still_serves(self._admission)

    def _cut_off(self, why: str) -> None:
        """The owner of the engines says that this one is lost."""
        admission = self._admission
        assert admission is not None
        self._drop()
        engine_id, target = admission.member.engine_id, self._asked.route.target.decode()
        self._proxy.counts.num_cut += 1
        self._num_attempts -= 1  # the engine was taken away, it did not fail this request
        self._leave()
        self._fail_over(ConnectionFailure(engine_id, target, why, False, 0))

    def _fail_over(self, failure: ConnectionFailure) -> None:
        self._failure = failure
        if self._num_attempts < 2 and not self._has_written:
            self._reply_head = b""
            self._enter(failure.engine_id)
        else:
            self._end_with(answers.engine_failed(failure))

    # -- the clock's and the owner's --------------------------------------------------------

    def expire(self, after_s: float) -> None:
        """The request has taken too long."""
        if self._is_done:
            return
        where = self._admission.member.engine_id if self._admission is not None else "the router"
        message = f"no whole answer after {after_s:.0f} s, the last of them on {where}"
        self._proxy.counts.num_expired += 1
        self._give_up(answers.problem(504, "deadline", message))

    def stop(self) -> None:
        """The router stops now."""
        if self._is_done:
            return
        if self._has_written:
            self._end()
            self._client.cut(is_flushed=False)
        else:
            stopping = Refusal("the router is stopping", GateState.CLOSED)
            self._give_up(answers.refused(stopping))

    def _give_up(self, answer: answers.Answer) -> None:
        self._drop()
        self._leave()
        self._end_with(answer)

    # -- how it lets go ---------------------------------------------------------------------

    def _drop(self) -> None:
        if self.upstream is not None:
            self.upstream.drop()
            self.upstream = None
        if self._prefill is not None:
            self._prefill.drop()
            self._prefill = None

    def _signature(self, admission: Admission) -> Headers:
        return list(signature(admission.member.engine_id, admission.weight_version))

    def _leave(self) -> None:
        if self._admission is not None:
            admission, self._admission = self._admission, None
            admission.on_cut = None
            self._proxy.gate.leave(admission)

    def _end(self) -> None:
        self._is_done = True
        self._drop()
        self._leave()
        if self._timer is not None:
            self._timer.cancel()
        if self._waiter is not None:
            self._proxy.gate.leave(self._waiter)
            self._waiter = None
        self._parts.clear()
        self._request = None
        self._proxy.live.discard(self)


def _is_event_stream(headers: Headers) -> bool:
    is_one = False
    for name, value in headers:
        if name == b"content-encoding":
            return False
        if name == b"content-type":
            is_one = value.startswith(b"text/event-stream")
    return is_one
