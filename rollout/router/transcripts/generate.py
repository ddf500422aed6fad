"""The tokens of one request over several engines, with exact accounting.

Always true:
- Token ids, log-probs and weight versions always keep equal length.
- There are never more tokens than the request's budget, and the finish reason comes from the engine
  that generated the last token.
- Routed experts come from the engine that computed the token.  Where the lost engine did not report
  them with its tokens (SGLang sends them at the end only), the request starts over.
- A continuation starts at a *safe* token: the text so far ends neither within a character nor with
  the beginning of a stop string, so the next engine sees every stop string complete.  A request
  that has lost several engines continues within a character too, which then shows as two
  replacement characters: otherwise it might never end.

Pure: events in, bodies and payloads out.  A failover is not exact in two ways: a seeded sampler
restarts, and penalties on repeated tokens see earlier tokens as prompt.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from engines.protocol.sampling_params import GRAMMARS
from rollout.router.http.fast_json import dumps
from rollout.router.http.request import wants_prompt_logprobs
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
    Payload,
    Transcript,
    finish_of,
    span_payloads,
    version_spans,
)
from rollout.router.transcripts.vllm import VllmEvents, to_vllm, why_not_vllm
from rollout.rules.continuation import Part, check_budget, join_experts

_DEFAULT_BUDGET = 128
# An engine's event has all tokens so far, so reading every event costs the square of their number.
_MAX_EVENTS = 64
_UNLIMITED = 1 << 16
# Failovers after which a request continues even where a character may be cut in two.
_STRICT_FAILOVERS = 2
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
    """A ``/generate`` request."""

    def __init__(self, raw: Payload, interval: int) -> None:
        self._sampling: Payload = dict(raw.get("sampling_params") or {})
        budget = self._sampling.get("max_new_tokens", _DEFAULT_BUDGET)
        super().__init__(raw, budget, self._sampling.get("stop"))
        self._safe = Part()
        self._first_meta: Payload = {}
        self._meta: Payload = {}
        self._other: Payload = {}
        self._interval = interval
        if not self.is_streamed:
            budget = _UNLIMITED if budget is None else budget
            self._interval = max(interval, budget // _MAX_EVENTS)
        self.can_continue = (
            raw.get("input_ids") is not None
            and not any(map(self._sampling.get, self._sampling.keys() & _CANNOT_CONTINUE))
            and not any(map(raw.get, raw.keys() & _OF_ONE_ENGINE))
        )
        self._prompt_logprobs: Mapping[str, list[Any]] = {}
        self._wants_experts = bool(raw.get("return_routed_experts"))
        self._experts = b""  # of the tokens of lost engines
        self._safe_experts: str | None = None
        self._vllm: VllmEvents | None = None

    @property
    def why_not_vllm(self) -> str:
        """Why no vLLM engine can answer it; empty if one can."""
        return why_not_vllm(self._raw)

    def prepare_recording(self) -> str:
        if not self._raw.get("input_ids"):
            return "a recorded turn needs its prompt as input_ids"
        self._raw["return_logprob"] = True
        return ""

    # -- to the engine ----------------------------------------------------------------------

    def body(self, version: int | None = None, *, is_vllm: bool = False) -> bytes:
        """The body for the next engine, in the form that this kind of engine takes.

        SGLang's events report their weight version; ``version`` is for vLLM's, which do not.
        """
        raw = self._for_next_engine()
        sampling, num_prompt = raw["sampling_params"], len(raw.get("input_ids") or ())
        self._vllm = VllmEvents(version, num_prompt, sampling) if is_vllm else None
        return dumps(to_vllm(raw) if is_vllm else raw)

    def _for_next_engine(self) -> Payload:
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
        return raw

    # -- from the engine --------------------------------------------------------------------

    def absorb(self, event: Mapping[str, Any]) -> None:
        """Take one event, with all ids of this engine so far, or only the new ones."""
        if self._vllm is not None:
            event = self._vllm.as_sglang(event)
        meta = dict(event.get("meta_info") or {})
        ids = list(event.get("output_ids") or [])
        reported = meta.get("completion_tokens", len(ids))
        before = self._now
        is_delta = len(before.ids) > 0 and len(ids) < reported == len(before.ids) + len(ids)
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
        elif self._is_safe(has_grown=len(now.text) > len(before.text)):
            self._safe = now
            self._safe_experts = meta.get("routed_experts")

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
        return self._is_complete(
            has_grown=has_grown or not (self._base.text or self._now.text),
            # After several failovers, progress matters more than one character of the text.
            is_strict=self.num_failovers < _STRICT_FAILOVERS,
        )

    @property
    def is_safe(self) -> bool:
        """Whether all text so far is final, so that it can be sent to the client."""
        return self.is_finished or self._safe is self._now

    # -- between two engines ----------------------------------------------------------------

    def lose_engine(self) -> None:
        """Go back to the last safe token, or to the prompt if tokens cannot be kept."""
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
        return len(self._raw["input_ids"]) + len(self._base.ids) + num_new - 1

    def _joined_experts(self, reported: str | None, num_new: int) -> bytes | None:
        """The experts of all tokens so far, of which this engine has added ``num_new``."""
        try:
            rows = base64.b64decode(reported or "")
        except (TypeError, ValueError):
            return None
        return join_experts(self._experts, rows, self._num_computed(num_new))

    # -- to the client ----------------------------------------------------------------------

    def payload(self) -> Payload:
        """The response so far, in the form of a single engine's reply."""
        whole = self._base.plus(self._now)
        first, last = self._first_meta, self._meta
        meta = {**last, **{name: first[name] for name in _FROM_FIRST_ENGINE if name in first}}
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

    def recorded_turn(self) -> Payload:
        """The finished request as a recorded turn."""
        payload = self.payload()
        meta = payload["meta_info"]
        return {
            "input_ids": self._raw["input_ids"],
            "output_ids": payload["output_ids"],
            "output_logprobs": [entry[0] for entry in meta.get("output_token_logprobs") or []],
            "weight_versions": meta["weight_versions"],
            "finish_reason": meta["finish_reason"],
        }


_FROM_FIRST_ENGINE = (
    "prompt_tokens",
    "cached_tokens",
    "input_token_logprobs",
    "input_top_logprobs",
)


def read_transcript(body: bytes, interval: int) -> GenerateTranscript | None:
    """The transcript of a ``/generate`` body; None if it requests more than one completion, or has
    a form that only the engine can judge.
    """
    raw = read_object(body)
    if raw is None or not has_forms(raw, _FORMS):
        return None
    sampling = raw.get("sampling_params") or {}
    is_single = sampling.get("n", 1) == 1 and sampling.get("beam_width") in (None, 1)
    if not is_single or not has_forms(sampling, _SAMPLING_FORMS):
        return None
    if raw.get("return_flat_raw_output_top_logprobs"):
        return None  # an engine refuses it on a stream, as which the router sends the request
    ids, text = raw.get("input_ids"), raw.get("text")
    if (token_ids_of(ids) is None or text is not None) and (
        not isinstance(text, str) or ids is not None
    ):
        return None
    return GenerateTranscript(raw, interval)
