"""vLLM's JSON: bodies for ``/inference/v1/generate``, replies as values of ``protocol``.

Plain functions.  A reply of another shape raises as ``plain_json.WRONG_FORM`` has, which the client
turns into an error that names the engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from xxhash import xxh3_128_hexdigest

from engines.protocol import (
    FinishReason,
    GenerateReply,
    Loads,
    SamplingParams,
    TensorInfo,
    VersionSpan,
    WeightsReport,
)
from engines.protocol.types import NO_NUMBER
from engines.vllm.routes import REQUEST_PREFIX

EMPTY_CHECKSUM = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of no bytes: what ``/weight_checker`` reports of a weight that is stored elsewhere."""
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)
_KV_USE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? ([0-9.e+-]+)$", re.M)
_DRAFTS = re.compile(
    r"^vllm:spec_decode_num_(draft|accepted)_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.M
)
_OUTPUT_TOKENS = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.M)
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_AS_THEY_ARE = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "n",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)
_GRAMMARS = {
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


def sampling_body(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's sampling parameters for SGLang's, as ``SamplingParams.to_wire`` has them.

    Raises:
        ValueError: one that vLLM does not have, or two forms of the output.
    """
    body: dict[str, Any] = {}
    forms = [name for name in _GRAMMARS if sampling.get(name) is not None]
    if len(forms) > 1:
        raise ValueError(f"an output has one form, so leave out all but one of {', '.join(forms)}")
    for name, value in sampling.items():
        if name in _GRAMMARS:
            if value is not None:
                body["structured_outputs"] = {_GRAMMARS[name]: value}
        elif name in _RENAMED:
            body[_RENAMED[name]] = value
        elif name in _AS_THEY_ARE:
            body[name] = value
        elif value:
            raise ValueError(f"vLLM has no sampling parameter {name}; leave it out")
    return body


def generate_body(
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    rid: str | None = None,
    return_logprob: bool = False,
    wants_prompt: bool = False,
    model: str | None = None,
) -> dict[str, Any]:
    """The body for ``/inference/v1/generate``.

    Args:
        wants_prompt: log-probs of the prompt too.
        model: name of a loaded adapter.

    Raises:
        ValueError: more than one completion, or a parameter that vLLM does not have.
    """
    if sampling.n != 1:
        raise ValueError(f"generate makes one completion, not n={sampling.n}: call it again")
    params = sampling_body(sampling.to_wire())
    if return_logprob:
        params["logprobs"] = 0
    if wants_prompt:
        params["prompt_logprobs"] = 0
    body: dict[str, Any] = {
        "token_ids": list(token_ids),
        "sampling_params": params,
        "output_mode": "text",
    }
    if rid is not None:
        body["request_id"] = rid
    return body if model is None else body | {"model": model}


class ReplyReader:
    """Reads one completion, from one whole reply or from the events of a stream.

    Args:
        prompt: its token ids.
        prompt_from: first prompt token whose log-prob is wanted is the one after this, or None for
            none.
        version: weight version of tokens for which the server reports none.
    """

    def __init__(
        self, prompt: Sequence[int], *, prompt_from: int | None = None, version: str | None = None
    ) -> None:
        self._prompt = prompt
        self._prompt_from = prompt_from
        self._version = version
        self._rid = ""
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[float] | None = None
        self._spans: tuple[VersionSpan, ...] = ()
        self._finish: FinishReason | None = None
        self._cached = 0
        self._input_logprobs: tuple[float, ...] | None = None

    def add(self, event: Mapping[str, Any]) -> bool:
        """Take a whole reply, or the new tokens of an event; whether anything was in it."""
        self._rid = str(event.get("request_id") or self._rid).removeprefix(REQUEST_PREFIX)
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        self._cached = details.get("cached_tokens") or self._cached
        if self._prompt_from is not None and event.get("prompt_logprobs"):
            self._input_logprobs = self._of_prompt(event["prompt_logprobs"])
        choices = event["choices"]
        for choice in choices:
            self._add_choice(choice)
        return bool(choices)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        ids = choice.get("token_ids") or []
        self._ids += ids
        self._text += choice.get("text") or ""
        if (logprobs := choice.get("logprobs")) is not None:
            self._logprobs = self._logprobs or []
            found = (entry.get("logprob") for entry in logprobs["content"] or ())
            self._logprobs += [
                _number(None if logprob == NO_NUMBER else logprob) for logprob in found
            ]
            if len(self._logprobs) != len(self._ids):
                raise ValueError(f"{len(self._logprobs)} log-probs for {len(self._ids)} tokens")
        if choice.get("weight_versions"):
            self._spans = read_spans(choice["weight_versions"])
        if kind := choice.get("finish_reason"):
            self._finish = FinishReason(kind, matched=choice.get("stop_reason"))

    def _of_prompt(self, tokens: Sequence[Mapping[str, Any] | None]) -> tuple[float, ...]:
        start = max(0, self._prompt_from or 0)
        pairs = list(zip(self._prompt, tokens, strict=True))[start + 1 :]
        return tuple(_number((found or {})[str(token)]["logprob"]) for token, found in pairs)

    def reply(self) -> GenerateReply:
        """The completion as far as it has come."""
        spans = self._spans
        if not spans and self._version is not None and self._ids:
            spans = (VersionSpan(self._version, 0, len(self._ids)),)
        return GenerateReply(
            rid=self._rid,
            text=self._text,
            output_ids=tuple(self._ids),
            output_logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=self._finish,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(self._ids),
            cached_tokens=self._cached,
            weight_version=spans[-1].version if spans else self._version,
            weight_versions=spans,
            input_logprobs=self._input_logprobs,
        )


def without_output(reply: GenerateReply) -> GenerateReply:
    """What the prompt alone gives."""
    return replace(
        reply,
        text="",
        output_ids=(),
        output_logprobs=None if reply.output_logprobs is None else (),
        completion_tokens=0,
        weight_versions=(),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def read_spans(spans: Iterable[Mapping[str, Any]]) -> tuple[VersionSpan, ...]:
    """Weight versions of a completion's tokens."""
    return tuple(
        VersionSpan(version=str(span["version"]), start=span["start"], end=span["end"])
        for span in spans
    )


def read_loads(metrics: str) -> Loads:
    """Requests in the engine and its tokens, of all data-parallel ranks, from its metrics."""
    found = {"running": 0, "waiting": 0}
    for kind, number in _GAUGE.findall(metrics):
        found[kind] += int(float(number))
    counts = [int(float(number)) for number in _OUTPUT_TOKENS.findall(metrics)]
    drafts: dict[str, int] = {}
    for kind, number in _DRAFTS.findall(metrics):
        drafts[kind] = drafts.get(kind, 0) + int(float(number))
    return Loads(
        num_running_reqs=found["running"],
        num_waiting_reqs=found["waiting"],
        num_output_tokens=sum(counts) if counts else None,
        kv_use=max(map(float, _KV_USE.findall(metrics)), default=None),
        num_drafted=drafts.get("draft"),
        num_accepted=drafts.get("accepted", 0),
    )


def read_checksums(answer: Any) -> WeightsReport:
    """``/weight_checker``: SHA-256 of each parameter, by rank.

    Raises:
        ValueError: there are none, or one is of no bytes, which equals that of any weight.
    """
    by_rank: dict[str, dict[str, str]] = {}
    for name, checksum in answer["checksums"].items():
        if checksum == EMPTY_CHECKSUM:
            raise ValueError(
                f"the checksum of {name} is of no bytes: vLLM keeps this weight elsewhere, so "
                "equal checksums say nothing; start it with the plugin of this package"
            )
        rank, _, tensor = name.rpartition(":")
        by_rank.setdefault(rank, {})[tensor] = checksum
    return _report([by_rank[rank] for rank in sorted(by_rank)])


def read_fingerprints(answer: Any) -> WeightsReport:
    """The plugin's fingerprints of each worker's bytes."""
    workers = answer["results"]
    return _report(
        [dict(worker["checksums"]) for worker in workers],
        sum(worker.get("num_bytes") or 0 for worker in workers),
    )


def _report(ranks: Sequence[Mapping[str, str]], num_bytes: int | None = None) -> WeightsReport:
    if not ranks or not all(ranks):
        raise ValueError("it lists no weights")
    whole = xxh3_128_hexdigest(repr([sorted(rank.items()) for rank in ranks]).encode())
    return WeightsReport(whole, tuple(ranks), num_bytes=num_bytes)


def read_errors(answer: Any) -> list[str]:
    """Errors of the workers, each once."""
    return list(dict.fromkeys(result["error"] for result in answer["results"] if result["error"]))


def read_manifest(answer: Any) -> tuple[TensorInfo, ...]:
    """The plugin's list of the checkpoint's tensors, of all pipeline stages, or empty where a
    worker has other names."""
    workers = answer["results"]
    found = (
        {tensor["name"]: tensor for worker in workers for tensor in worker} if all(workers) else {}
    )
    return tuple(
        TensorInfo(
            tensor["name"], tensor["dtype"], tuple(tensor["shape"]), bool(tensor.get("is_tied"))
        )
        for tensor in found.values()
    )
