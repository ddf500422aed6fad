"""The tokens of one request over several engines, with exact accounting.

Always true:
- Token ids, log-probs and weight versions always keep equal length.
- There are never more tokens than the request's budget, and the finish reason comes from the engine
  that generated the last token.
- Routed experts come from the engine that computed the token.  Where the lost engine did not report
  them with its tokens (SGLang sends them at the end only), the request starts over.
- A continuation starts at a *safe* token: the text so far ends neither within a character nor with
  the beginning of a stop string, so the next engine sees every stop string complete.  Behind a part
  of a character SGLang would lose the rest of it, and vLLM would write the prompt's text.

Pure: events in, bodies and payloads out.  A failover is not exact in two ways: a seeded sampler
restarts, and penalties on repeated tokens see earlier tokens as prompt.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from engines.protocol.sampling_params import GRAMMARS
from rollout.router.http.fast_json import Data, dumps, loads
from rollout.router.http.request import wants_prompt_logprobs
from rollout.router.transcripts.json_parts import (
    BodyParts,
    PromptIds,
    is_unfinished,
    read_fields,
    split_body,
    split_event,
)
from rollout.router.transcripts.request_body import (
    has_forms,
    is_count,
    is_flag,
    is_object,
    is_stop,
    or_none,
    read_object,
    token_ids_of,
)
from rollout.router.transcripts.transcript import (
    END,
    UNUSABLE,
    Event,
    Payload,
    Transcript,
    finish_of,
    span_payloads,
    version_spans,
)
from rollout.router.transcripts.vllm import VllmEvents, to_vllm, why_not_vllm
from rollout.rules.continuation import Part, check_budget, join_experts

_DEFAULT_BUDGET = 128
# An engine's event has all tokens so far, so sending every event costs the square of their number.
_MAX_EVENTS = 64
# Of the events that are not parsed the last ones are kept: one of them may end at a safe token.
_NUM_UNREAD = 4
# Requests of training differ in their token ids and their own id only.
_NUM_FORMS = 64
_MAX_FORM_BYTES = 4096
_UNLIMITED = 1 << 16
_READ = frozenset({"text", "output_ids", "meta_info"})
_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_CANNOT_CONTINUE = frozenset({*GRAMMARS, "stop_regex", "custom_params"})
# What an engine reports of all tokens so far; the next engine would compute it from its own run.
_OF_ONE_ENGINE = frozenset(
    {
        "routed_experts_start_len",
        "return_indexer_topk",
        "return_hidden_states",
        "return_sampling_mask",
        "return_entropy",
        "return_flat_raw_top_logprobs",
        "return_prompt_token_ids",
        "custom_logit_processor",
        "session_params",
        "max_thinking_tokens",
    }
)
_FORMS = {
    "sampling_params": or_none(is_object),
    "stream": is_flag,
    "return_logprob": or_none(is_flag),
    "logprob_start_len": or_none(lambda value: value == -1 or is_count(value)),
}
_SAMPLING_FORMS = {
    "max_new_tokens": or_none(is_count),
    "min_new_tokens": or_none(is_count),
    "stop": or_none(is_stop),
}


class GenerateTranscript(Transcript):
    """A ``/generate`` request.

    If its client wants one complete response, events are parsed only when an engine is lost:
    SGLang's have all tokens so far, so the last one replaces the others.  The first events are
    parsed to see that.  The last one is passed on as it came, if no other engine did a part.

    Args:
        raw: the client's body, without its token ids.
        prompt: these, if it has any.
        interval: tokens between two events.
    """

    def __init__(self, raw: Payload, prompt: PromptIds | None, interval: int) -> None:
        self._sampling: Payload = dict(raw.get("sampling_params") or {})
        budget = self._sampling.get("max_new_tokens", _DEFAULT_BUDGET)
        super().__init__(raw, budget, self._sampling.get("stop"))
        self._interval = interval
        if not self.is_streamed:
            budget = _UNLIMITED if budget is None else budget
            self._interval = max(interval, budget // _MAX_EVENTS)
        self._prompt = prompt
        self.can_continue = (
            prompt is not None
            and not any(map(self._sampling.get, self._sampling.keys() & _CANNOT_CONTINUE))
            and not any(map(raw.get, raw.keys() & _OF_ONE_ENGINE))
        )
        self._safe = Part()
        self._first_meta: Payload = {}
        self._meta: Payload = {}
        self._other: Payload = {}
        self._prompt_logprobs: Mapping[str, list[Any]] = {}
        self._wants_experts = bool(raw.get("return_routed_experts"))
        self._experts = b""  # of the tokens of lost engines
        self._safe_experts: str | None = None
        self._vllm: VllmEvents | None = None
        self._has_text = True
        self._is_cumulative = False  # the current engine's events have all tokens so far
        self._unread: tuple[Event, ...] = ()
        self._has_gap = False  # events before these were not kept
        self._has_put_off = False  # an event of the current engine was not parsed when it came
        self._reply: list[Data] | None = None
        self._passes_on = not self.is_streamed and not self.lacks_prompt_logprobs
        self._fields = dumps(self._for_next_engine())

    def of_request(self, parts: BodyParts) -> GenerateTranscript:
        """A new one for another request, which has these parts and the same other fields."""
        new = GenerateTranscript.__new__(GenerateTranscript)
        new.__dict__.update(self.__dict__)
        new._prompt = parts.prompt
        if parts.rid is not None:
            new._raw = {**self._raw, "rid": parts.rid.decode()}
            new._fields = parts.with_rid(self._fields)
        return new

    @property
    def why_not_vllm(self) -> str:
        """Why no vLLM engine can answer it; empty if one can."""
        try:
            return why_not_vllm(self._raw_with_ids(self._raw))
        except ValueError as error:
            return f"input_ids: {error}"

    # -- to the engine ----------------------------------------------------------------------

    def body(self, version: int | None = None, *, is_vllm: bool = False) -> bytes:
        """The body for the next engine, in the form that this kind of engine takes.

        SGLang's events report their weight version; ``version`` is for vLLM's, which do not.
        """
        prompt, self._vllm = self._prompt, None
        if is_vllm:
            raw = self._raw_with_ids(self._for_next_engine())
            self._passes_on = False
            num_prompt = len(raw.get("input_ids") or ())
            self._vllm = VllmEvents(version, num_prompt, raw["sampling_params"])
            return dumps(to_vllm(raw))
        fields = dumps(self._for_next_engine()) if self._base.num else self._fields
        return fields if prompt is None else prompt.in_body(fields, self._base.ids)

    def _raw_with_ids(self, raw: Payload) -> Payload:
        if self._prompt is None:
            return raw
        return {**raw, "input_ids": [*self._prompt.values, *self._base.ids]}

    def _for_next_engine(self) -> Payload:
        """The fields of the next body except its token ids."""
        sampling = {**self._sampling, "stream_interval": self._interval}
        raw = {**self._raw, "stream": True, "sampling_params": sampling}
        if self._base.num:
            self._lower_limits(sampling, "max_new_tokens", "min_new_tokens")
            if raw.get("logprob_start_len") is not None:
                raw["logprob_start_len"] = -1
        return raw

    # -- from the engine --------------------------------------------------------------------

    def take(self, data: bytes, begin: int = 0, end: int = END) -> Payload | None:
        is_put_off = (
            self._is_cumulative and not self.is_streamed and is_unfinished(data, begin, end)
        )
        # The engine may be lost after its last event, before its reply has ended.
        if is_put_off or (self._passes_on and self._pass_on(data, begin, end)):
            self._put_off((data, begin, end))
            return None
        self.read_all()
        return super().take(data, begin, end)

    def _put_off(self, event: Event) -> None:
        self._has_gap |= len(self._unread) == _NUM_UNREAD
        self._unread = (*self._unread[1 - _NUM_UNREAD :], event)
        self._has_put_off = True

    def _pass_on(self, data: bytes, begin: int, end: int) -> bool:
        """Make the reply of the last event without parsing all of it, if that is possible."""
        parts = split_event(data, begin, end)
        if parts is None:
            return False
        meta, num, first = parts.meta, parts.num_ids, self._first_meta
        reason = meta.get("finish_reason")
        if not isinstance(reason, dict) or meta.get("completion_tokens") != num:
            return False
        kind = reason.get("type")
        if not isinstance(kind, str) or kind == "abort":
            return False
        if kind == "length" and reason.get("length") != num:
            return False
        if not meta.keys().isdisjoint(_ADDED) or (self._budget is not None and num > self._budget):
            return False
        for name in _PER_TOKEN:
            if (values := meta.get(name)) is not None and len(values) != num:
                return False
        if first and any(first[name] != meta.get(name) for name in _FROM_FIRST if name in first):
            return False
        span = {"version": meta.get("weight_version"), "start": 0, "end": num}
        self._reply = parts.with_meta(
            {
                "weight_versions": [span] if num else [],
                "num_failovers": 0,
                "num_recomputed_tokens": 0,
            }
        )
        self._finish = reason
        return True

    def read_all(self) -> None:
        if not self._unread:
            return
        events, self._unread = self._unread, ()
        follows, self._has_gap = not self._has_gap, False
        for data, begin, end in events:
            self.absorb(loads(data[begin:end]), follows=follows)
            follows = True

    def absorb(self, event: Mapping[str, Any], *, follows: bool = True) -> None:
        """Take one event, with all ids of this engine so far, or only the new ones.

        Args:
            follows: the event before it was absorbed too, so that its new text is known.
        """
        if self._vllm is not None:
            event = self._vllm.as_sglang(event)
        meta: Payload = event.get("meta_info") or {}
        ids = list(event.get("output_ids") or [])
        reported = meta.get("completion_tokens", len(ids))
        before = self._now
        has_part = 0 < len(ids) < reported
        if has_part and self._has_put_off:
            raise ValueError(f"{len(ids)} ids for {reported} tokens, after events with all ids")
        is_delta = has_part and len(before.ids) > 0 and reported == len(before.ids) + len(ids)
        self._is_cumulative = len(before.ids) > 0 and len(ids) == reported and self._vllm is None
        self._has_text = event.get("text") is not None  # else the engine has no tokenizer
        now = Part(event.get("text") or "", len(ids), ids)
        for name in _PER_TOKEN:
            if meta.get(name) is not None:
                now.logprobs[name] = list(meta[name])
        if is_delta:
            now.text = before.text + now.text
            now.ids = before.ids + now.ids
            now.num = len(now.ids)
            for name, values in now.logprobs.items():
                if len(values) < len(now.ids):
                    now.logprobs[name] = before.logprobs.get(name, []) + values
        now.spans = version_spans(meta, len(now.ids))
        for name, values in now.logprobs.items():
            if len(values) != now.num:
                raise ValueError(f"{len(values)} {name} for {now.num} tokens")
        check_budget(self._base.num + now.num, self._budget)
        reason = meta.get("finish_reason")
        if reason:
            finish_of(reason.get("type"))
        self._now = now
        self._meta = meta
        self._other = {name: value for name, value in event.items() if name not in _READ}
        self._first_meta = self._first_meta or meta
        if reason:
            self._finish = reason
        elif follows and self._is_safe(has_grown=len(now.text) > len(before.text)):
            self._safe = now
            self._safe_experts = meta.get("routed_experts")

    @property
    def has_tokens_of_engine(self) -> bool:
        return bool(self._unread) or super().has_tokens_of_engine

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """The client requests log-probs of the prompt, and no prefill engine has sent them."""
        return not self._prompt_logprobs and wants_prompt_logprobs(self._raw)

    def add_prompt_logprobs(self, logprobs: Mapping[str, list[Any]]) -> None:
        """Add the prompt's log-probs, from the prefill engine."""
        self.awaits_prompt_logprobs = False
        self._prompt_logprobs = logprobs

    def _is_safe(self, *, has_grown: bool) -> bool:
        """Whether a continuation may start after the last token."""
        return self._is_complete(has_grown=has_grown or not self._has_text)

    @property
    def is_safe(self) -> bool:
        """Whether all text so far is final, so that it can be sent to the client."""
        return self.is_finished or self._safe is self._now

    # -- between two engines ----------------------------------------------------------------

    def lose_engine(self) -> None:
        """Go back to the last safe token, or to the prompt if tokens cannot be kept."""
        with suppress(*UNUSABLE):  # what cannot be read is not kept
            self.read_all()
        if self.is_aborted and self._is_safe(has_grown=True):
            self._safe = self._now
            self._safe_experts = self._meta.get("routed_experts")
        had = len(self._base.ids) + len(self._now.ids)
        if self.can_continue and not self.awaits_prompt_logprobs and self._keep_experts():
            self._base = self._base.plus(self._safe)
            if self._base.ids:
                self.num_kept += len(self._safe.ids)
        else:
            self._base = Part()
            self._first_meta = {}
            self._experts = b""
        self.num_recomputed += had - len(self._base.ids)
        self.num_failovers += 1
        self._now = Part()
        self._safe = Part()
        self._safe_experts = None
        self._finish = None
        self._is_cumulative = self._passes_on = False
        self._unread = ()
        self._has_gap = self._has_put_off = False
        self._reply = None

    def _keep_experts(self) -> bool:
        """Keep the experts of the tokens that are kept; False if there are none of them."""
        if not self._wants_experts or not self._safe.ids:
            return True
        kept = self._joined_experts(self._safe_experts, len(self._safe.ids))
        if kept is None:
            self.can_continue = False  # nor can what a streaming client has
            return False
        self._experts = kept
        return True

    def _num_computed(self, num_new: int) -> int:
        """Tokens that were computed for ``num_new`` of this engine: all but the last one."""
        num_prompt = 0 if self._prompt is None else len(self._prompt)
        return num_prompt + len(self._base.ids) + num_new - 1

    def _joined_experts(self, reported: str | None, num_new: int) -> bytes | None:
        """The experts of all tokens so far, of which this engine has added ``num_new``."""
        try:
            rows = base64.b64decode(reported or "")
        except (TypeError, ValueError):
            return None
        return join_experts(self._experts, rows, self._num_computed(num_new))

    # -- to the client ----------------------------------------------------------------------

    def reply(self) -> list[Data]:
        return super().reply() if self._reply is None else self._reply

    def payload(self) -> Payload:
        self.read_all()
        whole = self._base.plus(self._now)
        first, last = self._first_meta, self._meta
        meta = {**last, **{name: first[name] for name in _FROM_FIRST if name in first}}
        meta["completion_tokens"] = len(whole.ids)
        meta["finish_reason"] = self._finish
        if self._finish is not None and self._finish.get("type") == "length":
            meta["finish_reason"] = {**self._finish, "length": len(whole.ids)}
        meta["weight_versions"] = span_payloads(whole.spans)
        meta.update(whole.logprobs)
        if self._experts and (self.is_finished or "routed_experts" in last):
            meta["routed_experts"] = self._all_experts()
        for name, values in self._prompt_logprobs.items():
            meta[name] = [*values, *(meta.get(name) or [])]
        meta["num_failovers"] = self.num_failovers
        meta["num_recomputed_tokens"] = self.num_recomputed
        return {**self._other, "text": whole.text, "output_ids": whole.ids, "meta_info": meta}

    def _all_experts(self) -> str:
        num_new = len(self._now.ids)
        joined = self._experts
        if num_new:
            found = self._joined_experts(self._meta.get("routed_experts"), num_new)
            if found is None:
                num = self._num_computed(num_new)
                raise ValueError(f"its routed experts are not those of {num} tokens")
            joined = found
        return base64.b64encode(joined).decode()

    def new_payloads(self) -> list[Payload]:
        """New events for a streaming client; like SGLang's, each has everything so far."""
        return [self.payload()]


_ADDED = ("weight_versions", "num_failovers", "num_recomputed_tokens")
_FROM_FIRST = (
    "prompt_tokens",
    "cached_tokens",
    "input_token_logprobs",
    "input_top_logprobs",
)


def read_transcript(body: bytes, interval: int) -> GenerateTranscript | None:
    """The transcript of a ``/generate`` body; None if it requests more than one completion, or has
    a form that only the engine can judge.
    """
    if (parts := split_body(body)) is not None:
        is_short = len(parts.fields) <= _MAX_FORM_BYTES
        read = _read_form if is_short else _read_form.__wrapped__
        if (form := read(parts.fields, interval)) is not None:
            return form.of_request(parts)
    raw = read_object(body)
    if raw is None:
        return None
    ids = token_ids_of(raw.get("input_ids"))
    if ids is not None:
        del raw["input_ids"]
    return _transcript_of(raw, None if ids is None else PromptIds.of(ids), interval)


@lru_cache(_NUM_FORMS)
def _read_form(fields: bytes, interval: int) -> GenerateTranscript | None:
    raw = read_fields(fields)
    return None if raw is None else _transcript_of(raw, PromptIds(b""), interval)


def _transcript_of(
    raw: Payload, prompt: PromptIds | None, interval: int
) -> GenerateTranscript | None:
    if not has_forms(raw, _FORMS):
        return None
    sampling = raw.get("sampling_params") or {}
    is_single = sampling.get("n", 1) == 1 and sampling.get("beam_width") in (None, 1)
    if not is_single or not has_forms(sampling, _SAMPLING_FORMS):
        return None
    if raw.get("return_flat_raw_output_top_logprobs"):
        return None  # an engine refuses it on a stream, as which the router sends the request
    text = raw.get("text")
    has_prompt = isinstance(text, str) if prompt is None else text is None
    if not has_prompt or raw.get("input_ids") is not None:
        return None
    return GenerateTranscript(raw, prompt, interval)
