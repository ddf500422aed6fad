"""A generation request that goes on elsewhere, from its last safe token, when its engine is lost.

It is sent streaming whatever its client wants, so that what an engine has done is known when the
engine dies.  A reply that breaks, an engine that is pushed as lost and an abort that the client
did not ask for are all the same: enter the gate again with prompt and tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollout.router import answers
from rollout.router.client_side import chunk
from rollout.router.exchange import Exchange
from rollout.router.fast_json import dumps, loads
from rollout.router.gate import Admission, ConnectionFailure
from rollout.router.headers import reply_head
from rollout.router.heads import ReplyHead, RequestHead
from rollout.router.message import COMPLETION_PATHS, may_want_prompt_logprobs, session_of
from rollout.router.openai_tokens import OpenAITranscript, read_openai
from rollout.router.pairs import PromptLogprobs
from rollout.router.recorded_chat import RecordedChat, read_recorded_chat
from rollout.router.tokens import Transcript, read_transcript

if TYPE_CHECKING:
    from rollout.router.proxy import Proxy

_RECORD, _FAIL_OVER = b"x-record-turn", b"x-token-failover"
_ASKED = frozenset({_RECORD, _FAIL_OVER})
_DONE = b"data: [DONE]\n\n"
_NOT_ONE = "a recorded turn needs one prompt and n of 1; a completion, no grammar"

AnyTranscript = Transcript | OpenAITranscript | RecordedChat


def may_keep_tokens(proxy: Proxy, head: RequestHead) -> bool:
    """A request with this head may be one for a ``TokenExchange``."""
    if head.route.path not in COMPLETION_PATHS:
        return False
    if proxy.token_failover == "on" or proxy.gate.members.prefill.members:
        return True
    return proxy.token_failover == "asked" and not head.switched_on.isdisjoint(_ASKED)


class TokenExchange(Exchange):
    """An exchange that keeps the tokens it was sent."""

    __slots__ = (
        "_buffer",
        "_content_type",
        "_is_foreign",
        "_is_held",
        "_session",
        "_status",
        "_transcript",
        "_wants_chunks",
    )

    _transcript: AnyTranscript | None
    _buffer: list[bytes]

    def _begin(self) -> None:
        self._transcript = None
        self._is_foreign = False
        self._is_held = False
        self._wants_chunks = not self.is_decoding
        self._buffer = []
        self._session = ""
        proxy = self._proxy
        switched_on = self._asked.switched_on
        is_recorded = _RECORD in switched_on
        is_asked = proxy.token_failover == "asked" and _FAIL_OVER in switched_on
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = [body]
        is_kept = proxy.token_failover == "on" or is_asked or is_recorded
        if is_kept or (proxy.gate.members.prefill.members and may_want_prompt_logprobs(body)):
            transcript = self._read(body, is_recorded=is_recorded)
            if is_kept or (isinstance(transcript, Transcript) and transcript.lacks_prompt):
                self._transcript = transcript
            self.is_decoding = self.is_decoding or self._transcript is not None
            if is_recorded and (why := self._why_not_recorded(body)):
                self._answer(why)
                return
        super()._begin()

    def _why_not_recorded(self, body: bytes) -> answers.Answer | None:
        """Make ready to record; or why that cannot be."""
        transcript, proxy = self._transcript, self._proxy
        self._session = session_of(body, self._asked.headers)
        why = "a recorded turn needs a session id" if not self._session else ""
        if not why:
            why = _NOT_ONE if transcript is None else transcript.record()
        if why:
            return answers.problem(400, "bad_request", why)
        if why := proxy.recordings.why_not(self._session, proxy.now_s()):
            return answers.problem(507, "recordings_full", why)
        return None

    def _read(self, body: bytes, *, is_recorded: bool) -> AnyTranscript | None:
        match self._asked.route.path:
            case "/generate":
                return read_transcript(body, self._proxy.failover_interval)
            case "/v1/completions":
                return read_openai(body, is_chat=False)
            case "/v1/chat/completions" if is_recorded:
                return read_recorded_chat(body)
            case "/v1/chat/completions":
                return read_openai(body, is_chat=True)
        return None

    def _body(self) -> bytes | None:
        transcript, admission = self._transcript, self._admission
        if transcript is None:
            return None
        return transcript.body(admission.weight_version if admission is not None else None)

    # -- the engine's answer ----------------------------------------------------------------

    def on_reply(self, head: ReplyHead, length: bytes, is_alone: bool) -> None:
        transcript = self._transcript
        if transcript is None:
            return super().on_reply(head, length, is_alone)
        self._buffer = []
        content_type = dict(head.headers).get(b"content-type", b"")
        expected = b"application/json" if transcript.answers_whole else b"text/event-stream"
        self._is_foreign = head.status != 200 or not content_type.startswith(expected)
        if self._is_foreign:
            self._status = head.status
            self._content_type = content_type
        elif self._client.is_write_paused and self.upstream is not None:
            self.upstream.pause()
        return None

    def on_reply_data(self, data: bytes, is_end: bool) -> None:
        transcript = self._transcript
        if transcript is None:
            return super().on_reply_data(data, is_end)
        self._buffer.append(data)
        if self._is_foreign:
            if is_end:
                self._pass_on_refusal()
            return None
        if transcript.answers_whole:
            return self._absorb_whole(transcript) if is_end else None
        events = self._whole_events()
        try:
            for event in events:
                if not event.startswith(b"data:") or event.startswith(b"data: [DONE]"):
                    continue
                payload = loads(event[5:])
                if "error" in payload:
                    return self._pass_on_error(payload)
                transcript.absorb(payload)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._drop()
            return self.on_upstream_lost(f"sent an event that cannot be used: {error}")
        if transcript.is_over:  # what follows is the stream's end, and the connection is kept
            return self._over() if is_end else None
        if is_end:
            return self.on_upstream_lost("ended its stream without a finish reason")
        is_told = transcript.is_streamed and transcript.is_safe and not transcript.awaits_prompt
        if events and is_told:
            self._tell(transcript.news())
        return None

    def _absorb_whole(self, transcript: AnyTranscript) -> None:
        try:
            transcript.absorb(loads(b"".join(self._buffer)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._drop()
            return self.on_upstream_lost(f"sent an answer that cannot be used: {error}")
        return self._over()

    def _whole_events(self) -> list[bytes]:
        """Take the events that are complete out of the buffer."""
        tail = self._buffer[-2][-3:] if len(self._buffer) > 1 else b""
        newest = tail + self._buffer[-1]
        end = b"\n\n" if b"\n\n" in newest else b"\r\n\r\n"
        if end not in newest:
            return []
        *events, rest = b"".join(self._buffer).split(end)
        self._buffer = [rest] if rest else []
        return events

    def on_upstream_lost(self, why: str) -> None:
        if self._transcript is not None and self._transcript.is_over:
            self._over()
        else:
            super().on_upstream_lost(why)

    def _prompt_taker(self) -> Callable[[PromptLogprobs], None] | None:
        transcript = self._transcript
        if not isinstance(transcript, Transcript) or not transcript.lacks_prompt:
            return None
        transcript.awaits_prompt = True
        return self._take_prompt

    def _take_prompt(self, logprobs: PromptLogprobs) -> None:
        transcript = self._transcript
        assert isinstance(transcript, Transcript)
        transcript.take_prompt(logprobs)
        if self._is_held:
            self._is_held = False
            self._over()

    def _over(self) -> None:
        transcript = self._transcript
        assert transcript is not None
        if transcript.awaits_prompt and not transcript.is_aborted:
            self._is_held = True  # its prefill engine is about to answer, or to be lost
            return
        if transcript.is_aborted and self._may_go_on():
            self._go_on_after_abort()
        else:
            self._complete()

    def _may_go_on(self) -> bool:
        admission = self._admission
        return admission is not None and not admission.is_aborted

    def _go_on_after_abort(self) -> None:
        """The engine was paused; the gate knows when and where this may go on."""
        admission = self._admission
        assert admission is not None
        engine_id, target = admission.member.engine_id, self._asked.route.target.decode()
        self._drop()
        self._leave()
        self._num_attempts -= 1
        self._continue(ConnectionFailure(engine_id, target, "aborted it", False, 0), not_on="")

    def _complete(self) -> None:
        transcript = self._transcript
        assert transcript is not None
        admission = self._admission
        counts = self._proxy.counts
        counts.num_tokens_recomputed += transcript.num_recomputed
        counts.num_tokens_kept += transcript.num_kept
        if self._session and (problem := self._record(transcript)):
            return self._end_with(answers.problem(502, "not_recorded", problem))
        if transcript.is_streamed:
            self._tell(transcript.news())
            self._client.write(self._framed(_DONE, is_last=True))
            self._drop()
            self._leave()
            self._finish()
            return None
        self._drop()
        body = dumps(transcript.payload())
        return self._whole(200, b"application/json", body, admission)

    def _record(self, transcript: AnyTranscript) -> str:
        """Keep the finished turn; or why it cannot be kept."""
        try:
            turn = transcript.turn()
        except (ValueError, KeyError, TypeError) as error:
            return f"engine {self._engine_id}: {error}"
        self._proxy.recordings.add(self._session, turn, self._proxy.now_s())
        return ""

    def _whole(
        self, status: int, content_type: bytes, body: bytes, admission: Admission | None
    ) -> None:
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        lines = (b"connection: close\r\n",) if self.is_last else ()
        self._leave()
        self._has_written = True
        signed = headers + (self._signature(admission) if admission is not None else [])
        self._client.write(reply_head(status, signed, *lines) + body)
        self._finish()

    def _tell(self, payloads: list[dict[str, Any]]) -> None:
        """Events to a client that wants a stream."""
        events = b"".join(b"data: " + dumps(one) + b"\n\n" for one in payloads)
        if not events:
            return
        head = b""
        if not self._has_written:
            assert self._admission is not None
            self._has_written = True
            self._is_event_stream = True
            self._is_close_delimited = not self._wants_chunks
            self.is_last = self.is_last or not self._wants_chunks
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                *self._signature(self._admission),
            ]
            lines = [b"transfer-encoding: chunked\r\n"] if self._wants_chunks else []
            lines += [b"connection: close\r\n"] if self.is_last else []
            head = reply_head(200, headers, *lines)
        self._client.write(head + self._framed(events))

    def _framed(self, data: bytes, *, is_last: bool = False) -> bytes:
        if not self._wants_chunks:
            return data
        return chunk(data) + (b"0\r\n\r\n" if is_last else b"")

    def _pass_on_refusal(self) -> None:
        """The engine said no, or answered otherwise than was asked: that is final."""
        if self._has_written:
            answer = answers.problem(
                502, "engine_refused", b"".join(self._buffer)[:200].decode("latin-1")
            )
            return self._break_off(answer)
        return self._whole(
            self._status, self._content_type, b"".join(self._buffer), self._admission
        )

    def _pass_on_error(self, payload: dict[str, Any]) -> None:
        error = payload["error"]
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code <= 599 else 500
        transcript = self._transcript
        assert transcript is not None
        if transcript.is_streamed:
            self._tell([payload])
            self._client.write(self._framed(_DONE, is_last=True))
            self._drop()
            self._leave()
            return self._finish()
        self._drop()
        body = dumps(payload)
        return self._whole(status, b"application/json", body, self._admission)

    # -- the seam ---------------------------------------------------------------------------

    def _fail_over(self, failure: ConnectionFailure) -> None:
        if self._transcript is None:
            super()._fail_over(failure)
        elif self._num_attempts > self._proxy.max_failovers:
            self._end_with(answers.engine_failed(failure))
        else:
            self._continue(failure, not_on=failure.engine_id)

    def _continue(self, failure: ConnectionFailure, *, not_on: str) -> None:
        transcript = self._transcript
        assert transcript is not None
        self._failure = failure
        transcript.lose_engine()
        if self._has_written and not transcript.can_continue:
            return self._end_with(answers.engine_failed(failure))
        self._proxy.counts.num_failovers += 1
        return self._enter(not_on)
