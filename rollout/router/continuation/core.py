"""The tokens of one request over several engines: what was kept, what was shown, where to go on.

Always true:
- Token ids, columns and weight versions of kept tokens have equal length, and there are never more
  tokens than the request's budget.  The finish reason is that of an engine, or of an abort.
- A request continues from token ids, or not at all: without the ids, or a column that its client
  wants, of each kept token it starts over, unless its client has a part of the reply.
- A continuation starts at a *safe* token: the text so far ends neither within a character nor with
  the beginning of a stop string, so the next engine sees every stop string complete.  Behind a part
  of a character SGLang would lose the rest of it, and vLLM would write the prompt's text.
- Text that was sent to the client is never taken back.
- Log-probs of one reply are of one kind: behind an engine of another kind it starts over, or ends.

- The reply is that of one engine, as far as ``parameters`` says.

Pure, and without JSON: ``dialects`` read bodies and events, and write them.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from engines.http.reply_check import MOST_IDS, SAMPLING_MASK
from engines.plain_json import WRONG_FORM
from engines.protocol import VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.router.continuation.parameters import CARRIED, NotCarried
from rollout.rules.continuation import Part, check_budget, join_experts, seed_after

Payload = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
"""The text of token ids, by the model's tokenizer."""
UNUSABLE = WRONG_FORM
"""What reading an engine's reply can raise, which may have any form."""
_START: tuple[int, int, str | None] = (0, 0, None)
# From so many ids before its first token SGLang begins to decode.
_WINDOW = 5


class Reported(NamedTuple):
    """Weight versions of tokens, as their engine reports them.

    Attributes:
        each: values of all tokens so far, or None where it does not say which token has which.
        last: value of the last token, and no token is newer, or None where it reports none.
    """

    each: tuple[str, ...] | None = None
    last: str | None = None


_NOT_SENT = (None, None)


class RefusedByEngine(Exception):
    """An engine refuses the request in its stream, before the first token.

    Attributes:
        payload: the error, as a reply with status 400 has it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.payload: Payload = {
            "error": {"message": message, "type": "BadRequestError", "code": 400}
        }


class Experts:
    """Routed experts of a reply's tokens, in base64: one row for each token that was computed.

    Args:
        is_wanted: the client requests them.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        self._rows, self._num_rows = b"", 0

    def joined(self, reported: str | None, num: int) -> bytes | None:
        """Routed experts of ``num`` tokens, each from the engine that computed the token first.

        Args:
            reported: the experts that the current engine reports, for the prompt and all tokens.

        Returns:
            None if ``reported`` is not of ``num`` tokens.
        """
        try:
            rows = base64.b64decode(reported or "")
        except (TypeError, ValueError):
            return None
        return join_experts(self._rows, rows, num)

    def are_missing(self, reported: str | None, num: int) -> bool:
        """These are not those of ``num`` tokens that were computed."""
        return self.is_wanted and self.joined(reported, num) is None

    def keep(self, reported: str | None, num: int) -> None:
        """Keep those of ``num`` tokens, if they are wanted."""
        if self.is_wanted:
            self._rows, self._num_rows = self.joined(reported, num) or b"", num

    def start_over(self) -> None:
        """Keep none."""
        if self.is_wanted:
            self._rows, self._num_rows = b"", 0

    def whole(self, reported: str | None, num: int) -> str:
        """Routed experts of ``num`` tokens, or an empty text if no earlier engine has reported any.

        Raises:
            ValueError: the current engine reports another number of tokens.
        """
        if not self._rows:
            return ""
        joined = self._rows if num == self._num_rows else self.joined(reported, num)
        if joined is None:
            raise ValueError(f"its routed experts are not those of {num} tokens")
        return base64.b64encode(joined).decode()


class Continuation:
    """What one request has received so far.

    Args:
        raw: the client's body, for its dialects.
        prompt: its token ids, as far as they are known.
        budget: the most tokens it may get, or None for no limit.
        min_tokens: the least; 0 for none.
        stop: its stop strings, as its client gave them.
        trims: the router cuts the text before a stop string, because the engines do not.
        column: column with an entry for each token, if the reply is to be continued.
        why_not: why no other engine can continue it.

    Attributes:
        not_carried: the same.
        column: column with an entry for each token, if its client wants log-probs; else empty.
        wants_masks: its client wants what each token was drawn from.
        is_streamed: its client wants events.
        prompt_logprobs: log-probs of the prompt, from a prefill engine.
        awaits_prompt_logprobs: it has still to send them.
        vocabulary: how many tokens the model of the current engine has, as far as that is known.
        decode: the decoder of the model's tokenizer, or None where the router has none.
        has_text: the engines send text; a stop string is not seen otherwise.
        version: version of the current engine's weights when it got the request.
        versions_sent: weight versions as the current engine has sent them: spans of the tokens, or
            None where it has sent none, and the version of the last one, if it has sent that.
        logprob_kind: kind of the log-probs so far, and of the current engine's.
        base: tokens of lost engines.
        now: tokens of the current engine.
        head: fields of the reply that are of no token and no engine.
        first: fields of the reply that are of the prompt, from the first engine.
        last: fields of the reply that are of no token, from the last event.
        finish: the reason, with its ``type``.
        reasoning: text before the answer's own.
        has_begun: its client has the beginning of a stream, without any text.
        experts: routed experts of lost engines, if any are wanted.
        reported_experts: routed experts of the current engine.
        safe_end: tokens, characters and reported experts of ``now`` up to the safe token.
        num_kept: tokens carried over to another engine.
        num_recomputed: tokens that are generated a second time.
    """

    def __init__(
        self,
        raw: Payload,
        *,
        prompt: Any = None,
        budget: int | None = None,
        min_tokens: int | None = None,
        stop: Any = None,
        trims: bool = False,
        column: str = "",
        why_not: NotCarried = CARRIED,
    ) -> None:
        self.raw = raw
        self.prompt = prompt
        self.budget = budget
        self.min_tokens = min_tokens or 0
        self.trims = trims
        self.not_carried = why_not
        self.is_streamed = bool(raw.get("stream"))
        self.vocabulary = MOST_IDS
        self.decode: Decode | None = None
        self.has_text = True
        self._stops: list[str] = [stop] if isinstance(stop, str) else list(stop or [])
        self._longest_stop = max(map(len, self._stops), default=1)
        self.column = column
        self.wants_masks = bool(raw.get("return_sampling_mask"))
        self.version: int | None = None
        self.versions_sent: tuple[Any, str | None] = _NOT_SENT
        self.logprob_kind: LogprobKind | None = None
        self.head: Payload = {}
        self.first: Payload = {}
        self.last: Payload = {}
        self.finish: Payload | None = None
        self.reasoning = ""
        self.prompt_logprobs: Mapping[str, list[Any]] = {}
        self.awaits_prompt_logprobs = False
        self.num_kept = self.num_recomputed = self.num_failovers = 0
        self.has_begun = False
        self._is_safe = True
        self._has_stop = False
        self.safe_end = _START
        self._sent_num = self._sent_text = self._sent_ids = self._sent_reasoning = 0
        self.experts = Experts(is_wanted=bool(raw.get("return_routed_experts")))
        self.reported_experts: str | None = None
        self.base = Part()
        self.begin()

    @property
    def reported(self) -> Reported:
        """Weight versions of the current engine's tokens, as it has reported them."""
        spans, last = self.versions_sent
        if spans is None:
            return Reported(last=last)
        each = tuple(span.version for span in self.now.spans)
        return Reported(each, each[-1] if each else last)

    def begin(self) -> None:
        """Have parts of its own, as a copy of one that has received nothing."""
        self.now = Part()
        self._sent_columns: dict[str, int] = {}
        if self.experts.is_wanted:
            self.experts = Experts(is_wanted=True)

    # -- from the engine --------------------------------------------------------------------

    def add(self, text: str, ids: Sequence[int], columns: Mapping[str, Any]) -> None:
        """Take new tokens of the current engine; a column may be None.

        Raises:
            ValueError: they are more than the budget.
        """
        now = self.now
        now.text += text
        now.ids += ids
        now.num = len(now.ids)
        for name, values in columns.items():
            if values is not None:
                now.columns.setdefault(name, []).extend(values)
        check_budget(self.base.num + now.num, self.budget)

    def add_prompt(self, ids: list[int]) -> None:
        """Take the ids of the prompt that the engine got.

        Raises:
            ValueError: these are not those of the first engine and the tokens since then.
        """
        if self.prompt is not None and ids != [*self.prompt, *self.base.ids]:
            raise ValueError("its prompt has other token ids than prompt and answer so far")
        self.prompt = ids if self.prompt is None else self.prompt

    def add_prompt_logprobs(self, logprobs: Mapping[str, list[Any]]) -> None:
        """Take the prompt's log-probs, from the prefill engine."""
        self.awaits_prompt_logprobs = False
        self.prompt_logprobs = logprobs

    def settle(self, finish: Payload | None, *, new: str, has_grown: bool) -> None:
        """Note whether another engine may continue after the last token.

        Args:
            finish: finish reason of the event; a client sees an abort's, or another engine
                continues.
            new: its text.
            has_grown: it had text, or its tokens have none.
        """
        if finish is not None:
            finish_of(finish.get("type"))
            self.finish = finish
            if not self.is_aborted:
                return
        if self.trims and not self._has_stop:
            end = self._end_of_text(self._longest_stop + len(new))
            self._has_stop = any(stop in end for stop in self._stops)
        self._is_safe = not self._has_stop and self._is_complete(has_grown=has_grown)
        if self._is_safe:
            self.safe_end = self.now.num, len(self.now.text), self.reported_experts

    def _is_complete(self, *, has_grown: bool) -> bool:
        """Whether the text of all tokens is there, so that another engine may continue it.

        An engine holds back an incomplete character, and SGLang then also the text after the last
        space.  Only the tokenizer knows it for certain: of an event with several tokens, the last
        one may have no text so far.  A client's stop string must not be cut in two.
        """
        if self.budget is not None and self.base.num + self.now.num >= self.budget:
            return False  # only an engine can give the finish reason of the last token
        if not self.has_text:
            return True
        end = self._end_of_text(self._longest_stop)
        if self.decode is not None and self.now.ids:
            text = self.decode((self.base.ids[-_WINDOW:] + self.now.ids[-_WINDOW:])[-_WINDOW:])
            if not text or text.endswith("\ufffd"):
                return False
        elif not has_grown or end.endswith(("\ufffd", " ")):
            return False
        return not self._stops or not any(
            end.endswith(stop[:length]) for stop in self._stops for length in range(1, len(stop))
        )

    def _end_of_text(self, num: int) -> str:
        """The last ``num`` characters of the text so far."""
        end = self.now.text[-num:]
        return end if len(end) == num else self.base.text[len(end) - num :] + end

    def trim(self, stop: Any) -> None:
        """Cut the text before its stop string; one before the minimum length did not count."""
        if not isinstance(stop, str):
            return
        text = self.base.text + self.now.text
        at = text.rfind(stop) if self.min_tokens else text.find(stop)
        if at >= 0:
            self.now.text = text[len(self.base.text) : at]

    # -- between two engines ----------------------------------------------------------------

    @property
    def why_not(self) -> str:
        """Why no other engine can continue it, in one word."""
        return self.not_carried.why

    @property
    def is_finished(self) -> bool:
        return self.finish is not None

    @property
    def is_aborted(self) -> bool:
        return self.finish is not None and self.finish.get("type") == "abort"

    @property
    def is_safe(self) -> bool:
        """Whether all text so far is final, so that it can be sent to the client."""
        return self.is_finished or self._is_safe

    @property
    def has_tokens_of_engine(self) -> bool:
        """Whether the current engine has sent tokens."""
        return self.now.num > 0 or bool(self.now.text)

    @property
    def num(self) -> int:
        """Tokens so far."""
        return self.base.num + self.now.num

    def num_computed(self, num_new: int) -> int:
        """Tokens that were computed for ``num_new`` of this engine: all but the last one."""
        num_prompt = 0 if self.prompt is None else len(self.prompt)
        return num_prompt + len(self.base.ids) + num_new - 1

    def why_refused(self) -> str:
        """Why the tokens so far cannot be continued, in one word."""
        if not (self.base.num or self.has_tokens_of_engine or self.reasoning):
            return ""
        if self.why_not:
            return self.why_not
        kept = self._safe_part()
        if not (self.base.num or kept.num or kept.text):
            return ""
        if self.prompt is None:
            return "prompt_unknown"
        if len(kept.ids) != kept.num or (kept.text and not kept.num):
            return "ids_missing"
        # A column that stays empty was not requested: SGLang sends ``top_logprobs`` like that.
        if any(len(values) not in (0, kept.num) for values in kept.columns.values()) or (
            self.column and len(kept.columns.get(self.column, ())) != kept.num
        ):
            return "logprobs_missing"
        if self.wants_masks and len(kept.columns.get(SAMPLING_MASK, ())) != kept.num:
            return "mask_missing"
        num, experts = self.num_computed(kept.num), self.safe_end[2]
        if kept.num and self.experts.are_missing(experts, num):
            return "experts_missing"
        return ""

    def in_words(self, why: str) -> str:
        """What a client gets as the reason, for one of ``why_refused``."""
        found = self.not_carried
        if why == found.why and found.because:
            return found.because
        return f"its tokens so far cannot be kept: {why} (docs/failures.md#failover)"

    def lose_engine(self) -> str:
        """Go back to the last safe token, or to the prompt if tokens cannot be kept.

        Returns:
            Why they cannot, in one word, or empty if they are.
        """
        had, kept, why = self.num, self._safe_part(), self.why_refused()
        if why or self.awaits_prompt_logprobs:
            self._start_over()
        else:
            if kept.num:
                self.experts.keep(self.safe_end[2], self.num_computed(kept.num))
            self.base = self.base.plus(kept)
            self.num_kept += kept.num
        self.num_recomputed += had - self.base.num
        self.num_failovers += 1
        self.now, self.last, self.safe_end = Part(), {}, _START
        self.reported_experts = None
        self.versions_sent = _NOT_SENT
        self.finish, self._is_safe, self._has_stop = None, True, False
        return why

    def start_over(self) -> None:
        """Forget all tokens, of which its client has none."""
        num_kept = self.num_kept
        self.lose_engine()
        self.num_kept = num_kept
        self.num_recomputed += self.base.num
        self._start_over()
        self._sent_num = self._sent_text = self._sent_ids = self._sent_reasoning = 0
        self._sent_columns = {}
        self.has_begun = False

    def _start_over(self) -> None:
        self.base, self.first, self.reasoning = Part(), {}, ""
        self.experts.start_over()

    def goes_on_with(self, kind: LogprobKind) -> bool:
        """Whether tokens whose log-probs are of this kind may follow those so far."""
        return not (self.wants_logprobs and self.base.num) or kind is self.logprob_kind

    def follow_with(self, kind: LogprobKind) -> None:
        """The next engine's log-probs are of this kind; tokens of another one are dropped."""
        if not self.goes_on_with(kind):
            self.num_recomputed += self.base.num
            self._start_over()
        self.logprob_kind = kind

    @property
    def wants_logprobs(self) -> bool:
        """Its client wants the log-probs of its tokens."""
        return bool(self.column)

    def _safe_part(self) -> Part:
        return self.now.up_to(*self.safe_end[:2])

    @property
    def has_shown(self) -> bool:
        """Its client has a part of the answer."""
        return bool(self._sent_num or self._sent_text or self._sent_reasoning)

    def lower_limits(self, limits: Payload, *most: str, least: str) -> None:
        """Take the tokens of lost engines off the limits, which have these names."""
        if not self.base.num:
            return
        if self.budget is not None:
            present = [name for name in most if limits.get(name) is not None] or most[:1]
            limits |= dict.fromkeys(present, self.budget - self.base.num)
        if limits.get(least):
            limits[least] = max(0, limits[least] - self.base.num)

    def draw_on(self, sampling: Payload, name: str) -> None:
        """Have other random numbers than the tokens so far, at an engine that would begin with
        those again: then tokens would depend on each other in a way that the model does not say."""
        if self.base.num and isinstance(seed := sampling.get(name), int) and seed >= 0:
            sampling[name] = seed_after(seed, self.base.num)

    # -- to the client ----------------------------------------------------------------------

    def all(self) -> Part:
        """Everything so far; it may be ``now`` itself."""
        return self.base.plus(self.now)

    def show_all(self) -> Part:
        """Everything so far, which is sent now."""
        whole = self.all()
        self._sent_num, self._sent_text = whole.num, len(whole.text)
        return whole

    def show_new(self) -> Part:
        """What was received since the last call; it never repeats text that was sent."""
        base, now, sent = self.base, self.now, self._sent_columns
        columns = {
            name: _after(base.columns.get(name, []), now.columns.get(name, []), sent.get(name, 0))
            for name in base.columns.keys() | now.columns.keys()
        }
        new = Part(
            _after(base.text, now.text, self._sent_text),
            self.num - self._sent_num,
            _after(base.ids, now.ids, self._sent_ids),
            columns,
        )
        self._sent_num += new.num
        self._sent_text += len(new.text)
        self._sent_ids += len(new.ids)
        for name, values in columns.items():
            sent[name] = sent.get(name, 0) + len(values)
        return new

    def show_reasoning(self) -> str:
        """The same for the reasoning."""
        new = self.reasoning[self._sent_reasoning :]
        self._sent_reasoning = len(self.reasoning)
        return new


def _after(before: Any, now: Any, start: int) -> Any:
    """Two texts or lists in a row, from index ``start`` on."""
    if start >= len(before):
        return now[start - len(before) :]
    return before[start:] + now


def finish_of(kind: Any) -> str:
    """The kind of a finish reason.

    Raises:
        ValueError: it is not a text.
    """
    if not isinstance(kind, str):
        raise ValueError(f"the finish reason {kind!r:.60} is not a text")
    return kind


def version_spans(
    reported: Iterable[Payload] | None, version: Any, num: int
) -> tuple[VersionSpan, ...]:
    """The weight versions of ``num`` tokens, each token in exactly one span.

    Args:
        reported: spans of the engine, which may be of more tokens, or of fewer.
        version: version of the tokens behind them, or None for the last span's.
    """
    if not reported and num:
        return (VersionSpan(version, 0, num),)
    spans: list[VersionSpan] = []
    end = 0
    for span in reported or ():
        start, end_of_span = end, min(num, span["end"])
        if end_of_span > start:
            spans.append(VersionSpan(span["version"], start, end_of_span))
            end = end_of_span
    if end < num:
        if version is None and spans:
            version = spans[-1].version
        spans.append(VersionSpan(version, end, num))
    return tuple(spans)


def span_payloads(spans: Iterable[VersionSpan]) -> list[Payload]:
    """Weight versions, as they go into JSON."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
