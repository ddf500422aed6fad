"""vLLM's ``/inference/v1/generate``, and requests of ``/generate`` that vLLM answers in that form.

Always true: every token has the version of the engine that generated it.  The last event of an
engine has its spans; until then, and if the engine is lost before it, its tokens have the version
that it held when the request was sent.

Of a request with fields of which the next engine would not know what the first one did (a grammar,
several completions, log-probs of the prompt, images) no reply is read: it is forwarded as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.http.reply_check import (
    SAMPLING_MASK,
    check_columns,
    check_ids,
    check_logprobs,
    check_masks,
    check_versions,
)
from engines.vllm.routes import REQUEST_PREFIX
from engines.vllm.vllm_json import sampling_body
from rollout.router.continuation.core import Payload, span_payloads, version_spans
from rollout.router.continuation.dialects.sglang import fields_after
from rollout.router.continuation.forms import (
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
from rollout.router.continuation.parameters import NotCarried, is_forwarded, not_carried
from rollout.router.continuation.reply import EngineDialect, Reply
from rollout.router.http.fast_json import dumps
from rollout.router.http.request import wants_prompt_logprobs
from rollout.rules.continuation import Part

_TAKEN = frozenset(
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
_DEFAULT_BUDGET = 128
_STOP_UNSEEN = NotCarried(
    "stop_without_text",
    "without text, a stop string that the loss of an engine cuts in two is not seen",
)
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
    "return_sampling_mask": "",
    "logprob_start_len": "",
    "text": "",
    "affinity": "",
    "log_metrics": "",
}


def _take(reply: Reply, choice: Payload, columns: Mapping[str, Any]) -> None:
    """Take what an event of vLLM has, which is only what is new."""
    text, stop = choice.get("text") or "", choice.get("stop_reason")
    ids, spans = choice.get("token_ids") or [], choice.get("weight_versions")
    check_ids(ids, reply.vocabulary)
    reply.add(text, ids, columns)
    now = reply.now
    check_columns(now.columns, now.num)
    check_versions(str(reply.version), spans, now.num)
    now.spans = version_spans(spans, str(reply.version), now.num)
    reply.versions_sent = spans, None
    finish: Payload | None = None
    if kind := choice.get("finish_reason"):
        finish = {"type": kind} | ({} if stop is None else {"matched": stop})
        if reply.trims:
            reply.trim(stop)
    if finish or text or ids:
        # Of several tokens the last may have no text so far.
        has_grown = bool(text) and len(ids) <= 1
        reply.settle(finish, new=text, has_grown=has_grown)


# -- /inference/v1/generate -----------------------------------------------------------------


def read(body: bytes, interval: int, dialects: frozenset[str]) -> Reply | None:
    """The reply to a body, or None if it cannot continue on another engine."""
    raw = read_object(body)
    if raw is None or not {"token_ids", "sampling_params"} <= raw.keys():
        return None
    if _has_others(raw, _TAKEN) or not has_forms(raw, _FORMS):
        return None
    sampling = raw["sampling_params"]
    if is_forwarded(sampling, knows_all=True) or not has_forms(sampling, _SAMPLING_FORMS):
        return None
    if (raw.get("stream_options") or {}).get("continuous_usage_stats"):
        return None
    stop, has_text = sampling.get("stop"), raw.get("output_mode") == "text"
    reply = Reply(
        raw,
        prompt=raw["token_ids"],
        budget=sampling.get("max_tokens"),
        min_tokens=sampling.get("min_tokens"),
        stop=stop,
        # vLLM holds back text that may be the beginning of a stop string, but not its tokens: the
        # next engine would not send that text.
        trims=has_text and bool(stop) and not sampling.get("include_stop_str_in_output"),
        column="content" if sampling.get("logprobs") is not None else "",
        why_not=_STOP_UNSEEN if stop and not has_text else not_carried(sampling, dialects),
    )
    reply.has_text = has_text
    return reply


def _has_others(raw: Mapping[str, Any], known: frozenset[str]) -> bool:
    """Whether a field is set that is not known here; 0 sets one too, as in ``prompt_logprobs``."""
    return any(raw[name] is not None and raw[name] is not False for name in raw.keys() - known)


def _body_after(reply: Reply) -> bytes:
    sampling = dict(reply.raw["sampling_params"])
    raw = {**reply.raw, "sampling_params": sampling, "stream": True}
    raw["stream_options"] = {"include_usage": True}
    if reply.base.num:
        raw["token_ids"] = [*reply.prompt, *reply.base.ids]
    if reply.trims:
        sampling["include_stop_str_in_output"] = True
    reply.lower_limits(sampling, "max_tokens", least="min_tokens")
    reply.draw_on(sampling, "seed")
    return dumps(raw)


def _event(reply: Reply, event: Payload) -> None:
    reply.head = reply.head or {
        "request_id": reply.own_id(str(event.get("request_id") or "")),
        "output_mode": "text" if reply.has_text else "tokens",
    }
    usage = event.get("usage") or reply.last.get("usage") or {}
    experts = reply.last.get("routed_experts")
    for choice in event.get("choices") or []:
        experts = choice.get("routed_experts")
        if reply.base.num and experts is not None:
            raise ValueError("its routed experts are not those of the engine that was lost")
        logprobs = (choice.get("logprobs") or {}).get("content")
        check_logprobs([token.get("logprob") for token in logprobs or ()])
        _take(reply, choice, {"content": logprobs, "mask": choice.get("sampling_mask")})
    reply.last = {"usage": usage, "routed_experts": experts}


ENGINE = EngineDialect(_body_after, _event)


def chunks(reply: Reply) -> list[Payload]:
    """What is new, in the events of vLLM."""
    is_first, new = not reply.has_shown, reply.show_new()
    events: list[Payload] = []
    if new.ids or new.text or reply.is_finished:
        event: Payload = {**reply.head, "choices": [_choice(reply, new)]}
        if reply.raw.get("return_token_ids") and is_first:
            event["prompt_token_ids"] = reply.prompt
        events.append(event)
    if reply.is_finished and (reply.raw.get("stream_options") or {}).get("include_usage"):
        events.append({**reply.head, "choices": [], "usage": _usage(reply)})
    return events


def _choice(reply: Reply, part: Part) -> Payload:
    wants_logprobs = reply.raw["sampling_params"].get("logprobs") is not None
    finish = reply.finish or {}
    choice: Payload = {
        "index": 0,
        "token_ids": part.ids,
        "logprobs": {"content": part.columns.get("content", [])} if wants_logprobs else None,
        "finish_reason": finish.get("type"),
        "stop_reason": finish.get("matched", finish.get("message")),
        "routed_experts": reply.last.get("routed_experts") if reply.is_finished else None,
        "sampling_mask": part.columns.get("mask"),
        "weight_versions": span_payloads(reply.all().spans) if reply.is_finished else None,
    }
    return {**choice, "text": part.text} if reply.has_text else choice


def whole(reply: Reply) -> Payload:
    return {
        **reply.head,
        "model": reply.raw.get("model"),
        "usage": _usage(reply),
        "prompt_logprobs": None,
        "prompt_token_ids": reply.prompt if reply.raw.get("return_token_ids") else None,
        "choices": [_choice(reply, reply.all())],
        "num_failovers": reply.num_failovers,
        "num_recomputed_tokens": reply.num_recomputed,
    }


def _usage(reply: Reply) -> Payload:
    prompt, done = len(reply.prompt), reply.num
    counts = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
    return {**reply.last.get("usage", {}), **counts}


# -- /generate ------------------------------------------------------------------------------


def _why_not(reply: Reply) -> str:
    raw = reply.raw
    if reply.prompt is None:
        return "vLLM engines take /generate with input_ids, not with text"
    if wants_prompt_logprobs(raw):
        return "vLLM does not stream log-probs of the prompt; leave logprob_start_len out"
    if unknown := sorted(name for name in raw if raw[name] and name not in _NAMES):
        return f"vLLM engines do not take {', '.join(unknown)} in /generate; leave it out"
    try:
        to_vllm(raw)
    except ValueError as error:
        return str(error)
    try:
        len(reply.prompt.values)
    except ValueError as error:
        return f"input_ids: {error}"
    return ""


def to_vllm(raw: Mapping[str, Any]) -> Payload:
    """The streaming body for vLLM.

    Raises:
        ValueError: a sampling parameter that vLLM does not have.
    """
    wanted = dict(raw.get("sampling_params") or {})
    wanted.pop("stream_interval", None)
    wanted.setdefault("max_new_tokens", _DEFAULT_BUDGET)
    sampling = sampling_body({name: value for name, value in wanted.items() if value is not None})
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


def _translated_body_after(reply: Reply) -> bytes:
    raw = fields_after(reply)
    reply.trims = trims_stop(raw["sampling_params"])
    reply.draw_on(raw["sampling_params"], "sampling_seed")
    ids = [*reply.prompt, *reply.base.ids] if reply.base.num else reply.prompt
    return dumps(to_vllm({**raw, "input_ids": ids}))


def _translated_event(reply: Reply, event: Payload) -> None:
    (choice,) = event["choices"]
    entries = None
    if (logprobs := (choice.get("logprobs") or {}).get("content")) is not None:
        pairs = zip(logprobs, choice.get("token_ids") or [], strict=True)
        entries = [[logprob["logprob"], token, None] for logprob, token in pairs]
        check_logprobs([entry[0] for entry in entries])
    reply.has_text = True
    columns = {"output_token_logprobs": entries}
    if reply.wants_masks:
        columns[SAMPLING_MASK] = choice.get("sampling_mask") or []
        check_masks(choice.get("token_ids") or [], columns[SAMPLING_MASK], reply.vocabulary)
    _take(reply, choice, columns)
    reply.last = {
        "id": str(event.get("request_id") or "").removeprefix(REQUEST_PREFIX),
        "prompt_tokens": len(reply.prompt) + reply.base.num,
        "weight_version": reply.now.spans[-1].version if reply.now.spans else str(reply.version),
    }
    reply.first = reply.first or reply.last


TRANSLATED = EngineDialect(_translated_body_after, _translated_event, _why_not, is_translated=True)
