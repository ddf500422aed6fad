"""An engine's reply read as tokens, so that its request can continue on another engine (pure).

The request is sent streaming even if its client wants one complete response, so that the tokens so
far are known when the engine dies.  A reply that breaks, an engine that is reported as lost and an
abort that the client did not request lead to the same: the exchange enters the gate again, and the
next engine gets the prompt and the tokens so far.

Always true: a reader knows neither exchange nor connection nor gate, and what it is given leads to
at most one action.  No event or reply of an engine raises an error here; one that cannot be used
ends its request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engines.http.reply_check import NotFinite
from engines.protocol.plain_text import describe, shortened
from rollout.router.continuation.core import UNUSABLE, Payload
from rollout.router.continuation.fast_path import Event
from rollout.router.continuation.named_weights import NamedWeights
from rollout.router.continuation.reply import Reply
from rollout.router.http.fast_json import dumps, loads
from rollout.router.http.head_cache import ReplyHead
from rollout.router.proxy.engine_errors import status_of
from rollout.router.proxy.prefill_decode import PromptLogprobs

_DONE = b"data: [DONE]\n\n"
_LONGEST_DONE = 16
_WHY_CHARACTERS = 300
_STREAM_ENDS = "its engine was paused, and no engine goes on with what its client has"


class Context(NamedTuple):
    """What the end of a reply depends on, besides the reply.

    Attributes:
        may_continue: an abort can come from a pause: the client did not request it, and engines
            do not abort it again and again.
        refusal_in_pause: status with which the engine refuses what comes after a pause; 0 for none.
    """

    may_continue: bool
    refusal_in_pause: int = 0


OPEN, FINAL = Context(may_continue=True), Context(may_continue=False)
"""What an abort means with an open gate, and where it is the end of the request."""


def _events(payloads: list[Payload], *, is_end: bool) -> bytes:
    """Server-sent events of a stream; with ``is_end`` they are its last."""
    events = b"".join([b"data: %s\n\n" % dumps(payload) for payload in payloads])
    return events + _DONE if is_end else events


class Write(NamedTuple):
    """More events of a stream go to the client."""

    events: bytes


class Finish(NamedTuple):
    """The response ends: with the last events of a stream, or as a whole.

    Attributes:
        body: in parts; an error that is no event is JSON.
        content_type: None for a stream.
        why_not_continued: why an abort could not continue on another engine, if it could not.
    """

    body: list[Any]
    status: int = 200
    content_type: bytes | None = b"application/json"
    why_not_continued: str = ""


class Again(NamedTuple):
    """The engine was paused, so the request goes through the gate again.

    Attributes:
        why: it left this engine.
    """

    why: str


class Unusable(NamedTuple):
    """The reply cannot be used.  The request may be the cause."""

    why: str


class Broken(NamedTuple):
    """The reply shows that its engine has failed, whatever it says of itself."""

    why: str


class Refused(NamedTuple):
    """The engine's reply is an error, which may say that the engine is lost.

    Attributes:
        error: its payload, or the body that has it.
        end: what the client gets otherwise.
    """

    status: int
    error: Any
    end: Finish


Action = Write | Finish | Again | Unusable | Broken | Refused


def why_unusable(error: Exception) -> str:
    """Why a reply cannot be used whose reading has raised this."""
    why = describe(error, with_type=True)  # it may quote the reply
    return f"its reply cannot be used: {shortened(why, _WHY_CHARACTERS)}"


@dataclass(eq=False, slots=True)
class TokenReader:
    """Reads the replies of the engines that one request is sent to, one after the other.

    Attributes:
        reply: so far, over all engines.
        named: the weights that answer, if an adapter is one of them.
        may_show: whether the tokens so far may go to a streaming client now; None: they may.
        has_answered: the current engine has begun to answer, and not with an error.
        waits_for_prompt: its reply has ended, and the prefill engine's has not.
    """

    reply: Reply
    named: NamedWeights | None = None
    may_show: Callable[[], bool] | None = None
    has_answered: bool = False
    waits_for_prompt: bool = False
    _buffer: list[bytes] = field(default_factory=list)
    _status: int = 0
    _content_type: bytes = b""
    _is_unexpected: bool = False

    # -- to the engine ----------------------------------------------------------------------

    def body(self, weight_version: int | None, dialect: str) -> bytes:
        """The request's body for the next engine, where these weights answer it."""
        return self.reply.body(weight_version, dialect)

    def await_prompt(self) -> bool:
        """Whether the prompt's log-probs have to come from the prefill engine."""
        if self.reply.lacks_prompt_logprobs:
            self.reply.awaits_prompt_logprobs = True
            return True
        return False

    def lose_engine(self) -> str:
        """Go back to the last safe token.  Returns why its tokens cannot be kept, or empty."""
        self.waits_for_prompt = False
        return self.reply.lose_engine()

    def start_over(self) -> None:
        """Forget all tokens, of which the client has none."""
        self.waits_for_prompt = False
        self.reply.start_over()

    # -- the engine's reply -----------------------------------------------------------------

    def begin(self, head: ReplyHead) -> None:
        """The head of an engine's reply."""
        self._buffer = []
        self.has_answered = False
        content_type = next((value for name, value in head.headers if name == b"content-type"), b"")
        is_whole = self.reply.wants_whole_reply
        expected = b"application/json" if is_whole else b"text/event-stream"
        self._is_unexpected = head.status != 200 or not content_type.startswith(expected)
        self._status = head.status
        self._content_type = content_type

    def take(self, data: bytes, context: Context | None) -> Action | None:
        """Data of the reply.

        Args:
            context: with the last of it, or None before.
        """
        self._buffer.append(data)
        try:
            if self._is_unexpected:
                return None if context is None else self._refusal(context)
            if self.reply.wants_whole_reply:
                return None if context is None else self._take_whole(context)
            return self._take_events(context)
        except NotFinite as error:
            return Broken(str(error))
        except UNUSABLE as error:
            return Unusable(why_unusable(error))

    def take_loss(self, context: Context) -> Action | None:
        """The engine is lost.  None if it has not sent its last token."""
        if not self.reply.is_finished:
            return None
        try:
            return self._end(context)
        except UNUSABLE as error:
            return Unusable(why_unusable(error))

    def abort(self) -> Finish | None:
        """End the reply with the tokens so far.  None if there are none, or they cannot be read."""
        reply = self.reply
        try:
            reply.read_all()
            if not reply.num:
                return None
            reply.finish = reply.finish or {"type": "abort", "message": "Aborted"}
            return self._finish()
        except UNUSABLE:
            return None

    def take_prompt(self, logprobs: PromptLogprobs, context: Context) -> Action | None:
        """The log-probs of the prompt, from the prefill engine."""
        self.reply.add_prompt_logprobs(logprobs)
        if not self.waits_for_prompt:
            return None
        self.waits_for_prompt = False
        return self.take_loss(context)

    def _take_events(self, context: Context | None) -> Action | None:
        reply, events = self.reply, self._whole_events()
        if events and (error := self._read(events)) is not None:
            return self._error(error)
        if context is not None and not reply.is_finished:
            reply.read_all()
        if events:
            self.has_answered = True
        if context is None:
            # What follows the last token is the stream's end, and the connection is kept.
            return self._news() if events and not reply.is_finished else None
        if reply.is_finished:
            return self._end(context)
        return Unusable("ended its stream without a finish reason")

    def _read(self, events: list[Event]) -> dict[str, Any] | None:
        """Take these events, up to the first that is an error, which is returned.

        Of many that came together the last three are read: one of these may end at a safe token,
        and one may be the end of the stream.
        """
        first_read = len(events) - 3
        for place, (data, begin, end) in enumerate(events):
            if place < first_read and self.reply.may_leave_out(data, begin, end):
                continue
            if end - begin <= _LONGEST_DONE and data[begin:end].strip() == b"[DONE]":
                continue
            if self.named is not None:
                data, begin = dumps(self._stamped(loads(data[begin:end]))) + b"\n", 0
                end = len(data) - 1
            if (error := self.reply.take(data, begin, end)) is not None:
                return error
        return None

    def _stamped(self, payload: Any) -> Any:
        """A payload of the engine, in which an adapter has its own version."""
        return payload if self.named is None else self.named.stamped(payload)

    def _news(self) -> Write | None:
        """The events for a streaming client, as far as the text is final."""
        reply = self.reply
        if not reply.is_streamed or not reply.is_safe or reply.awaits_prompt_logprobs:
            return None
        if self.may_show is not None and not self.may_show():
            return None
        payloads = reply.new_payloads()
        return Write(_events(payloads, is_end=False)) if payloads else None

    def _take_whole(self, context: Context) -> Action | None:
        self.reply.absorb(self._stamped(loads(b"".join(self._buffer))))
        self.has_answered = True
        return self._end(context)

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

    def _end(self, context: Context) -> Action | None:
        reply, why_not = self.reply, ""
        if reply.awaits_prompt_logprobs and not reply.is_aborted:
            self.waits_for_prompt = True  # its prefill engine will reply, or be lost
            return None
        if reply.is_aborted and context.may_continue:
            # A client that has a part which no engine can continue gets the abort.
            why_not = reply.why_refused() if reply.has_shown else ""
            if not why_not:
                return Again("aborted it")
            message = f"{_STREAM_ENDS}: {reply.in_words(why_not)}"
            reply.finish = {**(reply.finish or {}), "message": message}
        return self._finish(why_not)

    def _finish(self, why_not_continued: str = "") -> Finish:
        """The end of a reply that has a finish reason."""
        reply = self.reply
        if reply.is_streamed:
            return self._end_of_stream(reply.new_payloads(), why_not_continued)
        return Finish(reply.written(), why_not_continued=why_not_continued)

    def _refusal(self, context: Context) -> Action:
        """A refusal or an unexpected kind of reply, which is final."""
        if self._status == context.refusal_in_pause and context.may_continue:
            return Again("refused it")
        body = b"".join(self._buffer)
        return Refused(self._status, body, Finish([body], self._status, self._content_type))

    def _error(self, payload: dict[str, Any]) -> Refused:
        """The same for an error event."""
        status = status_of(payload)
        if self.reply.is_streamed:
            return Refused(status, payload, self._end_of_stream([payload]))
        return Refused(status, payload, Finish([dumps(payload)], status))

    def _end_of_stream(self, payloads: list[Payload], why_not_continued: str = "") -> Finish:
        events = _events(payloads, is_end=True)
        return Finish([events], 200, None, why_not_continued)
