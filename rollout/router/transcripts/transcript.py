"""What transcripts of every kind of request share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engines.protocol import VersionSpan
from rollout.router.http.fast_json import Data, dumps, loads
from rollout.rules.continuation import Part

Payload = dict[str, Any]
END = sys.maxsize
# From so many ids before its first token SGLang begins to decode.
_WINDOW = 5
Event = tuple[bytes, int, int]
"""An event stands in these bytes, from the one position to the other."""
Decode = Callable[[Sequence[int]], str]
"""The text of token ids, by the model's tokenizer."""
UNUSABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What reading an engine's reply can raise, which may have any form."""


class Transcript:
    """What one request has received so far.

    Args:
        raw: the client's body.
        budget: the most tokens it may get; None for no limit.
        stop: its stop strings, as its client gave them.

    Attributes:
        wants_whole_reply: the engine must send one complete reply instead of events.
        is_streamed: its client wants events.
        can_continue: a lost engine's tokens can be kept; otherwise the request starts over.
        awaits_prompt_logprobs: a prefill engine has still to send them.
        decode: of the model's tokenizer; None where the router has none.
        num_kept: tokens carried over to another engine.
        num_recomputed: tokens that are generated a second time.
    """

    wants_whole_reply = False
    can_continue = False
    awaits_prompt_logprobs = False
    decode: Decode | None = None

    def __init__(self, raw: Payload, budget: int | None = None, stop: Any = None) -> None:
        self._raw = raw
        self._budget = budget
        self._stops: list[str] = [stop] if isinstance(stop, str) else list(stop or [])
        self._longest_stop = max(map(len, self._stops), default=1)
        self._base = Part()
        self._now = Part()
        self._finish: Payload | None = None
        self.is_streamed = bool(raw.get("stream"))
        self.num_kept = 0
        self.num_recomputed = 0
        self.num_failovers = 0

    def take(self, data: bytes, begin: int = 0, end: int = END) -> Payload | None:
        """Take one event as it came, which is this part of ``data``.

        Returns:
            It, if it is an error, and otherwise None.

        Raises:
            ``UNUSABLE``: it cannot be read.
        """
        payload = loads(data[begin:end])
        if "error" in payload:
            return dict(payload)
        self.absorb(payload)
        return None

    def absorb(self, event: Payload) -> None:
        """Take one event that was parsed."""
        raise NotImplementedError

    def read_all(self) -> None:
        """Parse the events that were taken and not parsed so far."""

    def payload(self) -> Payload:
        """The response so far, in the form of a single engine's reply."""
        raise NotImplementedError

    def reply(self) -> list[Data]:
        """The response as it is written, in parts."""
        return [dumps(self.payload())]

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    @property
    def is_aborted(self) -> bool:
        return self._finish is not None and self._finish.get("type") == "abort"

    @property
    def has_tokens_of_engine(self) -> bool:
        """Whether the current engine has sent tokens."""
        return self._now.num > 0 or bool(self._now.text)

    def _is_complete(self, *, has_grown: bool) -> bool:
        """Whether the text of all tokens is there, so that another engine may continue it.

        An engine holds back an incomplete character, and SGLang then also the text after the last
        space.  Only the tokenizer knows it for certain: of an event with several tokens, the last
        one may have no text so far.  A client's stop string must not be cut in two.
        """
        if self._budget is not None and self._base.num + self._now.num >= self._budget:
            return False  # only an engine can give the finish reason of the last token
        end = self._end_of_text(self._longest_stop)
        if self.decode is not None and self._now.ids:
            text = self.decode((self._base.ids[-_WINDOW:] + self._now.ids[-_WINDOW:])[-_WINDOW:])
            if not text or text.endswith("\ufffd"):
                return False
        elif not has_grown or end.endswith(("\ufffd", " ")):
            return False
        return not any(
            end.endswith(stop[:length]) for stop in self._stops for length in range(1, len(stop))
        )

    def _lower_limits(self, limits: Payload, most: str, least: str) -> None:
        """Take the tokens of lost engines off the limits, which have these names."""
        if self._budget is not None:
            limits[most] = self._budget - self._base.num
        lower_minimum(limits, least, self._base.num)

    def _end_of_text(self, num: int) -> str:
        """The last ``num`` characters of the text so far."""
        end = self._now.text[-num:]
        return end if len(end) == num else self._base.text[len(end) - num :] + end


def lower_minimum(limits: Payload, name: str, done: int) -> None:
    """Take ``done`` tokens off the least that a request wants, if it has such a limit."""
    if limits.get(name):
        limits[name] = max(0, limits[name] - done)


def without_stop(text: str, stop: str, min_tokens: int | None) -> str:
    """The text before its stop string; one before the minimum length did not count."""
    at = text.rfind(stop) if min_tokens else text.find(stop)
    return text if at < 0 else text[:at]


def finish_of(kind: Any) -> str:
    """The kind of a finish reason.

    Raises:
        ValueError: it is not a text.
    """
    if not isinstance(kind, str):
        raise ValueError(f"the finish reason {kind!r:.60} is not a text")
    return kind


def version_spans(meta: Payload, num: int) -> tuple[VersionSpan, ...]:
    """The weight versions of ``num`` tokens, each token in exactly one span."""
    spans: list[VersionSpan] = []
    end = 0
    for span in meta.get("weight_versions") or []:
        start, end_of_span = end, min(num, span["end"])
        if end_of_span > start:
            spans.append(VersionSpan(span["version"], start, end_of_span))
            end = end_of_span
    if end < num:
        version: Any = meta.get("weight_version", spans[-1].version if spans else None)
        spans.append(VersionSpan(version, end, num))
    return tuple(spans)


def span_payloads(spans: Iterable[VersionSpan]) -> list[Payload]:
    """Version spans as they go into JSON."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
