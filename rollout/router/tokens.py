"""The tokens of one request over several engines, with exact accounting.

Always true:
- ids, log-probs and weight versions are as many as each other, at every moment.
- Never more tokens than the request's budget, and a finish reason only from an engine that gave
  it for the last token there is.
- What a continuation starts from is *safe*: its text ends neither within a character nor with
  the beginning of a stop string, so the engine that continues sees every stop string whole.  A
  request that has lost several engines goes on within a character too, which then shows as two
  replacement characters: it would never end if its text is seldom whole.

Pure: events in, bodies and payloads out.  Not exact across a seam: a seeded sampler starts anew,
and penalties on repeated tokens see earlier ones as prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.router.message import asks_prompt_logprobs

Payload = dict[str, Any]

_DEFAULT_BUDGET = 128
# An engine's event tells all tokens so far, so the cost of looking grows with their square.
_MOST_LOOKS = 64
# Seams after which a request goes on also where a character may be cut in two.
_STRICT_SEAMS = 2
_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_STARTS_ANEW = ("regex", "json_schema", "ebnf", "structural_tag", "stop_regex", "custom_params")


@dataclass(slots=True)
class _Part:
    """Tokens in a row with their log-probs, versions and text.

    Attributes:
        logprobs: by name of the per-token list.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    spans: list[Payload] = field(default_factory=list)


class Transcript:
    """What one ``/generate`` request has got so far.

    Attributes:
        answers_whole: its engine is asked for one answer instead of events.
        is_streamed: its client wants events.
        can_continue: a lost engine's tokens can be kept; otherwise it starts from nothing.
        awaits_prompt: they are still to come, from a prefill engine.
        num_kept: tokens carried over seams.
        num_recomputed: tokens that had come and are generated again.
    """

    answers_whole = False

    def __init__(self, raw: Payload, interval: int) -> None:
        self._raw = raw
        self._sampling: Payload = dict(raw.get("sampling_params") or {})
        budget = self._sampling.get("max_new_tokens", _DEFAULT_BUDGET)
        self._budget: int | None = budget if isinstance(budget, int) else None
        stop = self._sampling.get("stop")
        self._stops = [stop] if isinstance(stop, str) else list(stop or [])
        self._base = _Part()
        self._now = _Part()
        self._safe = _Part()
        self._first_meta: Payload = {}
        self._meta: Payload = {}
        self._finish: Payload | None = None
        self.is_streamed = bool(raw.get("stream"))
        self._interval = interval
        if self._budget is not None and not self.is_streamed:
            self._interval = max(interval, self._budget // _MOST_LOOKS)
        self.can_continue = isinstance(raw.get("input_ids"), list) and not any(
            self._sampling.get(name) for name in _STARTS_ANEW
        )
        self.awaits_prompt = False
        self._of_prompt: Mapping[str, list[Any]] = {}
        self.num_kept = 0
        self.num_recomputed = 0
        self.num_seams = 0

    def record(self) -> str:
        """Have the engine tell what a recorded turn needs; or why it cannot be recorded."""
        if not self._raw.get("input_ids"):
            return "a recorded turn needs its prompt as input_ids"
        self._raw["return_logprob"] = True
        return ""

    # -- to the engine ----------------------------------------------------------------------

    def body(self, _version: int | None = None) -> bytes:
        """The request for the engine that goes on; its own events say which version it holds."""
        sampling = {**self._sampling, "stream_interval": self._interval}
        raw = {**self._raw, "stream": True, "sampling_params": sampling}
        done = len(self._base.ids)
        if done:
            raw["input_ids"] = [*self._raw["input_ids"], *self._base.ids]
            if self._budget is not None:
                sampling["max_new_tokens"] = self._budget - done
            if sampling.get("min_new_tokens"):
                sampling["min_new_tokens"] = max(0, sampling["min_new_tokens"] - done)
            if raw.get("logprob_start_len") is not None:
                raw["logprob_start_len"] = -1
        return json.dumps(raw).encode()

    # -- from the engine --------------------------------------------------------------------

    def absorb(self, event: Mapping[str, Any]) -> None:
        """Take one event; its ids are all of this engine's so far, or only the new ones."""
        meta = dict(event.get("meta_info") or {})
        ids = list(event.get("output_ids") or [])
        told = meta.get("completion_tokens", len(ids))
        before = self._now
        is_delta = len(before.ids) > 0 and len(ids) < told == len(before.ids) + len(ids)
        now = _Part(ids, str(event.get("text") or ""))
        for name in _PER_TOKEN:
            if meta.get(name) is not None:
                now.logprobs[name] = list(meta[name])
        if is_delta:
            now.text = before.text + now.text
            now.ids = before.ids + now.ids
            for name, values in now.logprobs.items():
                if len(values) < len(now.ids):
                    now.logprobs[name] = before.logprobs.get(name, []) + values
        now.spans = version_spans(meta, len(now.ids))
        problem = self._problem(now)
        if problem:
            raise ValueError(problem)
        self._now = now
        self._meta = meta
        self._first_meta = self._first_meta or meta
        reason = meta.get("finish_reason")
        if reason:
            self._finish = reason
        elif self._is_safe(now, has_grown=len(now.text) > len(before.text)):
            self._safe = now

    @property
    def lacks_prompt(self) -> bool:
        """Its client asks for log-probs of the prompt, and no prefill engine has told them."""
        return not self._of_prompt and asks_prompt_logprobs(self._raw)

    def take_prompt(self, logprobs: Mapping[str, list[Any]]) -> None:
        """The prompt's log-probs, from its prefill engine."""
        self.awaits_prompt = False
        self._of_prompt = logprobs

    def _problem(self, now: _Part) -> str:
        for name, values in now.logprobs.items():
            if len(values) != len(now.ids):
                return f"{len(values)} {name} for {len(now.ids)} tokens"
        total = len(self._base.ids) + len(now.ids)
        if self._budget is not None and total > self._budget:
            return f"{total} tokens, {self._budget} asked for"
        return ""

    def _is_safe(self, now: _Part, *, has_grown: bool) -> bool:
        """A continuation may start after ``now``."""
        if self._budget is not None and len(self._base.ids) + len(now.ids) >= self._budget:
            return False  # the finish reason of the last token has to come from an engine
        has_text = bool(self._base.text + now.text)
        return not has_text or is_whole(
            self._base.text + now.text,
            self._stops,
            has_grown=has_grown,
            # Its tokens count more than one character of its text: a request must get on.
            is_strict=self.num_seams < _STRICT_SEAMS,
        )

    @property
    def is_safe(self) -> bool:
        """All that has come may be shown: it will not be taken back."""
        return self.is_over or self._safe is self._now

    @property
    def is_over(self) -> bool:
        return self._finish is not None

    @property
    def is_aborted(self) -> bool:
        return self._finish is not None and self._finish.get("type") == "abort"

    # -- the seam ---------------------------------------------------------------------------

    def lose_engine(self) -> None:
        """Go back to the last safe token, or to none if this request starts from nothing."""
        if self.is_aborted and self._is_safe(self._now, has_grown=True):
            self._safe = self._now
        had = len(self._base.ids) + len(self._now.ids)
        if self.can_continue and not self.awaits_prompt:
            self._base = _joined(self._base, self._safe)
            if self._base.ids:
                self.num_kept += len(self._safe.ids)
        else:
            self._base = _Part()
            self._first_meta = {}
        self.num_recomputed += had - len(self._base.ids)
        self.num_seams += 1
        self._now = _Part()
        self._safe = _Part()
        self._finish = None

    # -- to the client ----------------------------------------------------------------------

    def payload(self) -> Payload:
        """The answer so far, as one engine would have told it."""
        whole = _joined(self._base, self._now)
        first, last = self._first_meta, self._meta
        meta = {**last, **{name: first[name] for name in _OF_FIRST if name in first}}
        meta["completion_tokens"] = len(whole.ids)
        meta["finish_reason"] = self._finish_reason(len(whole.ids))
        meta["weight_versions"] = whole.spans
        meta.update(whole.logprobs)
        for name, values in self._of_prompt.items():
            meta[name] = [*values, *(meta.get(name) or [])]
        meta["num_failovers"] = self.num_seams
        meta["num_recomputed_tokens"] = self.num_recomputed
        return {"text": whole.text, "output_ids": whole.ids, "meta_info": meta}

    def news(self) -> list[Payload]:
        """The events that tell a streaming client what is new: SGLang's tell all so far."""
        return [self.payload()]

    def turn(self) -> Payload:
        """The finished request as a recorded turn."""
        payload = self.payload()
        meta = payload["meta_info"]
        return {
            "input_ids": self._raw["input_ids"],
            "output_ids": payload["output_ids"],
            "output_logprobs": [one[0] for one in meta.get("output_token_logprobs") or []],
            "weight_versions": meta["weight_versions"],
            "finish_reason": meta["finish_reason"],
        }

    def _finish_reason(self, num: int) -> Payload | None:
        if self._finish is not None and self._finish.get("type") == "length":
            return {**self._finish, "length": num}
        return self._finish


_OF_FIRST = ("prompt_tokens", "cached_tokens", "input_token_logprobs", "input_top_logprobs")


def version_spans(meta: Payload, num: int) -> list[Payload]:
    """The versions of ``num`` tokens, each token in exactly one span."""
    given = meta.get("weight_versions") or []
    spans: list[Payload] = []
    for span in given:
        start, end = max(0, span["start"]), min(num, span["end"])
        if spans:
            start = spans[-1]["end"]
        elif start:
            start = 0
        if end > start:
            spans.append({"version": span["version"], "start": start, "end": end})
    covered = spans[-1]["end"] if spans else 0
    if covered < num:
        version = meta.get("weight_version", spans[-1]["version"] if spans else None)
        spans.append({"version": version, "start": covered, "end": num})
    return spans


def _joined(one: _Part, other: _Part) -> _Part:
    if not one.ids:
        return other
    spans = join_spans(one.spans, other.spans, len(one.ids))
    names = one.logprobs.keys() | other.logprobs.keys()
    return _Part(
        one.ids + other.ids,
        one.text + other.text,
        {name: one.logprobs.get(name, []) + other.logprobs.get(name, []) for name in names},
        spans,
    )


def join_spans(one: list[Payload], other: list[Payload], at: int) -> list[Payload]:
    """The version spans of ``at`` tokens, and of those that came after them."""
    spans = [dict(span) for span in one]
    for span in other:
        moved = {**span, "start": span["start"] + at, "end": span["end"] + at}
        if spans and spans[-1]["version"] == moved["version"]:
            spans[-1]["end"] = moved["end"]
        else:
            spans.append(moved)
    return spans


def is_whole(text: str, stops: Sequence[str], *, has_grown: bool, is_strict: bool = True) -> bool:
    """Nothing of the tokens that made ``text`` is held back, so another engine may go on after it.

    An engine holds back what may become another character, and SGLang then also what stands
    between it and the last space; a client's stop string must not be cut in two.
    """
    if is_strict and (not has_grown or text.endswith(("\ufffd", " "))):
        return False
    return not any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


def read_transcript(body: bytes, interval: int) -> Transcript | None:
    """The transcript of a ``/generate`` body; None if it asks for more than one completion."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("sampling_params") or {}, dict):
        return None
    ids, text = raw.get("input_ids"), raw.get("text")
    is_single = isinstance(text, str) or (
        isinstance(ids, list) and all(type(one) is int for one in ids)
    )
    if not is_single or (raw.get("sampling_params") or {}).get("n", 1) != 1:
        return None
    return Transcript(raw, interval)
