"""Requests of ``/generate`` in the form of vLLM's ``/inference/v1/generate``, and its events back.

Pure.  vLLM's events have only what is new, and its weight versions come with the last one: until
then a token has the version that the engine held when the request was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.vllm.routes import REQUEST_PREFIX
from engines.vllm.vllm_json import sampling_body
from rollout.router.http.request import wants_prompt_logprobs
from rollout.router.transcripts.transcript import Payload, without_stop

_DEFAULT_BUDGET = 128
# Of SGLang's requests, with what vLLM calls them; without a name where it needs none.
_NAMES = {
    "input_ids": "token_ids",
    "rid": "request_id",
    "extra_key": "cache_salt",
    "lora_path": "model",
    "priority": "priority",
    "sampling_params": "",
    "stream": "",
    "return_logprob": "",
    "logprob_start_len": "",
    "text": "",
    "affinity": "",
    "log_metrics": "",
}


def why_not_vllm(raw: Mapping[str, Any]) -> str:
    """Why a ``/generate`` body cannot be sent to vLLM; empty if it can."""
    if raw.get("input_ids") is None:
        return "vLLM engines take /generate with input_ids, not with text"
    if wants_prompt_logprobs(raw):
        return "vLLM does not stream log-probs of the prompt; leave logprob_start_len out"
    if unknown := sorted(name for name in raw if raw[name] and name not in _NAMES):
        return f"vLLM engines do not take {', '.join(unknown)} in /generate; leave it out"
    try:
        to_vllm(raw)
    except ValueError as error:
        return str(error)
    return ""


def to_vllm(raw: Mapping[str, Any]) -> Payload:
    """The streaming body for vLLM.

    Raises:
        ValueError: a sampling parameter that vLLM does not have.
    """
    wanted = dict(raw.get("sampling_params") or {})
    wanted.pop("stream_interval", None)
    wanted.setdefault("max_new_tokens", _DEFAULT_BUDGET)
    sampling = sampling_body({name: one for name, one in wanted.items() if one is not None})
    if raw.get("return_logprob"):
        sampling["logprobs"] = 0
    if trims_stop(wanted):
        sampling["include_stop_str_in_output"] = True
    body: Payload = {"sampling_params": sampling, "output_mode": "text", "stream": True}
    for name, theirs in _NAMES.items():
        if theirs and raw.get(name) is not None:
            body[theirs] = raw[name]
    return body


def trims_stop(sampling: Mapping[str, Any]) -> bool:
    """Whether the text ends before its stop string.  vLLM then sends tokens before their text,
    which would be lost with the engine; so it has to send all text, and the router trims it."""
    return bool(sampling.get("stop")) and not sampling.get("no_stop_trim")


class VllmEvents:
    """Turns the events of one vLLM engine into SGLang's.

    Args:
        version: weight version that the engine held when the request was sent.
        num_prompt: tokens of the prompt that was sent.
        sampling: the parameters that were sent, in SGLang's names.
    """

    def __init__(self, version: int | None, num_prompt: int, sampling: Mapping[str, Any]) -> None:
        self._version = None if version is None else str(version)
        self._num_prompt = num_prompt
        self._trims = trims_stop(sampling)
        self._min_tokens = sampling.get("min_new_tokens")
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[Any] | None = None

    def as_sglang(self, event: Mapping[str, Any]) -> Payload:
        """The same as an event of SGLang that has only what is new; everything, where the text is
        trimmed."""
        (choice,) = event["choices"]
        ids, text = choice.get("token_ids") or [], choice.get("text") or ""
        self._ids += ids
        self._text += text
        finish = _finish(choice)
        meta: Payload = {
            "id": str(event.get("request_id") or "").removeprefix(REQUEST_PREFIX),
            "prompt_tokens": self._num_prompt,
            "completion_tokens": len(self._ids),
            "weight_version": self._version,
            "finish_reason": finish,
        }
        entries: list[Any] = []
        logprobs = (choice.get("logprobs") or {}).get("content")
        if logprobs is not None or self._logprobs is not None:
            pairs = zip(logprobs or [], ids, strict=True)
            entries = [[one["logprob"], token, None] for one, token in pairs]
            self._logprobs = self._logprobs or []
            self._logprobs += entries
        if spans := choice.get("weight_versions"):
            meta["weight_versions"] = spans
            meta["weight_version"] = spans[-1]["version"]
        stop = finish.get("matched") if finish is not None and self._trims else None
        if isinstance(stop, str):
            text = without_stop(self._text, stop, self._min_tokens)
            ids, entries = self._ids, self._logprobs or []
        if self._logprobs is not None:
            meta["output_token_logprobs"] = entries
        return {"text": text, "output_ids": ids, "meta_info": meta}


def _finish(choice: Mapping[str, Any]) -> Payload | None:
    kind = choice.get("finish_reason")
    if kind is None:
        return None
    found: Payload = {"type": kind}
    if choice.get("stop_reason") is not None:
        found["matched"] = choice["stop_reason"]
    return found
