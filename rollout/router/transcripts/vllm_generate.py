"""The tokens of one ``/inference/v1/generate`` request over several vLLM engines.

Always true: tokens, log-probs and sampling masks are those that the engines reported, in order;
every token has the version of the engine that generated it.  The last event of an engine has its
spans; until then, and if the engine is lost before it, its tokens have the version that it held
when the request was sent.

A request with fields of which the next engine would not know what the first one did (a grammar,
several completions, log-probs of the prompt, images) has no transcript, and is forwarded as it is.
Pure: events in, bodies and payloads out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.router.http.fast_json import dumps
from rollout.router.transcripts.request_body import (
    has_forms,
    is_count,
    is_flag,
    is_object,
    is_positive,
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
    without_stop,
)
from rollout.rules.continuation import Mark, Part, check_budget

_READ = frozenset(
    {
        "request_id",
        "token_ids",
        "sampling_params",
        "model",
        "output_mode",
        "stream",
        "stream_options",
        "cache_salt",
        "priority",
        "return_token_ids",
    }
)
_SAMPLING = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    }
)
_FORMS = {
    "token_ids": lambda value: bool(token_ids_of(value)),
    "sampling_params": is_object,
    "stream": or_none(is_flag),
    "stream_options": or_none(is_object),
    "output_mode": lambda value: value in ("tokens", "text"),
}
_SAMPLING_FORMS = {
    "n": lambda value: value == 1,
    "max_tokens": or_none(is_positive),
    "min_tokens": is_count,
    "stop": or_none(is_stop),
    "include_stop_str_in_output": is_flag,
}


class VllmTranscript(Transcript):
    """An ``/inference/v1/generate`` request."""

    def __init__(self, raw: Payload) -> None:
        self._sampling: Payload = dict(raw["sampling_params"])
        super().__init__(raw, self._sampling.get("max_tokens"), self._sampling.get("stop"))
        self._has_text = raw.get("output_mode") == "text"
        # vLLM holds back text that may be the beginning of a stop string, but not its tokens: the
        # next engine would not send that text.
        self._trims = bool(self._stops) and not self._sampling.get("include_stop_str_in_output")
        # Without text a stop string that is cut in two by the loss of an engine is not seen.
        self.can_continue = self._has_text or not self._stops
        self._version: int | None = None
        self._safe = Mark()
        self._is_safe = True
        self._sent = Mark()
        self._has_sent = False
        self._request_id = ""
        self._last: Payload = {}
        self._usage: Payload = {}

    # -- to the engine ----------------------------------------------------------------------

    def body(self, version: int | None) -> bytes:
        """The body for the next engine, which holds weight ``version``."""
        self._version = version
        sampling = dict(self._sampling)
        raw = {**self._raw, "sampling_params": sampling, "stream": True}
        raw["stream_options"] = {"include_usage": True}
        if self._trims and self._has_text:
            sampling["include_stop_str_in_output"] = True
        if self._base.num:
            raw["token_ids"] = [*self._raw["token_ids"], *self._base.ids]
            self._lower_limits(sampling, "max_tokens", "min_tokens")
        return dumps(raw)

    # -- from the engine --------------------------------------------------------------------

    def absorb(self, event: Mapping[str, Any]) -> None:
        """Take one event, which has only what is new."""
        self._request_id = self._request_id or str(event.get("request_id") or "")
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or []:
            self._absorb_choice(choice)

    def _absorb_choice(self, choice: Mapping[str, Any]) -> None:
        if self._base.num and choice.get("routed_experts") is not None:
            raise ValueError("its routed experts are not those of the engine that was lost")
        now, ids, text = self._now, choice.get("token_ids") or [], choice.get("text") or ""
        now.ids += ids
        now.num = len(now.ids)
        now.text += text
        logprobs = (choice.get("logprobs") or {}).get("content")
        for name, values in (("content", logprobs), ("mask", choice.get("sampling_mask"))):
            if values is not None:
                now.logprobs.setdefault(name, []).extend(values)
        for name, values in now.logprobs.items():
            if len(values) != now.num:
                raise ValueError(f"{len(values)} {name} for {now.num} tokens")
        reported = {"weight_versions": choice.get("weight_versions")}
        now.spans = version_spans(reported | {"weight_version": str(self._version)}, now.num)
        check_budget(self._base.num + now.num, self._budget)
        if kind := choice.get("finish_reason"):
            self._last = dict(choice)
            stop = choice.get("stop_reason")
            self._finish = {"type": finish_of(kind), "matched": stop}
            if self._trims and self._has_text and isinstance(stop, str):
                now.text = without_stop(now.text, stop, self._sampling.get("min_tokens"))
        elif ids or text:
            self._is_safe = self._ends_safely(has_grown=bool(text))
            if self._is_safe:
                self._safe = now.mark()

    def _ends_safely(self, *, has_grown: bool) -> bool:
        if self._has_text:
            return self._is_complete(has_grown=has_grown)
        # Only an engine can give the finish reason of the last token.
        return self._budget is None or self._base.num + self._now.num < self._budget

    @property
    def is_safe(self) -> bool:
        """Whether all text so far is final, so that it can be sent to the client."""
        return self.is_finished or self._is_safe

    # -- between two engines ----------------------------------------------------------------

    def lose_engine(self) -> None:
        """Go back to the last safe token, or to the prompt if tokens cannot be kept."""
        had = self._base.num + self._now.num
        now, safe = self._now, self._safe
        if self.is_aborted and self._ends_safely(has_grown=True):
            safe = now.mark()
        if self.can_continue:
            logprobs = {name: now.logprobs[name][:end] for name, end in safe.logprobs.items()}
            spans = version_spans({"weight_versions": span_payloads(now.spans)}, safe.num)
            kept = Part(now.text[: safe.text], safe.num, now.ids[: safe.ids], logprobs, spans)
            self._base = self._base.plus(kept if safe.num else Part())
            self.num_kept += safe.num
        else:
            self._base = Part()
        self.num_recomputed += had - self._base.num
        self.num_failovers += 1
        self._now, self._safe, self._is_safe = Part(), Mark(), True
        self._finish, self._last = None, {}

    # -- to the client ----------------------------------------------------------------------

    def new_payloads(self) -> list[Payload]:
        """New events for a streaming client."""
        whole, sent = self._base.plus(self._now), self._sent
        self._sent = whole.mark()
        logprobs = {
            name: values[sent.logprobs.get(name, 0) :] for name, values in whole.logprobs.items()
        }
        new = Part(whole.text[sent.text :], whole.num - sent.num, whole.ids[sent.ids :], logprobs)
        events: list[Payload] = []
        if new.ids or new.text or self.is_finished:
            event: Payload = {**self._head(), "choices": [self._choice(new)]}
            if self._raw.get("return_token_ids") and not self._has_sent:
                event["prompt_token_ids"] = self._raw["token_ids"]
            self._has_sent = True
            events.append(event)
        if self.is_finished and (self._raw.get("stream_options") or {}).get("include_usage"):
            events.append({**self._head(), "choices": [], "usage": self._whole_usage()})
        return events

    def _head(self) -> Payload:
        return {
            "request_id": self._request_id,
            "output_mode": "text" if self._has_text else "tokens",
        }

    def _choice(self, part: Part) -> Payload:
        content, mask = part.logprobs.get("content"), part.logprobs.get("mask")
        wants_logprobs = self._raw["sampling_params"].get("logprobs") is not None
        finish = self._finish or {"type": None, "matched": None}
        choice: Payload = {
            "index": 0,
            "token_ids": part.ids,
            "logprobs": {"content": content or []} if wants_logprobs else None,
            "finish_reason": finish["type"],
            "stop_reason": finish["matched"],
            "routed_experts": self._last.get("routed_experts"),
            "sampling_mask": mask,
            "weight_versions": self._spans() if self.is_finished else None,
        }
        return {**choice, "text": part.text} if self._has_text else choice

    def _spans(self) -> list[Payload]:
        return span_payloads(self._base.plus(self._now).spans)

    def payload(self) -> Payload:
        """The response so far, in the form of a single engine's complete reply."""
        prompt = self._raw["token_ids"] if self._raw.get("return_token_ids") else None
        return {
            **self._head(),
            "model": self._raw.get("model"),
            "usage": self._whole_usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": prompt,
            "choices": [self._choice(self._base.plus(self._now))],
            "num_failovers": self.num_failovers,
            "num_recomputed_tokens": self.num_recomputed,
        }

    def _whole_usage(self) -> Payload:
        prompt, done = len(self._raw["token_ids"]), self._base.num + self._now.num
        counts = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
        return {**self._usage, **counts}


def read_vllm(body: bytes) -> VllmTranscript | None:
    """The transcript of an ``/inference/v1/generate`` body; None if it cannot continue on another
    engine."""
    raw = read_object(body)
    if raw is None or not {"token_ids", "sampling_params"} <= raw.keys():
        return None
    if _has_others(raw, _READ) or not has_forms(raw, _FORMS):
        return None
    sampling = raw["sampling_params"]
    if _has_others(sampling, _SAMPLING):
        return None
    if (raw.get("stream_options") or {}).get("continuous_usage_stats"):
        return None
    return VllmTranscript(raw) if has_forms(sampling, _SAMPLING_FORMS) else None


def _has_others(raw: Mapping[str, Any], known: frozenset[str]) -> bool:
    """Whether a field is set that is not known here; 0 sets one too, as in ``prompt_logprobs``."""
    return any(raw[name] is not None and raw[name] is not False for name in raw.keys() - known)
